"""The pictures of the documentation show the rules and the graph as they are."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from headway.cli.main import main
from scripts.pictures import DOCS, PICTURES, pictures

DRAWN = pictures()


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == DRAWN[name], "run: .venv/bin/python scripts/pictures.py"
    ElementTree.fromstring(DRAWN[name])


def test_each_rule_has_its_picture_on_the_page() -> None:
    page = (DOCS / "time.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(time/(\w+)\.svg\)", page)) == sorted(PICTURES)


@pytest.mark.parametrize("name", ["visible", "latest", "lookback"])
def test_the_kernel_answers_as_drawn(name: str, tmp_path: Path) -> None:
    """Of the drawn rows the one that is drawn green is the kernel's answer at the dashed line."""
    picture = PICTURES[name]
    (seen,) = [row for row in picture.rows if row.seen]
    back = None if picture.window is None else _time(picture.window[1]) - _time(picture.window[0])
    rows = [
        {
            "key": "k",
            "event_time": _time(row.event),
            "available_time": _time(row.known),
            "sequence": 0,
            "value": float(number),
        }
        for number, row in enumerate(picture.rows)
    ]
    answer = {"value": float(picture.rows.index(seen)), "event_time": _time(seen.event), "reason": "hit"}
    case = {
        "name": name,
        "contract": {"boundary": "lt", "lookback": back, "null_policy": "row_wins"},
        "rows": rows,
        "labels": [{"key": "k", "t": _time(picture.asked)}],
        "expected": [answer],
    }
    file = tmp_path / "drawn.json"
    file.write_text(json.dumps({"kind": "latest", "cases": [case]}))
    result = CliRunner().invoke(main, ["features", "cases", str(file)])
    assert result.exit_code == 0, result.output


def _time(moment: float) -> int:
    return round(moment * 10)
