"""`headway.open()`: what a home holds as tables and frames, verified on the way, and what is said of the rest."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from support.pipelines import DatasetBench, source, suite

import headway
from headway.artifacts.errors import BlobCorrupt
from headway.artifacts.manifest import read_manifest
from headway.artifacts.store import LocalStore
from headway.datasets.rows import NotReleased
from headway.reading import NoHome, NothingToRead

READINGS = source(
    {"meter": {"type": "string", "required": True}, "at": "timestamp", "kwh": "float64"},
    row_id=["meter", "at"],
    keys=["meter"],
    event_time="at",
    available_time="at",
    partition={"column": "at", "start": "2026-01-01", "end": "2026-01-03"},
)
ROWS = "meter,at,kwh\nm2,2026-01-01T02:00:00Z,2.5\nm1,2026-01-01T01:00:00Z,1.5\nm1,2026-01-02T01:00:00Z,4.0\n"


@pytest.fixture
def bench(tmp_path: Path) -> DatasetBench:
    made = DatasetBench(tmp_path / "meters")
    made.write(READINGS, ROWS)
    assert [o["standing"] for o in made.ingest_declared()] == ["released", "released"]
    return made


def test_rows_come_as_arrow_and_pandas_with_types(bench: DatasetBench) -> None:
    with headway.open(bench.home) as home:
        readings = home.dataset("meters", "readings")
        frame = readings.to_pandas().sort_values(["at", "meter"], ignore_index=True)
        one = readings.to_arrow(partitions=["2026-01-02"], columns=["kwh", "meter"])
    assert list(frame.meter) == ["m1", "m2", "m1"]
    assert list(frame.kwh) == [1.5, 2.5, 4.0]
    assert list(frame["at"]) == [pd.Timestamp(f"2026-01-0{d}T0{h}:00:00Z") for d, h in ((1, 1), (1, 2), (2, 1))]
    assert one.to_pylist() == [{"kwh": 4.0, "meter": "m1"}]
    assert {str(field.type) for field in one.schema} == {"double", "string"}


def test_versions_say_what_each_partition_is(bench: DatasetBench) -> None:
    with headway.open(bench.home) as home:
        versions = home.dataset("meters", "readings").versions()
    assert list(versions.partition) == ["2026-01-01", "2026-01-02"]
    assert list(versions.status) == ["released", "released"]
    assert list(versions.content_digest) == [v["content_digest"] for v in _listed(bench)]


def _listed(bench: DatasetBench) -> list[dict[str, str]]:
    return sorted(bench.versions(), key=lambda v: v["partition"])


def test_a_changed_byte_is_refused_and_never_read(bench: DatasetBench) -> None:
    with headway.open(bench.home) as home:
        readings = home.dataset("meters", "readings")
        store = LocalStore(bench.home / "store")
        manifest = read_manifest(store, bench.show("2026-01-02")["manifest_digest"])
        path = store.read_path(manifest.entry("rows.parquet").sha256)
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"\x00")
        assert readings.to_arrow(["2026-01-01"]).num_rows == 2
        with pytest.raises(BlobCorrupt):
            readings.to_arrow()


def test_a_quarantined_partition_is_refused_by_name(tmp_path: Path) -> None:
    most = {"type": "expect_column_values_to_be_between", "severity": "critical"}
    bench = DatasetBench(tmp_path / "meters")
    bench.write(READINGS, ROWS, rules=suite({**most, "kwargs": {"column": "kwh", "max_value": 3}}))
    assert [o["standing"] for o in bench.ingest_declared()] == ["released", "quarantined"]
    with headway.open(bench.home) as home:
        readings = home.dataset("meters", "readings")
        with pytest.raises(NotReleased, match="meters/readings 2026-01-02 is quarantined"):
            readings.to_pandas()
        assert readings.partitions() == ["2026-01-01"]
        assert readings.to_arrow(readings.partitions()).num_rows == 2


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda h: h.dataset("meters", "nothing"), "knows no dataset 'meters/nothing'; `headway datasets list -p"),
        (lambda h: h.dataset("meters", "readings").to_arrow(["2031-01-01"]), "partitions are 2026-01-01 to 2026-01-02"),
        (lambda h: h.dataset("meters", "readings").to_arrow("2026-01-01"), "is the text '2026-01-01'; give a list"),
        (lambda h: h.dataset("meters", "readings").to_arrow(columns=["kw"]), "has no column 'kw'; columns are ['at'"),
        (lambda h: h.dataset("meters", "readings").to_arrow([]), "no partition was asked for"),
        (lambda h: h.snapshots("meters"), "knows no snapshot of 'meters'"),
        (lambda h: h.curve("abc"), "'abc' begins the ids of 0 runs"),
        (lambda h: h.predictions("meters"), "there is no endpoint 'meters'; endpoints are []"),
    ],
)
def test_what_is_not_there_is_said_with_what_there_is(bench: DatasetBench, ask: object, said: str) -> None:
    assert callable(ask)
    with headway.open(bench.home) as home, pytest.raises(NothingToRead) as caught:
        ask(home)
    assert said in str(caught.value)


def test_frames_without_rows_have_their_columns(bench: DatasetBench) -> None:
    with headway.open(bench.home) as home:
        assert list(home.runs().columns[:4]) == ["run_id", "pipeline", "as_of", "status"]
        assert list(home.versions().columns[:3]) == ["model", "version", "kind"]
        assert len(home.runs()) == len(home.versions()) == 0


def test_a_home_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(NoHome, match=r"there is no catalog .*catalog\.db"):
        headway.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_reading_imports_neither_torch_nor_dagster(bench: DatasetBench) -> None:
    script = (
        "import sys, headway\n"
        f"home = headway.open({str(bench.home)!r})\n"
        "home.dataset('meters', 'readings').to_pandas(); home.runs(); home.versions()\n"
        "print(sorted({'torch', 'dagster', 'great_expectations', 'sklearn'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
