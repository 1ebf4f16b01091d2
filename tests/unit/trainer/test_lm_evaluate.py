"""Bits of held-out documents by an artifact, and what is refused before anything is measured."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.language_cases import CONTEXT, LEARNED, ROOT, TEXTS, TOKENIZER, write_model, write_plan

from trainer.check import check_artifact
from trainer.data import DataRefused
from trainer.language import load_language_model
from trainer.lm_evaluate import evaluate, parse_plan
from trainer.predictor import ArtifactRefused
from trainer.spec import SpecRefused


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "artifact")


def _evaluated(folder: Path, plan: Path) -> tuple[dict[str, list[object]], dict[str, object]]:
    evaluate(parse_plan(plan.read_bytes()), folder)
    table = pq.read_table(folder / "scores.parquet")
    return table.to_pydict(), json.loads(table.schema.metadata[b"headway.measured"])


def test_bits_are_those_of_the_loaded_model_and_of_the_real_compressors(artifact: Path, tmp_path: Path) -> None:
    columns, measured = _evaluated(tmp_path / "out", write_plan(tmp_path / "in", artifact, stride=4))
    model = load_language_model(artifact, ROOT)
    for name, bits in zip(columns["document"], columns["bits_model"], strict=True):
        coded = [TOKENIZER.end_token, *TOKENIZER.encode(TEXTS[str(name)]), TOKENIZER.end_token]
        wanted = 0.0
        for target in range(1, len(coded)):
            start = max(0, math.ceil((target - CONTEXT) / 4) * 4)
            with torch.inference_mode():
                logits = model.module(torch.tensor([coded[start:target]]))[0, -1].double()
            wanted -= float(logits.log_softmax(-1)[coded[target]]) / math.log(2)
        assert bits == pytest.approx(wanted, rel=1e-5)
    assert columns["bytes"] == [len(text) for text in TEXTS.values()]
    assert columns["bits_gzip"] == [8 * len(gzip.compress(text, 9, mtime=0)) for text in TEXTS.values()]
    streams = measured["streams"]
    assert isinstance(streams, dict)
    assert streams["gzip"] == len(gzip.compress(b"".join(TEXTS.values()), 9, mtime=0))
    assert np.isfinite(np.asarray(columns["bits_unigram_bytes"], float)).all()
    assert (measured["context"], measured["stride"]) == (CONTEXT, 4)


def test_samples_are_the_same_for_the_same_seed(artifact: Path, tmp_path: Path) -> None:
    first, again = (
        _evaluated(tmp_path / f"out{i}", write_plan(tmp_path / "in", artifact))[1]["samples"] for i in range(2)
    )
    other = write_plan(
        tmp_path / "in", artifact, samples={"prompts": ["def "], "tokens": 5, "temperature": 0.8, "seed": 2}
    )
    assert first == again != _evaluated(tmp_path / "out3", other)[1]["samples"]


def test_without_baselines_only_the_model_is_measured(artifact: Path, tmp_path: Path) -> None:
    columns, measured = _evaluated(tmp_path / "out", write_plan(tmp_path / "in", artifact, baselines=False))
    assert sorted(columns) == ["bits_model", "bytes", "document", "group"]
    assert measured["streams"] == {}


@pytest.mark.parametrize("split", ["train", "valid"])
def test_documents_of_another_split_are_refused(artifact: Path, tmp_path: Path, split: str) -> None:
    plan = write_plan(tmp_path / "in", artifact, split=split)
    with pytest.raises(DataRefused, match=f"splits \\['{split}'\\]"):
        evaluate(parse_plan(plan.read_bytes()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_document_that_was_learned_from_under_another_name_is_refused(artifact: Path, tmp_path: Path) -> None:
    texts = {**TEXTS, "copy.py": LEARNED["d.py"]}
    with pytest.raises(DataRefused, match=r"'copy\.py'"):
        evaluate(parse_plan(write_plan(tmp_path / "text", artifact, texts=texts).read_bytes()), tmp_path / "out")
    near = write_plan(tmp_path / "group", artifact, groups=["a.py", "d.py", "c.py"])
    with pytest.raises(DataRefused, match=r"'b\.py'.*group d\.py"):
        evaluate(parse_plan(near.read_bytes()), tmp_path / "out")


def test_a_plan_that_is_not_whole_is_refused(artifact: Path, tmp_path: Path) -> None:
    plan = json.loads(write_plan(tmp_path, artifact).read_text())
    for damaged in ({**plan, "more": 1}, {n: v for n, v in plan.items() if n != "learned"}, {**plan, "stride": -1}):
        with pytest.raises(SpecRefused):
            parse_plan(json.dumps(damaged).encode())


def test_a_whole_artifact_is_found_good_and_weights_that_overflow_are_not(artifact: Path, tmp_path: Path) -> None:
    assert check_artifact(artifact) == {"weights_only": True, "finite_outputs": True, "problems": []}
    found = check_artifact(write_model(tmp_path / "artifact", overflows=True))
    assert found["weights_only"] is True
    assert found["finite_outputs"] is False
    assert found["problems"]


def test_another_tokenizer_in_the_artifact_is_refused(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    write_model(folder)
    (folder / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(ArtifactRefused, match=r"tokenizer\.json"):
        load_language_model(folder, ROOT)
    assert check_artifact(folder)["weights_only"] is False
