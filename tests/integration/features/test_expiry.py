"""How far back rows were read never shows in a cell."""

from pathlib import Path

from support.workbench import table_source, write_workbench

COLUMNS = {"id": "string", "k": "string", "at": "timestamp", "known": "timestamp", "value": "float64"}


def test_expired_is_remembered_for_one_more_look_back(tmp_path: Path) -> None:
    source = table_source(
        COLUMNS,
        ["id"],
        ["k"],
        partition={"column": "at", "start": "2026-03-01", "end": "2026-03-05", "before": "1s", "after": "1s"},
    )
    rows = [f"r{day},pad,2026-03-{day:02d}T00:00:00Z,2026-03-{day:02d}T00:00:00Z,0" for day in range(1, 5)]
    rows.append("x,a,2026-03-01T12:00:00Z,2026-03-01T12:00:00Z,7")
    times = [
        "2026-03-01T13:00:00Z",  # an hour old
        "2026-03-01T18:00:00Z",  # six hours: the edge is inclusive
        "2026-03-01T18:00:01Z",
        "2026-03-02T00:00:00Z",  # twelve hours: the last moment at which it is called expired
        "2026-03-02T00:00:01Z",
        "2026-03-02T23:00:00Z",
    ]
    labels = "\n".join(f"l{i},{t},a,1" for i, t in enumerate(times))
    bench = write_workbench(
        tmp_path,
        sources={"data": source},
        views={
            "v": {
                "source": "data",
                "keys": {"k": "k"},
                "boundary": "lt",
                "lookback": "6h",
                "features": {"value": {"latest": "value"}},
            }
        },
        files={
            "data.csv": "id,k,at,known,value\n" + "\n".join(rows) + "\n",
            "labels.csv": f"label_id,t,k,target\n{labels}\n",
        },
        label_columns={"k": "string"},
        partition={"start": "2026-03-01", "end": "2026-03-03"},
    )
    bench.ingest("data", "labels")
    cells = [(r["v__value"], r["v__value__reason"]) for r in bench.values("2026-03-01", "2026-03-02")]
    assert cells == [
        (7, "hit"),
        (7, "hit"),
        (None, "expired"),
        (None, "expired"),
        (None, "none_visible"),
        (None, "none_visible"),
    ]
