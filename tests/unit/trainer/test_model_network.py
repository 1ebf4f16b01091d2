"""The network of the flight pipeline: its factory, options, groups of parameters, and that it learns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score
from support.training_data import ROOT, model_spec, quiet, training_run
from torch.nn.functional import binary_cross_entropy_with_logits

from trainer.artifact import batch_logits
from trainer.baselines import logistic_module
from trainer.data import Dataset, load_data
from trainer.models.factory import CodeRefused, build_model, factory_digest, parameter_groups
from trainer.spec import RunSpec, SpecRefused


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Dataset]:
    store = tmp_path_factory.mktemp("store")
    spec = training_run(store, days=10, rows=300, model=model_spec(options={"width": 32}))
    return spec, load_data(spec, store, quiet)


def test_it_gives_one_logit_per_row(made: tuple[RunSpec, Dataset]) -> None:
    spec, dataset = made
    model = build_model(spec, dataset.inputs, ROOT)
    logits = batch_logits(model, dataset.valid)
    assert logits.shape == (len(dataset.valid),)


def test_the_seed_fixes_the_first_weights(made: tuple[RunSpec, Dataset]) -> None:
    spec, dataset = made
    states: list[dict[str, torch.Tensor]] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build_model(spec, dataset.inputs, ROOT).state_dict())
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    assert not torch.equal(states[0]["enter.weight"], states[2]["enter.weight"])


def test_every_parameter_is_in_one_group_and_only_matrices_decay(made: tuple[RunSpec, Dataset]) -> None:
    spec, dataset = made
    model = build_model(spec, dataset.inputs, ROOT)
    decay, rest = parameter_groups(spec, model, ROOT)
    assert (decay["weight_decay"], rest["weight_decay"]) == (spec.optimizer.weight_decay, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    grouped = [names[id(p)] for g in (decay, rest) for p in g["params"]]
    assert sorted(grouped) == sorted(names.values())
    assert all(
        n.endswith("weight") and "norm" not in n and "embeddings" not in n and "waves" not in n
        for n in (names[id(p)] for p in decay["params"])
    )


def test_unknown_and_missing_categories_start_without_an_opinion(made: tuple[RunSpec, Dataset]) -> None:
    spec, dataset = made
    model = build_model(spec, dataset.inputs, ROOT)
    for name, weight in model.state_dict().items():
        if name.startswith("embeddings"):
            assert not weight[:2].any()
            assert weight[2:].all()


@pytest.mark.parametrize(
    "options", [{"height": 3}, {"width": 0}, {"blocks": -1}, {"dropout": 1.0}, {"dropout": -0.1}, {"waves": -1}]
)
def test_options_that_make_no_network_are_refused(made: tuple[RunSpec, Dataset], options: dict[str, float]) -> None:
    spec, dataset = made
    wrong = replace(spec, model=replace(spec.model, options=options))
    with pytest.raises(SpecRefused, match=r"model\.options"):
        build_model(wrong, dataset.inputs, ROOT)


def test_it_learns_what_a_linear_model_cannot(made: tuple[RunSpec, Dataset]) -> None:
    spec, dataset = made
    torch.manual_seed(0)
    model = build_model(spec, dataset.inputs, ROOT)
    optimizer = torch.optim.AdamW(parameter_groups(spec, model, ROOT), lr=5e-3)
    numeric, categorical = torch.from_numpy(dataset.train.numeric), torch.from_numpy(dataset.train.categorical)
    target = torch.from_numpy(dataset.train.target)
    for _ in range(8):
        for rows in torch.randperm(len(target)).split(256):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(numeric[rows], categorical[rows]), target[rows]).backward()
            optimizer.step()
    linear = batch_logits(logistic_module(dataset, quiet)[0], dataset.valid)
    network = batch_logits(model, dataset.valid)
    assert roc_auc_score(dataset.valid.target, network) > roc_auc_score(dataset.valid.target, linear) + 0.02


def tree(folder: Path, text: str) -> Path:
    """A code tree with a factory of another pipeline."""
    (folder / "trainer" / "models").mkdir(parents=True)
    (folder / "trainer" / "parallel").mkdir()
    for covered in ("encoders.py", "parallel/plan.py"):
        (folder / "trainer" / covered).write_text("")
    (folder / "pipelines" / "p").mkdir(parents=True)
    (folder / "pipelines" / "p" / "model.py").write_text(text)
    return folder


def planned(spec: RunSpec, root: Path) -> RunSpec:
    return replace(spec, pipeline="p", model=replace(model_spec(root, "p"), options={}))


def test_code_that_changed_after_the_plan_is_refused(made: tuple[RunSpec, Dataset], tmp_path: Path) -> None:
    root = tree(tmp_path, "import torch\ndef build(inputs, options): return torch.nn.Linear(1, 1)\n")
    spec = planned(made[0], root)
    assert isinstance(build_model(spec, made[1].inputs, root), torch.nn.Linear)
    (root / "trainer" / "encoders.py").write_text("#")
    with pytest.raises(CodeRefused, match=spec.model.code_digest):
        build_model(spec, made[1].inputs, root)


@pytest.mark.parametrize("text", ["", "build = 1", "def build(inputs, options): return 5\n"])
def test_a_file_that_builds_no_module_is_refused(made: tuple[RunSpec, Dataset], tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, text)
    with pytest.raises(CodeRefused):
        build_model(planned(made[0], root), made[1].inputs, root)


def test_a_factory_without_groups_gets_one(made: tuple[RunSpec, Dataset], tmp_path: Path) -> None:
    root = tree(tmp_path, "import torch\ndef build(inputs, options): return torch.nn.Linear(2, 1)\n")
    spec = planned(made[0], root)
    model = build_model(spec, made[1].inputs, root)
    (group,) = parameter_groups(spec, model, root)
    assert len(group["params"]) == 2
    assert group["weight_decay"] == spec.optimizer.weight_decay


def test_an_error_in_the_users_code_is_not_taken_for_a_refusal(made: tuple[RunSpec, Dataset], tmp_path: Path) -> None:
    root = tree(tmp_path, "def build(inputs, options): return options['width']\n")
    with pytest.raises(KeyError):
        build_model(planned(made[0], root), made[1].inputs, root)


def test_the_factory_digest_covers_model_code_and_encoders_and_nothing_else(tmp_path: Path) -> None:
    root = tree(tmp_path, "x = 1\n")
    before = factory_digest(root, "pipelines/p/model.py")
    (root / "pipelines" / "p" / "defs.yaml").write_text("other: true\n")
    (root / "trainer" / "loop.py").write_text("x = 2\n")
    assert factory_digest(root, "pipelines/p/model.py") == before
    for covered in ("models/new.py", "parallel/plan.py"):
        (root / "trainer" / covered).write_text("x = 2\n")
        after = factory_digest(root, "pipelines/p/model.py")
        assert after != before
        before = after
