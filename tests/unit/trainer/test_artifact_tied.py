"""A weight that two layers share survives the way through an artifact, however the engine names it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.language_cases import CONTEXT, ROOT, TOKENIZER, language_spec

from trainer.artifact import write_language
from trainer.language import load_language_model
from trainer.models.factory import build_model
from trainer.models.inputs import TokenInputs
from trainer.tokens import TokenDataset, TokenExamples


@pytest.mark.parametrize("named", ["once", "twice"])
def test_a_tied_model_is_written_and_loaded(named: str, tmp_path: Path) -> None:
    spec = language_spec()
    spec = replace(spec, model=replace(spec.model, options={**spec.model.options, "tied": True}))
    inputs = TokenInputs(TOKENIZER.vocab, CONTEXT, TOKENIZER.end_token, TOKENIZER.digest)
    nothing = TokenExamples([], CONTEXT)
    dataset = TokenDataset(nothing, nothing, inputs, {"tokens_train": 0}, TOKENIZER.dump())
    torch.manual_seed(3)
    module = build_model(spec, inputs, ROOT)
    # ZeRO keeps a parameter once, under the first of its names; DDP and FSDP2 tell of both.
    state = dict(module.named_parameters()) if named == "once" else module.state_dict()
    assert ("head.weight" in state) == (named == "twice")
    write_language(state, spec, dataset, {"valid_loss": 1.0}, tmp_path / "model", run_id="r1", code_root=ROOT)
    loaded = load_language_model(tmp_path / "model", ROOT).module
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(tokens), module.eval()(tokens))
    weights = dict(loaded.named_parameters())
    assert "head.weight" not in weights
    assert torch.equal(weights["embed.weight"], module.state_dict()["head.weight"])
