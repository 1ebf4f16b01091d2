"""Builds the torch module that a run spec or an artifact names, from code whose digest is the named one.

A pipeline's factory is a file in its folder, imported by its path. It may import from `trainer.models`,
`trainer.encoders`, `trainer.parallel.plan` and installed packages; anything else would not be covered by
`factory_digest`. (`trainer.spec` may be imported for its types.)
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from trainer.blobs import code_tree_digest
from trainer.models.inputs import Inputs
from trainer.parallel.plan import ParallelPlan
from trainer.spec import OptimizerSpec, RunSpec, SpecRefused

COVERED = ("trainer/models", "trainer/encoders.py", "trainer/parallel/plan.py")
"""Parts of the code tree that a factory may use beside its own file."""


class CodeRefused(ValueError):
    """Model code whose digest is not the one that was asked for, or that gives no module."""


def build_model(spec: RunSpec, inputs: Inputs, code_root: Path) -> nn.Module:
    """The untrained module of a run.

    Of rows, `forward(numeric, categorical)` gives logits [batch]; of tokens [batch, T], `forward(tokens)` gives logits
    [batch, T, vocab].

    Initial weights come from torch's current random state; the caller seeds it.

    Args:
        spec: The run.
        inputs: The encoding of its training rows, or its tokens.
        code_root: The tree that holds `trainer/` and `pipelines/`.

    Raises:
        CodeRefused: the tree is not the one that the spec names.
        SpecRefused: the factory refuses its options.
    """
    check_code(spec, code_root)
    factory = load_factory(code_root, spec.model.file)
    return make_module(factory, spec.model.function, inputs, spec.model.options)


def parameter_groups(spec: RunSpec, model: nn.Module, code_root: Path) -> list[dict[str, Any]]:
    """The optimizer's groups: what the factory file's `parameter_groups(model, optimizer)` says, else one group."""
    factory = load_factory(code_root, spec.model.file)
    split: Any = getattr(factory, "parameter_groups", None)
    if split is None:
        return one_group(model, spec.optimizer)
    return split(model, spec.optimizer)


def parallel_plan(spec: RunSpec, code_root: Path) -> ParallelPlan | None:
    """How the run's model may be divided: what the factory file's `parallel_plan(options)` says; None without one."""
    factory = load_factory(code_root, spec.model.file)
    declare: Any = getattr(factory, "parallel_plan", None)
    return None if declare is None else declare(dict(spec.model.options))


def one_group(model: nn.Module, optimizer: OptimizerSpec) -> list[dict[str, Any]]:
    """All trainable parameters with the same decay."""
    return [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": optimizer.weight_decay}]


def code_parts(pipeline: str) -> tuple[str, str]:
    """Parts of the code tree that `model.code_digest` of a run spec covers."""
    return ("trainer", f"pipelines/{pipeline}")


def check_code(spec: RunSpec, code_root: Path) -> None:
    """Refuse a tree other than the one that the spec names.

    Raises:
        CodeRefused: says both digests.
    """
    found = code_tree_digest(code_root, code_parts(spec.pipeline))
    if found != spec.model.code_digest:
        raise CodeRefused(
            f"the code in {code_root} has the digest {found}, the run was started with {spec.model.code_digest}"
        )


def factory_digest(code_root: Path, file: str) -> str:
    """Digest of the code that makes the module and encodes its inputs; other code may change without harm.

    Raises:
        CodeRefused: the file lies outside of `pipelines`, or is not there.
    """
    _factory_path(code_root, file)
    return code_tree_digest(code_root, (file, *COVERED))


def load_factory(code_root: Path, file: str) -> ModuleType:
    """Import a pipeline's factory: `file` is its path in the tree, `pipelines/<pipeline>/<name>.py`.

    Raises:
        CodeRefused: the file lies outside of `pipelines`, or is not there.
    """
    path = _factory_path(code_root, file)
    name = f"model_of_{path.parent.name}_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise CodeRefused(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def make_module(factory: ModuleType, function: str, inputs: Inputs, options: Mapping[str, Any]) -> nn.Module:
    """Call the factory's function.

    Raises:
        CodeRefused: there is no such function, or it returns no torch module.
        SpecRefused: the function refuses its options by a `ValueError`.
    """
    build: Any = getattr(factory, function, None)
    if not callable(build):
        raise CodeRefused(f"{factory.__file__} has no function {function!r}")
    try:
        module = build(inputs, dict(options))
    except ValueError as error:
        raise SpecRefused("model.options", f"{function} refuses {dict(options)}: {error}") from error
    if not isinstance(module, nn.Module):
        raise CodeRefused(f"{function} returned a {type(module).__name__}, not a torch module")
    return module


def _factory_path(code_root: Path, file: str) -> Path:
    folder = (code_root / "pipelines").resolve()
    path = (code_root / file).resolve()
    if folder not in path.parents or not path.is_file():
        raise CodeRefused(f"no file {file!r} below {folder}")
    return path
