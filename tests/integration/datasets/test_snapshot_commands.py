"""`headway snapshots` names a snapshot by its id everywhere, and takes the id's first characters."""

import json
from pathlib import Path

from support.workbench import Workbench, write_workbench

DAYS = ("2026-03-01", "2026-03-02")


def _built(root: Path) -> tuple[Workbench, dict[str, str], str]:
    """A bench with two published snapshots: ids by day, and the text that building them printed."""
    bench = write_workbench(
        root,
        sources={},
        views={
            "v": {
                "source": "labels",
                "keys": {"label_id": "label_id"},
                "boundary": "lt",
                "features": {"n": {"window": "target", "aggregate": "count", "duration": "1d"}},
            }
        },
        files={"labels.csv": "label_id,t,target\na,2026-03-01T10:00:00Z,1\nb,2026-03-02T10:00:00Z,1\n"},
        partition={"start": DAYS[0], "end": "2026-03-03"},
    )
    bench.ingest("labels")
    wanted = [a for day in DAYS for a in ("--partition", day)]
    text = bench.run("snapshots", "build", "-p", str(bench.folder), *wanted).output
    listed = json.loads(bench.run("snapshots", "list", "-p", str(bench.folder), "--json").stdout)["snapshots"]
    return bench, {row["partition"]: row["snapshot_id"] for row in listed}, text


def test_build_prints_the_ids_that_show_and_verify_take(tmp_path: Path) -> None:
    bench, ids, text = _built(tmp_path)
    for line, day in zip(text.splitlines(), DAYS, strict=True):
        assert line.startswith(day)
        assert ids[day] in line
    first, second = (ids[day].removeprefix("sha256:") for day in DAYS)
    length = next(i for i in range(len(first)) if first[i] != second[i]) + 1
    for reference in (ids[DAYS[0]], first, first[:length], f"sha256:{first[:length]}"):
        shown = json.loads(bench.run("snapshots", "show", reference, "--json").stdout)
        assert (shown["snapshot_id"], shown["partition"]) == (ids[DAYS[0]], DAYS[0])
        verified = bench.run("snapshots", "verify", reference, "-p", str(bench.folder), "--json")
        assert verified.exit_code == 0, verified.output
        assert json.loads(verified.stdout)["snapshot_id"] == ids[DAYS[0]]


def test_an_unknown_or_ambiguous_prefix_is_refused_with_the_next_step(tmp_path: Path) -> None:
    bench, ids, _ = _built(tmp_path)
    told = {
        "sha256:": "the ids of 2 snapshots begin with",
        f"{ids[DAYS[0]]}0": "no snapshot's id begins",
        "%": "no snap",
    }
    for reference, said in told.items():
        for command in ("show", "verify"):
            refused = bench.run("snapshots", command, reference)
            assert refused.exit_code == 2, refused.output
            assert said in refused.stderr
            assert "`headway snapshots list --pipeline P`" in refused.stderr
