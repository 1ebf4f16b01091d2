"""Text files as rows, and the interpreter's library as a source of them."""

import hashlib
import sysconfig
from pathlib import Path

import pytest
from support.text_pipelines import write_text_pipeline

from headway.datasets.files import RawFile, SourceMissing, delivery_digest, locate
from headway.datasets.reading import read_delivery
from headway.declaration_text import InterpreterFiles
from headway.loading import load_pipeline

LIBRARY = Path(sysconfig.get_path("stdlib"))


def test_every_file_is_one_row_with_its_digest(tmp_path: Path) -> None:
    texts = {"docs/b.txt": "zwei\r\n\tDrei é", "docs/deep/a.txt": "", "docs/c.txt": b"\xff\xfe not utf-8"}
    pipeline = load_pipeline(write_text_pipeline(tmp_path / "pages", texts))
    delivery = read_delivery(pipeline, "pages")
    rows = {row["path"]: row for row in delivery.table.to_pylist()}
    assert sorted(rows) == ["docs/b.txt", "docs/deep/a.txt"]
    data = "zwei\r\n\tDrei é".encode()
    assert rows["docs/b.txt"] == {
        "path": "docs/b.txt",
        "content": data.decode(),
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
    }
    assert rows["docs/deep/a.txt"]["content"] == ""
    assert [(r.file, r.column, r.code) for r in delivery.rejected] == [
        ("docs/c.txt", "content", "null_in_required_column")
    ]


def test_the_name_of_a_text_file_is_part_of_the_delivery(tmp_path: Path) -> None:
    digests = [
        read_delivery(load_pipeline(write_text_pipeline(tmp_path / name, {f"docs/{name}.txt": "same"})), "pages")
        for name in ("one", "two")
    ]
    assert digests[0].source_digest != digests[1].source_digest
    rows = [RawFile("one", b"same"), RawFile("two", b"same")]
    assert delivery_digest(rows[:1]) == delivery_digest(rows[1:])


def test_files_that_a_person_names_are_read_alike(tmp_path: Path) -> None:
    folder = write_text_pipeline(tmp_path / "pages", {"docs/a.txt": "one"})
    (tmp_path / "other.txt").write_text("two", encoding="utf-8")
    table = read_delivery(load_pipeline(folder), "pages", [tmp_path / "other.txt"]).table
    assert [(r["path"], r["content"]) for r in table.to_pylist()] == [("other.txt", "two")]


def test_the_library_is_read_without_tests_and_installed_packages() -> None:
    found = locate(InterpreterFiles(interpreter="stdlib"), Path("/"))
    names = [p.relative_to(LIBRARY).as_posix() for p in found]
    assert {"os.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    assert names == sorted(names)
    forbidden = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    assert not [n for n in names if forbidden & set(n.split("/"))]
    assert all(p.suffix == ".py" for p in found)


def test_a_limit_spreads_over_the_library() -> None:
    every = locate(InterpreterFiles(interpreter="stdlib"), Path("/"))
    some = locate(InterpreterFiles(interpreter="stdlib", limit=20), Path("/"))
    places = [every.index(p) for p in some]
    assert len(some) == 20
    assert places == sorted(set(places))
    assert places[0] == 0
    assert max(b - a for a, b in zip(places, [*places[1:], len(every)], strict=True)) <= len(every) // 20 + 1
    assert locate(InterpreterFiles(interpreter="stdlib", limit=10**6), Path("/")) == every


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("/etc/*.py", "leaves"), ("../*/*.py", "leaves"), ("no-such-*.py", "has no file that matches")],
)
def test_a_pattern_that_leaves_the_library_or_finds_nothing_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(SourceMissing, match=said):
        locate(InterpreterFiles(interpreter="stdlib", paths=(pattern,)), Path("/"))
