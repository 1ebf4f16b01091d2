"""The artifact of a language model: loaded by the trainer alone, refused when a part is not what it was."""

import ast
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.token_runs import MODEL, TOKENIZER, put_tokens, shard_of

from trainer.artifact import write_language
from trainer.blobs import code_tree_digest, digest_bytes, parse_manifest
from trainer.loop import seed_everything
from trainer.models.factory import COVERED, CodeRefused, build_model, code_parts, factory_digest
from trainer.predictor import LANGUAGE_FILES, ArtifactRefused, load_artifact, load_language
from trainer.spec import ModelSpec, RunSpec
from trainer.tokens import TokenDataset, load_tokens

ROOT = Path(__file__).resolve().parents[3]
FACTORY = '''"""A decoder."""
from trainer.models.decoder import Decoder, DecoderOptions

def build(inputs, options):
    assert (inputs.vocab, inputs.context) == (options["vocab"], options["sequence"])
    return Decoder(DecoderOptions.parse(options))
'''


@pytest.fixture(scope="module")
def code_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of its own: the code beside it may change while the tests run."""
    root = tmp_path_factory.mktemp("code")
    shutil.copytree(ROOT / "trainer", root / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "pipelines" / "words").mkdir(parents=True)
    (root / "pipelines" / "words" / "model.py").write_text(FACTORY)
    return root


@pytest.fixture(scope="module")
def made(code_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, TokenDataset, Path]:
    folder = tmp_path_factory.mktemp("language")
    data = put_tokens(folder / "store", {"train": [shard_of(100, 1)], "valid": [shard_of(40, 2)]})
    code = code_tree_digest(code_root, code_parts("words"))
    spec = RunSpec("words", data, ModelSpec("pipelines/words/model.py", "build", code, options=MODEL), seed=1)
    dataset = load_tokens(data, folder / "store", lambda: None)
    write_language(
        weights(spec, dataset, code_root),
        spec,
        dataset,
        {"valid_loss": 4.0},
        folder / "network",
        run_id="a" * 24,
        code_root=code_root,
    )
    return spec, dataset, folder / "network"


def weights(spec: RunSpec, dataset: TokenDataset, code_root: Path) -> dict[str, torch.Tensor]:
    seed_everything(spec.seed, -1, 0)
    return dict(build_model(spec, dataset.inputs, code_root).state_dict())


def test_it_is_loaded_from_its_folder_and_a_code_tree(
    made: tuple[RunSpec, TokenDataset, Path], code_root: Path
) -> None:
    spec, dataset, folder = made
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    assert {entry.name for entry in manifest.entries} == LANGUAGE_FILES
    assert manifest.facts["kind"] == "language"
    loaded = load_language(folder, code_root)
    assert (loaded.inputs, loaded.tokenizer) == (dataset.inputs, TOKENIZER)
    for name, tensor in weights(spec, dataset, code_root).items():
        assert torch.equal(loaded.module.state_dict()[name], tensor)
    logits = loaded.module(dataset.train.take(torch.arange(2), None).given)
    assert logits.shape == (2, 16, 64)
    assert not loaded.module.training


def test_it_scores_no_rows(made: tuple[RunSpec, TokenDataset, Path], code_root: Path) -> None:
    with pytest.raises(ArtifactRefused, match="an artifact has"):
        load_artifact(made[2], code_root)


def rewrite(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and the manifest with it, as somebody would who wants to be believed."""
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    content = change((folder / name).read_bytes())
    (folder / name).write_bytes(content)
    entries = tuple(
        replace(e, size=len(content), sha256=digest_bytes(content)) if e.name == name else e for e in manifest.entries
    )
    (folder / "manifest.json").write_bytes(replace(manifest, entries=entries).canonical())


def _inputs(**changes: object) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        document = json.loads(content)
        document["inputs"] |= changes
        return json.dumps(document).encode()

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokenizer.json", lambda content: content + b" ", "is not the tokenizer that the model learned with"),
        ("model.json", _inputs(vocab="64"), "inputs"),
        ("model.json", _inputs(more=1), "inputs"),
        ("contract.json", lambda _: b"{}", "contract.json: format is None"),
        ("model.json", lambda content: content.replace(b'"language"', b'"network"'), "kind is 'network'"),
    ],
)
def test_an_altered_artifact_is_refused(
    name: str,
    change: Callable[[bytes], bytes],
    message: str,
    made: tuple[RunSpec, TokenDataset, Path],
    code_root: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made[2], folder)
    rewrite(folder, name, change)
    with pytest.raises(ArtifactRefused, match=message):
        load_language(folder, code_root)


def test_a_change_of_the_plan_is_other_model_code(
    made: tuple[RunSpec, TokenDataset, Path], code_root: Path, tmp_path: Path
) -> None:
    shutil.copytree(code_root, tmp_path / "other")
    file = tmp_path / "other" / "trainer" / "parallel" / "plan.py"
    file.write_text(file.read_text() + "\n# changed\n")
    assert factory_digest(tmp_path / "other", "pipelines/words/model.py") != factory_digest(
        code_root, "pipelines/words/model.py"
    )
    with pytest.raises(CodeRefused, match="the artifact was trained with"):
        load_language(made[2], tmp_path / "other")


def test_what_models_import_of_the_trainer_is_covered() -> None:
    """All but the types of the spec and the digests themselves: those make no module."""
    files = [f for part in COVERED for f in ([ROOT / part] if part.endswith(".py") else (ROOT / part).glob("*.py"))]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    imported = {
        node.module
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer.")
    }
    assert imported - names == {"trainer.blobs", "trainer.spec"}
