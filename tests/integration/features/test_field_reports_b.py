"""What people ran into with point-in-time joins, tried through declaration, files and commands."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from support.workbench import Workbench, table_source, write_workbench

LATEST = {"value": {"latest": "value"}}
COLUMNS = {"k": "string", "at": "timestamp", "known": "timestamp", "value": "float64"}


def _view(**more: object) -> dict[str, Any]:
    return {"source": "data", "keys": {"k": "k"}, "boundary": "lt", "features": LATEST, **more}


def _labels(*rows: tuple[str, str]) -> str:
    lines = [f"l{i},{t},{k},1" for i, (k, t) in enumerate(rows)]
    return "label_id,t,k,target\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_field_B01_newest_correction_wins_whatever_the_file_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    rows = [
        "1001,2022-11-20T20:00:00Z,2022-11-20T20:05:00Z,5",
        "1001,2022-11-20T20:00:00Z,2022-11-20T21:00:00Z,1005",
        "1001,2022-11-20T20:00:00Z,2022-11-20T22:00:00Z,2005",
    ]
    header = "k,at,known,value\n"
    names = [f"part{i}.csv" for i in range(3)]
    times = ["20:30:00", "21:30:00", "22:30:00", "23:00:42"]
    bench = write_workbench(
        tmp_path,
        sources={"data": table_source(COLUMNS, ["k", "at"], ["k"], files={"paths": names})},
        views={"v": _view()},
        files={
            **{name: header + rows[i] + "\n" for name, i in zip(names, order, strict=True)},
            "labels.csv": _labels(*[("1001", f"2022-11-20T{t}Z") for t in times]),
        },
        label_columns={"k": "string"},
        partition={"start": "2022-11-20", "end": "2022-11-21"},
    )
    bench.ingest("data", "labels")
    assert [r["v__value"] for r in bench.values("2022-11-20")] == [5, 1005, 2005, 2005]


def test_field_B03_a_future_partition_is_refused_and_poisons_nothing(tmp_path: Path) -> None:
    bench = write_workbench(
        tmp_path,
        sources={"data": table_source(COLUMNS, ["k", "at"], ["k"])},
        views={"v": _view(lookback="2d")},
        files={
            "data.csv": "k,at,known,value\na,2026-03-01T00:00:00Z,2026-03-01T00:00:00Z,1\n",
            "labels.csv": _labels(("a", "2026-03-01T10:00:00Z")),
        },
        label_columns={"k": "string"},
        partition={"start": "2026-03-01"},
    )
    bench.ingest("data")
    future = bench.run(
        "datasets", "ingest", "--pipeline", str(bench.folder), "--source", "labels", "--partition", "2999-04-08"
    )
    assert future.exit_code != 0
    assert "2999-04-08" in future.output
    assert "2999-04-09" in future.output, "the time at which it closes"
    refused = bench.build("2999-04-08")
    assert refused.exit_code == 1
    assert "not over" in refused.output
    today = bench.run(
        "datasets", "ingest", "--pipeline", str(bench.folder), "--source", "labels", "--partition", "2026-03-01"
    )
    assert today.exit_code == 0, today.output
    assert [r["v__value"] for r in bench.values("2026-03-01")] == [1]
    snapshot = bench.outcome("2026-03-01")["snapshot_id"]
    shown = json.loads(bench.run("snapshots", "show", snapshot, "--json").stdout)
    assert shown["watermarks"]["data"] == "2026-03-01T00:00:00+00:00", "never beyond the newest row seen"


def test_field_A13_codes_with_leading_zeros_are_found_by_the_join(tmp_path: Path) -> None:
    rows = [
        ("2026-03-01", "01730", 1),
        ("2026-03-01", "10115", 2),
        ("2026-03-02", "01730-2603", 3),
        ("2026-03-02", "007", 4),
    ]
    lines = [f"{zip_},{day}T00:00:00Z,{day}T00:00:00Z,{value}" for day, zip_, value in rows]
    source = table_source(
        {**COLUMNS, "k": "string"},
        ["k", "at"],
        ["k"],
        partition={"column": "at", "start": "2026-03-01", "end": "2026-03-03", "before": "1s", "after": "1s"},
    )
    asked = ["01730", "1730", "01730-2603", "7", "007"]
    bench = write_workbench(
        tmp_path,
        sources={"data": source},
        views={"v": _view(lookback="5d")},
        files={
            "data.csv": "k,at,known,value\n" + "\n".join(lines) + "\n",
            "labels.csv": _labels(*[(code, "2026-03-02T10:00:00Z") for code in asked]),
        },
        label_columns={"k": "string"},
        partition={"start": "2026-03-02", "end": "2026-03-03"},
    )
    bench.ingest("data", "labels")
    assert [r["v__value"] for r in bench.values("2026-03-02")] == [1, None, 3, None, 4]


@pytest.mark.parametrize("parts", [["driver", "customer"], ["customer", "driver"]])
def test_field_B05_a_two_part_key_never_answers_for_another_pair(tmp_path: Path, parts: list[str]) -> None:
    """The offline part; requests to an online store come with serving."""
    columns = {"driver": "int64", "customer": "string", "at": "timestamp", "known": "timestamp", "value": "float64"}
    at = "2026-03-01T00:00:00Z"
    bench = write_workbench(
        tmp_path,
        sources={"data": table_source(columns, ["driver", "customer", "at"], ["driver", "customer"])},
        views={"v": _view(keys={part: part for part in parts})},
        files={
            "data.csv": f"driver,customer,at,known,value\n1001,A,{at},{at},0.1\n1001,B,{at},{at},0.9\n",
            "labels.csv": "label_id,t,driver,customer,target\n"
            "x1,2026-03-01T10:00:00Z,1001,B,1\nx2,2026-03-01T10:00:00Z,1001,C,1\nx3,2026-03-01T10:00:00Z,1001,,1\n",
        },
        label_columns={"driver": "int64", "customer": "string"},
        partition={"start": "2026-03-01", "end": "2026-03-02"},
    )
    bench.ingest("data", "labels")
    cells = [(r["v__value"], r["v__value__reason"]) for r in bench.values("2026-03-01")]
    assert cells == [(0.9, "hit"), (None, "none_visible"), (None, "null_key")]


def test_field_B07_two_roles_of_one_entity_stay_two_columns(tmp_path: Path) -> None:
    bench = write_workbench(
        tmp_path,
        sources={"data": table_source(COLUMNS, ["k", "at"], ["k"])},
        views={"buyer": _view(keys={"buyer": "k"}), "seller": _view(keys={"seller": "k"})},
        files={
            "data.csv": "k,at,known,value\nu1,2026-03-01T00:00:00Z,2026-03-01T00:00:00Z,1\n"
            "u2,2026-03-01T00:00:00Z,2026-03-01T00:00:00Z,2\n",
            "labels.csv": "label_id,t,buyer,seller,target\n"
            "x1,2026-03-01T10:00:00Z,u1,u2,1\nx2,2026-03-01T11:00:00Z,u2,u2,1\n",
        },
        label_columns={"buyer": "string", "seller": "string"},
        partition={"start": "2026-03-01", "end": "2026-03-02"},
    )
    bench.ingest("data", "labels")
    rows = bench.values("2026-03-01")
    assert [(r["buyer__value"], r["seller__value"]) for r in rows] == [(1, 2), (2, 2)]


def test_field_B09_todays_table_is_not_known_last_year(tmp_path: Path) -> None:
    columns = {"customer": "string", "export_date": "timestamp", "ltv": "float64"}
    source = table_source(columns, ["customer"], ["customer"], event_time="export_date", available_time="export_date")
    view = {
        "source": "data",
        "keys": {"customer": "customer"},
        "boundary": "le",
        "features": {"ltv": {"latest": "ltv"}},
    }
    bench = write_workbench(
        tmp_path,
        sources={"data": source},
        views={"c": view},
        files={
            "data.csv": "customer,export_date,ltv\nc1,2026-06-01T00:00:00Z,900\n",
            "labels.csv": "label_id,t,customer,target\na,2025-06-01T00:00:00Z,c1,1\nb,2025-06-01T12:00:00Z,c1,0\n",
        },
        label_columns={"customer": "string"},
        partition={"start": "2025-06-01", "end": "2025-06-02"},
        features={"null_budget": {"default": 0.5}},
    )
    bench.ingest("data", "labels")
    outcome = bench.outcome("2025-06-01")
    assert outcome["status"] == "refused"
    assert "null budget" in outcome["reason"]
    assert "c__ltv" in outcome["reason"]
    text = (bench.folder / "defs.yaml").read_text().replace("default: 0.5", "default: 1.0")
    (bench.folder / "defs.yaml").write_text(text)
    rows = bench.values("2025-06-01")
    assert [(r["c__ltv"], r["c__ltv__reason"]) for r in rows] == [(None, "none_visible")] * 2


@pytest.mark.parametrize(
    ("zone", "stamps", "labels", "expected_lt"),
    [
        (
            "US/Central",
            [f"2021-11-{day:02d}T00:00:00" for day in range(5, 11)],
            [f"2021-11-{day:02d}T0{6 if day > 7 else 5}:00:00Z" for day in range(5, 11)],
            [None, 1, 2, None, 4, 5],
        ),
        (
            "Europe/Paris",
            ["2023-10-28T14:56:00", "2023-10-29T14:56:00", "2023-10-30T14:56:00"],
            ["2023-10-28T12:56:00Z", "2023-10-29T13:56:00Z", "2023-10-30T13:56:00Z"],
            [None, None, 2],
        ),
    ],
)
@pytest.mark.parametrize("boundary", ["lt", "le"])
def test_field_B11_a_day_of_25_hours_is_not_one_day_of_look_back(
    tmp_path: Path, zone: str, stamps: list[str], labels: list[str], expected_lt: list[int | None], boundary: str
) -> None:
    def values(root: Path, local: bool) -> list[tuple[Any, ...]]:
        at = {"type": "timestamp", "zone": zone} if local else "timestamp"
        written = stamps if local else [label.removesuffix("Z") + "+00:00" for label in labels]
        bench = write_workbench(
            root,
            sources={"data": table_source({**COLUMNS, "at": at}, ["k", "at"], ["k"], available_time="at")},
            views={"v": _view(boundary=boundary, lookback="1d")},
            files={
                "data.csv": "k,at,known,value\n" + "".join(f"a,{s},,{i}\n" for i, s in enumerate(written, 1)),
                "labels.csv": _labels(*[("a", t) for t in labels]),
            },
            label_columns={"k": "string"},
            partition={"start": "2021-01-01", "end": "2024-01-01", "cadence": "monthly"},
        )
        bench.ingest("data")
        bench.ingest("labels", partitions=[f"{labels[0][:7]}-01"])
        return [(r["v__value"], r["v__value__reason"]) for r in bench.values(f"{labels[0][:7]}-01")]

    in_zone = values(tmp_path / "local", local=True)
    assert in_zone == values(tmp_path / "utc", local=False), "the same instants give the same cells"
    if boundary == "lt":
        assert [v for v, _ in in_zone] == expected_lt
        assert "expired" in [reason for _, reason in in_zone]
    else:
        assert [v for v, _ in in_zone] == list(range(1, len(stamps) + 1))


SEQUENCED = {**COLUMNS, "seq": "int64", "value": "string"}


def _sequenced(root: Path, seq: dict[str, Any] | str, numbers: list[str]) -> Workbench:
    stamps = ["10:00", "10:00", "10:00", "10:01"]
    rows = [f"k,2026-03-01T{s}:00Z,2026-03-01T{s}:00Z,{v},{n}" for s, v, n in zip(stamps, "abcd", numbers, strict=True)]
    return write_workbench(
        root,
        sources={"data": table_source({**SEQUENCED, "seq": seq}, ["k", "at"], ["k"], sequence="seq")},
        views={"v": _view(boundary="le")},
        files={
            "data.csv": "k,at,known,value,seq\n" + "\n".join(rows) + "\n",
            "labels.csv": _labels(("k", "2026-03-01T10:00:00Z"), ("k", "2026-03-01T10:01:00Z")),
        },
        label_columns={"k": "string"},
        partition={"start": "2026-03-01", "end": "2026-03-02"},
    )


def test_field_B13_the_sequence_breaks_ties_on_the_right_side_only(tmp_path: Path) -> None:
    bench = _sequenced(tmp_path, "int64", ["1", "2", "3", "1"])
    bench.ingest("data", "labels")
    assert [r["v__value"] for r in bench.values("2026-03-01")] == ["c", "d"]


def test_field_B13_numbers_are_ordered_as_numbers(tmp_path: Path) -> None:
    bench = _sequenced(tmp_path, "int64", ["8", "9", "10", "1"])
    bench.ingest("data", "labels")
    assert [r["v__value"] for r in bench.values("2026-03-01")] == ["c", "d"]


def test_field_B13_a_missing_sequence_is_refused(tmp_path: Path) -> None:
    bench = _sequenced(tmp_path, "int64", ["1", "", "3", "1"])
    result = bench.run("datasets", "ingest", "--pipeline", str(bench.folder), "--source", "data")
    assert result.exit_code == 1
    assert "1 quarantined" in result.output
    assert "data.csv, row 2, column 'seq': '' null_sequence" in result.output


def test_field_B13_a_text_sequence_is_refused(tmp_path: Path) -> None:
    bench = _sequenced(tmp_path, "string", ["10", "9", "8", "1"])
    checked = bench.run("check", str(bench.folder))
    assert checked.exit_code == 1
    assert "sequence 'seq' is string; it must be int64" in checked.output


@pytest.mark.parametrize(
    ("zone", "expected"), [("Europe/Budapest", {"2025-01-01": 2}), ("UTC", {"2024-12-01": 1, "2025-01-01": 1})]
)
def test_field_B15_months_are_cut_in_the_declared_zone(tmp_path: Path, zone: str, expected: dict[str, int]) -> None:
    bench = write_workbench(
        tmp_path,
        sources={},
        views={
            "v": {
                "source": "labels",
                "keys": {"label_id": "label_id"},
                "boundary": "lt",
                "features": {"n": {"window": "target", "aggregate": "count", "duration": "1d"}},
            }
        },
        files={"labels.csv": "label_id,t,target\na,2024-12-31T23:30:00Z,7\nb,2025-01-31T22:30:00Z,5\n"},
        partition={
            "start": "2024-12-01",
            "end": "2025-02-01",
            "cadence": "monthly",
            "zone": zone,
            "expected_empty": [] if zone == "UTC" else ["2024-12-01"],
        },
    )
    bench.ingest("labels", partitions=["2024-12-01", "2025-01-01"])
    for partition, count in expected.items():
        assert len(bench.values(partition)) == count
    shown = bench.run("datasets", "show", "pipeline/labels/2025-01-01")
    exact = {"Europe/Budapest": "2024-12-31T23:00:00", "UTC": "2025-01-01T00:00:00"}[zone]
    assert exact in shown.output, "the partition's exact instants are shown"


REVISED = """k,at,known,value
us,2023-08-01T00:00:00Z,2023-09-01T00:00:00Z,3.8
us,2023-08-01T00:00:00Z,2024-01-05T00:00:00Z,3.7
us,2023-03-01T00:00:00Z,2023-04-12T00:00:00Z,4.9
"""


def test_field_B17_revised_figures_are_seen_as_they_were_known(tmp_path: Path) -> None:
    source = table_source(COLUMNS, ["k", "at"], ["k"])
    bench = write_workbench(
        tmp_path,
        sources={"data": source},
        views={"v": _view()},
        files={
            "data.csv": REVISED,
            "labels.csv": _labels(
                ("us", "2023-03-31T00:00:00Z"), ("us", "2023-10-01T00:00:00Z"), ("us", "2024-02-01T00:00:00Z")
            ),
        },
        label_columns={"k": "string"},
        partition={"start": "2023-01-01", "end": "2025-01-01", "cadence": "monthly"},
    )
    months = ("2023-03-01", "2023-10-01", "2024-02-01")
    bench.ingest("data")
    bench.ingest("labels", partitions=months)
    assert [r["v__value"] for r in bench.values(*months)] == [None, 3.8, 3.7]
    pinned = bench.outcome("2023-10-01")["snapshot_id"]
    (bench.folder / "data.csv").write_text(REVISED + "us,2023-08-01T00:00:00Z,2024-03-01T00:00:00Z,3.6\n")
    bench.ingest("data")
    verified = bench.run("snapshots", "verify", pinned, "--pipeline", str(bench.folder))
    assert verified.exit_code == 0, verified.output
    assert [r["v__value"] for r in bench.values("2023-10-01")] == [3.8]


def test_field_B17_without_availability_a_source_needs_a_delay_by_name(tmp_path: Path) -> None:
    source = table_source(COLUMNS, ["k", "at"], ["k"])
    del source["available_time"]
    files = {"data.csv": REVISED, "labels.csv": _labels(("us", "2023-10-01T00:00:00Z"))}
    partition = {"start": "2023-01-01", "end": "2025-01-01", "cadence": "monthly"}
    bench = write_workbench(
        tmp_path / "none",
        sources={"data": source},
        views={"v": _view()},
        files=files,
        label_columns={"k": "string"},
        partition=partition,
    )
    checked = bench.run("check", str(bench.folder))
    assert checked.exit_code == 1
    assert "sources.data.available_time: is required" in checked.output
    delayed = source | {"available_time": {"delay": "31d", "reason": "published a month later"}}
    bench = write_workbench(
        tmp_path / "delay",
        sources={"data": delayed},
        views={"v": _view()},
        files=files,
        label_columns={"k": "string"},
        partition=partition,
    )
    assert bench.run("check", str(bench.folder)).exit_code == 0
