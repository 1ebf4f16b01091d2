"""Any order, duplication and split of labels and answers gives one set of labels in force and one inbox."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.catalog_facts import ALICE
from support.loop_labels import Answered, answered, prediction, spec_of
from support.postgres import Postgres
from support.registry_facts import ENDPOINT

PREDICTIONS = tuple(prediction(f"p{i}", caller_id=f"c{i}") for i in range(4))
HUMAN = {"source": "human", "actor": "ann", "reason": "saw it"}


@st.composite
def _items(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Labels of four predictions, by id or caller's id; some are of nobody."""
    found: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 8))):
        number = draw(st.integers(0, 4))
        address = draw(st.sampled_from([{"prediction_id": f"p{number}"}, {"id": f"c{number}"}]))
        item = {
            **address,
            "value": draw(st.integers(0, 3)),
            "observed_at": f"2013-06-30T1{draw(st.integers(0, 2))}:00:00Z",
        }
        found.append(item | draw(st.sampled_from([{}, HUMAN])))
    return found


@st.composite
def _steps(draw: st.DrawFn, items: list[dict[str, Any]]) -> list[list[Any]]:
    """The items, some twice, and the answers in a drawn order, cut into commands."""
    doubled = items + draw(st.lists(st.sampled_from(items), max_size=4))
    mixed = draw(st.permutations([*doubled, *PREDICTIONS]))
    cuts = sorted(draw(st.sets(st.integers(1, len(mixed) - 1), max_size=5)))
    return [list(mixed[a:b]) for a, b in zip([0, *cuts], [*cuts, len(mixed)], strict=True)]


@st.composite
def _two_ways(draw: st.DrawFn) -> tuple[list[list[Any]], list[list[Any]]]:
    items = draw(_items())
    return draw(_steps(items)), draw(_steps(items))


def _play(world: Answered, steps: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """What is in force and what waits after commands of labels and answers, one after the other."""
    for step in steps:
        world.now += 1_000_000
        labels = [x for x in step if isinstance(x, dict)]
        new = [x for x in step if not isinstance(x, dict)]
        for told in world.accept(*labels):
            assert told["status"] != "refused", told
        if new:
            world.answer(*new)
    ids = [p.prediction_id for p in PREDICTIONS]
    kept = {i: [(x.label_id, x.current, x.source) for x in world.catalog.labels(ALICE, i)] for i in ids}
    waiting = sorted(x.label_id for x in world.catalog.label_inbox(ALICE, ENDPOINT))
    return {i: world.current(i) for i in ids}, kept, waiting


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ways=_two_ways())
def test_any_order_duplication_and_split_on_sqlite(base: Path, ways: tuple[list[list[Any]], list[list[Any]]]) -> None:
    results: list[Any] = []
    for steps in ways:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "catalog.db"
            shutil.copy(base, file)
            results.append(_of(f"sqlite:///{file}", Path(folder), steps))
    assert results[0] == results[1]


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ways=_two_ways())
def test_any_order_duplication_and_split_on_postgresql(
    base_url: str, postgres: Postgres, tmp_path: Path, ways: tuple[list[list[Any]], list[list[Any]]]
) -> None:
    results: list[Any] = []
    for steps in ways:
        url = postgres.fresh_database(base_url)
        try:
            results.append(_of(url, tmp_path, steps))
        finally:
            postgres.drop_database(url)
    assert results[0] == results[1]


def _of(url: str, folder: Path, steps: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    with answered(url, folder, spec_of(), fresh=False) as world:
        return _play(world, steps)


@pytest.fixture(scope="module")
def base(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog whose endpoint answered nothing yet, to copy from."""
    folder = tmp_path_factory.mktemp("labels")
    file = Path(shutil.copy(migrated_sqlite, folder / "catalog.db"))
    with answered(f"sqlite:///{file}", folder, spec_of()):
        return file


@pytest.fixture(scope="module")
def base_url(migrated_postgres: str, postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same on PostgreSQL."""
    url = postgres.fresh_database(migrated_postgres)
    with answered(url, tmp_path_factory.mktemp("labels"), spec_of()):
        return url
