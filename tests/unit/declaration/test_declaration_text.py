"""A pipeline learns from label rows or from text; what belongs to the other is refused with its line."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.pipelines import source, write_pipeline
from support.text_pipelines import Change, write_text_pipeline

from headway.cli.main import main
from headway.declaration import NoLabelRows
from headway.loading import DeclarationInvalid, load_pipeline


def _set(path: str, value: object) -> Change:
    def change(attributes: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place = attributes
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value

    return change


def _drop(path: str) -> Change:
    def change(attributes: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place = attributes
        for name in parents:
            place = place[name]
        del place[last]

    return change


def _line_of(folder: Path, text: str) -> int:
    lines = (folder / "defs.yaml").read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def test_a_text_pipeline_is_right(tmp_path: Path) -> None:
    folder = write_text_pipeline(tmp_path / "pages")
    result = CliRunner().invoke(main, ["check", str(folder)])
    assert result.exit_code == 0, result.output
    assert "text of 'pages' in 300 tokens; nothing wrong" in result.output


LABEL = {"source": "pages", "observation_time": "t", "target": "y", "known_at": "t"}
PARTITION = {"column": "path", "start": "2026-01-01"}
CARRY = {"type": "string"}


@pytest.mark.parametrize(
    ("change", "place", "line", "said"),
    [
        (_set("label", LABEL), "label", "label:", "this one learns from `text`"),
        (_set("features", {"version": 1, "views": {}}), "features.views", "views:", "at least 1"),
        (_set("serving", {"request": {"q": CARRY}, "observed": "q", "before": "1h"}), "serving", "serving:", "`text`"),
        (_set("text.source", "pages2"), "text.source", "source: pages2", "no source 'pages2'; sources are ['pages']"),
        (_set("text.document", "file"), "text.document", "document: file", "pages has no column 'file'"),
        (_set("text.content", "bytes"), "text.content", "content: bytes", "{type: string, required: true}"),
        (_set("text.content", "path"), "text", "text:", "are both 'path'"),
        (_set("text.document", "sha256"), "text.document", "document: sha256", "must be the only row_id"),
        (_set("text.tokenizer.kind", "words"), "text.tokenizer", "tokenizer:", "'bytes', 'bpe'"),
        (_set("text.tokenizer.vocab", 257), "text.tokenizer.vocab", "vocab: 257", "greater than 257, got 257"),
        (_set("text.tokenizer.vocab", 70000), "text.tokenizer.vocab", "vocab: 70000", "65536, got 70000"),
        (_set("text.split.held_out", 0.6), "text.split.held_out", "held_out: 0.6", "less than 0.5, got 0.6"),
        (_set("text.split.near_duplicates", 0.2), "text.split.near_duplicates", "near_duplicates: 0.2", "0.5, got 0.2"),
        (_set("text.contexts", 3), "text.contexts", "contexts: 3", "'contexts' is not a field here"),
        (_set("training.categorical", ["path"]), "training.categorical", "categorical:", "is for label rows"),
        (_set("training.as_of", {"start": "2026-01-01"}), "training.as_of", "as_of:", "is for label rows"),
        (
            _set("training.options.vocab", 4096),
            "training.options.vocab",
            "vocab: 4096",
            "4096 is not the 300",
        ),
        (_set("training.options.sequence", 33), "training.options.sequence", "sequence: 33", "33 is not the 32"),
        (_set("evaluation.historical_rate", ["path"]), "evaluation.historical_rate", "historical_rate:", "label rows"),
        (_set("promotion.gates", [{"gate": "segments"}]), "promotion.gates", "gates:", "'segments' judges label rows"),
        (_drop("promotion"), "training", "training:", "declare `evaluation` and `promotion` too"),
        (
            _set("sources.pages.privacy.personal", {"content": "drop"}),
            "text.content",
            "content: content",
            "is personal",
        ),
        (_drop("text"), "label", "attributes:", "is required, unless the pipeline learns from `text`"),
    ],
)
def test_a_fault_is_one_line(tmp_path: Path, change: Change, place: str, line: str, said: str) -> None:
    folder = write_text_pipeline(tmp_path / "pages", change=change)
    with pytest.raises(DeclarationInvalid) as refused:
        load_pipeline(folder)
    problem = refused.value.problems[0]
    assert (problem.field, problem.line) == (place, _line_of(folder, line)), str(problem)
    assert said in problem.message


ROWS = source(
    {"meter": {"type": "string", "required": True}, "at": "timestamp", "kwh": "float64"},
    row_id=["meter", "at"],
    keys=["meter"],
    event_time="at",
    available_time="at",
    partition={"column": "at", "start": "2026-01-01"},
)


def test_a_fault_in_a_file_format_names_its_own_line(tmp_path: Path) -> None:
    change = _set("sources.pages.format.encoding", "cp1252")
    with pytest.raises(DeclarationInvalid) as refused:
        load_pipeline(write_text_pipeline(tmp_path / "pages", change=change))
    problem = refused.value.problems[0]
    assert problem.field == "sources.pages.format.encoding"
    assert problem.line == _line_of(tmp_path / "pages", "encoding: cp1252")


def test_label_rows_need_their_months_and_no_gate_for_text(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    write_pipeline(folder, ROWS, files={"data.csv": "meter,at,kwh\n", "labels.csv": ""})
    judged = "  evaluation: {}\n  promotion: {gates: [{gate: bits_per_byte_over_gzip}]}\n"
    for training, place, said in (
        ("  training: {factory: model.build}\n", "training.as_of", "is required"),
        (
            "  training: {factory: model.build, as_of: {start: '2026-01-01'}}\n",
            "evaluation.historical_rate",
            "is required",
        ),
    ):
        text = (folder / "defs.yaml").read_text().partition("  training:")[0]
        (folder / "defs.yaml").write_text(text + training + judged)
        with pytest.raises(DeclarationInvalid) as refused:
            load_pipeline(folder)
        assert refused.value.problems[0].field == place
        assert said in refused.value.problems[0].message


def test_what_asks_for_label_rows_is_refused_in_words(tmp_path: Path) -> None:
    spec = load_pipeline(write_text_pipeline(tmp_path / "pages")).spec
    for ask in (lambda: spec.label, lambda: spec.features, spec.feature_names, spec.model_inputs):
        with pytest.raises(NoLabelRows, match="pipeline 'pages' learns from text: it has no"):
            ask()
    assert spec.learned_source == "pages"
    assert spec.model_dump(mode="json", exclude_none=True)["text"]["context"] == 32
