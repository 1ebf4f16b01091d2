"""A few entities answer as all rows do: the online evaluation against the compiled plan, cell by cell to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.online_bench import view, write_asked
from support.serving_bench import bits, pipeline_of

from headway.declaration import PipelineSpec
from headway.features.assemble import companions
from headway.features.kernel import AGGREGATES, NonFiniteValue, collapse
from headway.features.online.entity_rows import ScopePlan, decode, exponents
from headway.features.online.plain import typed_column
from headway.features.online.scopes import Scopes, column_types, entities, row_versions, scopes_of
from headway.features.online.store import NO_ENTITY, EntityRow, RowVersion
from headway.features.online.views import WORDS as REASONS
from headway.features.online.views import answer, view_plan
from headway.features.plan import Cells, FeaturePlan, UndecidedTie, compile_plan, prepare
from headway.loading import Pipeline

COLUMNS = {
    "k": "string",
    "j": "int64",
    "id": "int64",
    "at": "timestamp",
    "known": "timestamp",
    "value": "float64",
    "word": "string",
    "seq": "int64",
    "gone": "bool",
}
WINDOWS = {f"{a}_{d}": {"window": "value", "aggregate": a, "duration": d} for a in AGGREGATES for d in ("2us", "5us")}
WORDS = {"words": {"window": "word", "aggregate": "distinct", "duration": "4us"}}
NEWEST = {"value": {"latest": "value"}, "word": {"latest": "word"}, "at": {"latest": "at"}}
TIES = ["event_time", "available_time", "sequence", "row_id"]
VIEWS = {
    "lt": view(boundary="lt", lookback="3us", tie_break=TIES, features=NEWEST),
    "le": view(boundary="le", tie_break=TIES, features=NEWEST),
    "known": view(boundary="le", lookback="2us", null_policy="last_known", tie_break=TIES, features=NEWEST),
    "pair": view(keys={"j": "j", "k": "k"}, boundary="lt", lookback="4us", tie_break=TIES, features=NEWEST),
    "w_lt": view(boundary="lt", features=WINDOWS),
    "w_le": view(boundary="le", features={**WINDOWS, **WORDS}),
    "strict": view(boundary="le", features={"value": {"latest": "value"}}),
}
_STAMP = pa.timestamp("us", tz="UTC")
_FLOAT = pa.float64()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pipeline, FeaturePlan, Scopes]:
    """A pipeline of all kinds of view over one source; nothing is ingested."""
    bench = write_asked(
        tmp_path_factory.mktemp("few") / Path("p"),
        "",
        VIEWS,
        columns=COLUMNS,
        source={"sequence": "seq", "deleted": "gone"},
        keys=["k", "j"],
        request={"k": "string", "j": "int64"},
    )
    pipeline = pipeline_of(bench)
    plan = compile_plan(pipeline)
    return pipeline, plan, scopes_of(plan)


_VALUES = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False, width=64), st.sampled_from([0.1, -0.0]))
_ROW = st.fixed_dictionaries(
    {
        "k": st.sampled_from(["a", "b", None]),
        "j": st.sampled_from([1, 2, None]),
        "id": st.integers(0, 6),
        "at": st.integers(0, 12),
        "known": st.integers(0, 12),
        "value": _VALUES,
        "word": st.sampled_from(["x", "y", "é", None]),
        "seq": st.integers(0, 2),
        "gone": st.booleans(),
    }
)
_ASKED = st.fixed_dictionaries(
    {"k": st.sampled_from(["a", "b", "c", None]), "j": st.sampled_from([1, 2, 3]), "t": st.integers(0, 14)}
)
_MOVED = [
    {"k": "a", "j": 1, "id": 1, "at": 3, "known": 3, "value": 1.0, "word": "x", "seq": 0, "gone": False},
    {"k": "b", "j": 1, "id": 1, "at": 11, "known": 5, "value": 2.0, "word": "y", "seq": 0, "gone": False},
]
_GONE = [
    {"k": "a", "j": 1, "id": 1, "at": 5, "known": 5, "value": 1.0, "word": "x", "seq": 0, "gone": False},
    {"k": "a", "j": 1, "id": 1, "at": 0, "known": 7, "value": 2.0, "word": "y", "seq": 0, "gone": False},
]
_ZERO = [{"k": "a", "j": 1, "id": 1, "at": 7, "known": 7, "value": -0.0, "word": "x", "seq": 0, "gone": False}]
_AFTER = [{"k": k, "j": 1, "t": t} for k in "ab" for t in (4, 6, 12)]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(_ROW, max_size=14), asked=st.lists(_ASKED, min_size=1, max_size=6))
@example(rows=_MOVED, asked=_AFTER)
@example(rows=_ZERO, asked=[{"k": "a", "j": 1, "t": 8}])
@example(rows=_GONE, asked=[{"k": "a", "j": 1, "t": 8}])
def test_few_entities_answer_as_the_whole_source_does(
    compiled: tuple[Pipeline, FeaturePlan, Scopes], rows: list[dict[str, Any]], asked: list[dict[str, Any]]
) -> None:
    pipeline, plan, scopes = compiled
    source = pipeline.spec.sources["data"]
    table = _table(rows)
    labels = pa.table(
        {
            "k": pa.array([a["k"] for a in asked], pa.string()),
            "j": pa.array([a["j"] for a in asked], pa.int64()),
            "t": pa.array([a["t"] for a in asked], _STAMP),
        }
    )
    for name, compiled_view in plan.views.items():
        try:
            whole = compiled_view.answer(labels, prepare(source, compiled_view.clock, table))
        except UndecidedTie:
            assert name == "strict", "the others declare how ties are broken"
            continue
        scope = scopes.of_view[name]
        versions = row_versions(source, scope, table, ("p", 1), np.arange(table.num_rows))
        mine = _online(pipeline.spec, plan, scopes, name, versions, labels)
        for feature, cells in whole.items():
            _same(cells, mine[feature], f"{feature} of {rows} asked {asked}")


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    types = {"float64": pa.float64(), "int64": pa.int64(), "timestamp": _STAMP, "bool": pa.bool_()}
    text = pa.dictionary(pa.int32(), pa.string())
    return pa.table({c: pa.array([r[c] for r in rows], types.get(kind, text)) for c, kind in COLUMNS.items()})


def _online(
    spec: PipelineSpec, plan: FeaturePlan, scopes: Scopes, name: str, versions: list[RowVersion], labels: pa.Table
) -> dict[str, Cells]:
    """The view's cells from what a store would hand out for the entities asked."""
    scope = scopes.of_view[name]
    types = column_types(spec, scope)
    beside, windows = companions(spec), ("value", "word")
    view = view_plan(plan.views[name], beside, windows)
    decoded = ScopePlan(scope, types, ("value", "word", "at"), windows)
    wanted = entities(labels, scope.keys)
    known = {e: decode(decoded, _handed_out(versions, e)) for e in set(wanted) if e != NO_ENTITY}
    times = labels.column("t").cast(pa.int64()).to_pylist()
    rows = [
        view.unkeyed.cells if e == NO_ENTITY else answer(view, known[e], t).cells
        for e, t in zip(wanted, times, strict=True)
    ]
    columns = dict(zip(view.names, zip(*rows, strict=True), strict=True))
    codes = {word: code for code, word in enumerate(REASONS)}
    latest = plan.views[name].spec.latest_features()
    return {
        f"{name}__{feature}": Cells(
            typed_column(columns[f"{name}__{feature}"], types[latest[feature].latest] if feature in latest else _FLOAT),
            typed_column(columns[f"{beside[f'{name}__{feature}']}__event_time"], _STAMP),
            np.array([codes[w] for w in columns[f"{beside[f'{name}__{feature}']}__reason"]], dtype=np.int8),
        )
        for feature in plan.views[name].spec.features
    }


def _handed_out(versions: list[RowVersion], entity: bytes) -> list[EntityRow]:
    here = {v.identity for v in versions if v.entity == entity}
    return [
        EntityRow(
            v.identity,
            v.partition,
            v.position,
            v.event_time,
            v.available_time,
            v.sequence,
            int(v.deleted),
            int(v.entity == entity),
            v.payload if v.entity == entity else None,
        )
        for v in versions
        if v.identity in here
    ]


def _same(one: Cells, other: Cells, where: str) -> None:
    for column in ("value", "event_time"):
        left, right = getattr(one, column), getattr(other, column)
        assert left.type == right.type, where
        assert bits(pa.table({"c": left})) == bits(pa.table({"c": right})), f"{column} of {where}"
    assert collapse(one.reason).tolist() == collapse(other.reason).tolist(), where


def test_a_value_that_no_window_can_take_is_refused_as_the_kernel_does() -> None:
    with pytest.raises(NonFiniteValue):
        exponents(np.array([1.0, np.inf]), np.zeros(2, np.bool_))
    assert exponents(np.array([1.0, np.inf]), np.array([False, True])) == exponents(np.array([1.0]), np.zeros(1, bool))
