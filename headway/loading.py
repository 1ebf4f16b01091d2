"""Reads a pipeline's folder: `defs.yaml` with line-exact errors, and the Python it refers to.

The folder is data until `Pipeline.function` is called: nothing in it is imported before.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headway.declaration import PipelineSpec
from headway.errors import HeadwayError

COMPONENT_TYPE = "assets.component.ModelPipeline"
PIPELINES_ROOT = Path(__file__).resolve().parent.parent / "pipelines"
DEFS_FILE = "defs.yaml"


class PipelineNotFound(HeadwayError):
    """No folder of that name or path holds a `defs.yaml`."""


@dataclass(frozen=True)
class Problem:
    """One fault of a declaration: where it stands and what would be right."""

    file: str
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field}: {self.message}"


Keys = list[str | int]
Fault = tuple[Keys, str] | Problem
"""What is wrong at a place below `attributes`, or a fault of another file."""


class DeclarationInvalid(HeadwayError):
    """`defs.yaml` says something it may not say; `problems` lists every fault with file, line and field."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)), "correct the lines named above and run `headway check` again")
        self.problems = problems


@dataclass(frozen=True)
class Pipeline:
    """A loaded declaration and the folder it came from."""

    spec: PipelineSpec
    folder: Path
    tree_digest: str = field(compare=False)

    @cached_property
    def name(self) -> str:
        """The declared name."""
        return self.spec.name

    def function(self, reference: str, *, fresh: bool = False) -> Callable[..., Any]:
        """The function behind a dotted reference such as `sources.canonical_flights`.

        With `fresh` its file is executed anew, so that nothing remembered at module level is shared with earlier calls.

        Raises `DeclarationInvalid` when the file or the function is missing.
        """
        module_name, _, name = reference.partition(".")
        module = _import_file(self.folder / f"{module_name}.py", self.tree_digest, fresh=fresh)
        found = getattr(module, name, None)
        if not callable(found):
            file = str(self.folder / DEFS_FILE)
            raise DeclarationInvalid([Problem(file, 1, "reference", _no_function(reference, []))])
        return found


def load_pipeline(reference: str | Path, root: Path | None = None) -> Pipeline:
    """Load a pipeline by its folder name under `pipelines/`, or by the path of its folder or `defs.yaml`.

    Raises `PipelineNotFound` or `DeclarationInvalid`.
    """
    file = _locate(str(reference), root or PIPELINES_ROOT)
    spec = _read(file)
    return Pipeline(spec=spec, folder=file.parent, tree_digest=tree_digest(file.parent))


def from_spec(spec: PipelineSpec, folder: Path) -> Pipeline:
    """Pipeline of an already validated spec, for callers that parse `defs.yaml` themselves.

    Raises:
        DeclarationInvalid: what the spec refers to is not there, or a run of it could not start.
    """
    _refuse(list(_faults(spec, folder)), folder)
    pipeline = Pipeline(spec=spec, folder=folder, tree_digest=tree_digest(folder))
    check_layout(pipeline)
    return pipeline


def check_layout(pipeline: Pipeline) -> None:
    """Refuse a layout that its nodes do not fill, or a batch that its ranks do not divide.

    `load_pipeline` leaves this to a run's plan, which knows what a launch overrides.

    Raises:
        DeclarationInvalid: names the field and what would do.
    """
    _refuse(list(_layout_faults(pipeline.spec)), pipeline.folder)


def _refuse(faults: list[Fault], folder: Path) -> None:
    if faults:
        file = folder / DEFS_FILE
        document = next(d for d, _ in _declarations(file))
        raise DeclarationInvalid([_located(fault, document, file) for fault in faults])


def tree_digest(folder: Path) -> str:
    """sha256 over names and bytes of a folder's files, caches and hidden files left out."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if not path.is_file() or any(p.startswith(".") or p == "__pycache__" for p in parts):
            continue
        content = path.read_bytes()
        name = "/".join(parts).encode()
        digest.update(len(name).to_bytes(4, "big") + name + len(content).to_bytes(8, "big") + content)
    return f"sha256:{digest.hexdigest()}"


def _locate(reference: str, root: Path) -> Path:
    for candidate in (root / reference / DEFS_FILE, Path(reference) / DEFS_FILE, Path(reference)):
        if candidate.is_file() and candidate.suffix in (".yaml", ".yml"):
            return candidate.resolve()
    known = sorted(p.parent.name for p in root.glob(f"*/{DEFS_FILE}"))
    raise PipelineNotFound(
        f"no pipeline {reference!r}", f"give one of {known}, or the path of a folder that holds {DEFS_FILE}"
    )


def _read(file: Path) -> PipelineSpec:
    for document, attributes in _declarations(file):
        return _validate(attributes, document, file)
    raise DeclarationInvalid([Problem(str(file), 1, "type", f"no document of type {COMPONENT_TYPE!r}")])


def _declarations(file: Path) -> Iterator[tuple[yaml.Node, dict[str, Any]]]:
    """The documents of a file that declare a pipeline, with their attributes."""
    try:
        documents = [d for d in yaml.compose_all(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader) if d]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        problem = Problem(str(file), line, "yaml", str(getattr(error, "problem", None) or error))
        raise DeclarationInvalid([problem]) from error
    for document in documents:
        _refuse_repeated_keys(document, file)
        content = _construct(document)
        if isinstance(content, dict) and content.get("type") == COMPONENT_TYPE:
            yield document, content.get("attributes") or {}


def _construct(node: yaml.Node) -> object:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _refuse_repeated_keys(node: yaml.Node, file: Path, path: str = "") -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            here = f"{path}.{name}" if path else name
            if name in seen:
                raise DeclarationInvalid([Problem(str(file), key.start_mark.line + 1, here, "is written twice")])
            seen.add(name)
            _refuse_repeated_keys(value, file, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _refuse_repeated_keys(value, file, f"{path}[{index}]")


def _validate(attributes: dict[str, Any], document: yaml.Node, file: Path) -> PipelineSpec:
    try:
        spec = PipelineSpec.model_validate(attributes)
    except ValidationError as error:
        raise DeclarationInvalid([_problem(e, document, file) for e in error.errors()]) from error
    problems = [_located(fault, document, file) for fault in _faults(spec, file.parent)]
    if problems:
        raise DeclarationInvalid(problems)
    return spec


def _problem(error: ErrorDetails, document: yaml.Node, file: Path) -> Problem:
    loc = error["loc"]
    keys = [k for i, k in enumerate(loc) if not (_is_union_tag(k) or (i and (loc[i - 1], k) in _KINDS))]
    message = error["msg"].removeprefix("Value error, ")
    if not keys:
        keys, message = _place_of(message)
    line = _line_of(document, ["attributes", *keys])
    if error["type"] == "extra_forbidden":
        allowed = _allowed_fields(keys[:-1])
        message = f"{keys[-1]!r} is not a field here" + (f"; allowed are {allowed}" if allowed else "")
    if error["type"] == "missing":
        message = "is required"
    shown = error.get("input")
    own_words = error["type"] in ("extra_forbidden", "missing", "value_error")
    if not own_words and isinstance(shown, str | int | float | bool):
        message = f"{message}, got {shown!r}"
    return Problem(str(file), line, ".".join(map(str, keys)) or "attributes", message)


def _place_of(message: str) -> tuple[list[Any], str]:
    """Split a message about several fields, which begins with the path of the one to look at."""
    path, _, rest = message.partition(": ")
    sections = {field.alias or name for name, field in PipelineSpec.model_fields.items()}
    named = bool(rest) and path.partition(".")[0] in sections
    return (list(path.split(".")), rest) if named else ([], message)


# What stands in a place once its kind is known is told with the kind in its path.
_KINDS = {("format", "csv"), ("format", "parquet"), ("format", "text"), ("tokenizer", "bpe"), ("tokenizer", "bytes")}


def _is_union_tag(key: object) -> bool:
    return isinstance(key, str) and (key[:1].isupper() or key.startswith(("function-", "constrained-")))


def _allowed_fields(keys: list[Any]) -> list[str]:
    """Field names allowed at a place, found by following the published schema; empty when it is a free mapping."""
    schema = PipelineSpec.model_json_schema()
    nodes = [schema]
    for key in keys:
        nodes = [deeper for node in nodes for deeper in _descend(schema, node, key)]
    return sorted({name for node in nodes for name in _resolve(schema, node).get("properties", {})})


def _resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return schema["$defs"][reference.rsplit("/", 1)[1]] if reference else node


def _descend(schema: dict[str, Any], node: dict[str, Any], key: object) -> Iterator[dict[str, Any]]:
    resolved = _resolve(schema, node)
    branches = [resolved, *resolved.get("anyOf", []), *resolved.get("oneOf", [])]
    for branch in (_resolve(schema, b) for b in branches):
        free = branch.get("additionalProperties")
        values = (
            [branch["properties"][key]]
            if key in branch.get("properties", {})
            else [*branch.get("patternProperties", {}).values(), *([free] if isinstance(free, dict) else [])]
        )
        for found in values:
            yield from [found, *found.get("anyOf", []), *found.get("oneOf", [])]


def _line_of(node: yaml.Node, keys: list[Any]) -> int:
    """Line (from 1) of the deepest part of a path that exists."""
    line = node.start_mark.line + 1
    for key in keys:
        found = _child(node, key)
        if found is None:
            return line
        line, node = found
    return line


def _child(node: yaml.Node, key: object) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == str(key):
                return name.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark.line + 1, node.value[key]
    return None


def _located(fault: Fault, document: yaml.Node, file: Path) -> Problem:
    if isinstance(fault, Problem):
        return fault
    keys, message = fault
    return Problem(str(file), _line_of(document, ["attributes", *keys]), ".".join(map(str, keys)), message)


def _references(spec: PipelineSpec) -> Iterator[tuple[Keys, str]]:
    for name, source in spec.sources.items():
        if source.transform is not None:
            yield ["sources", name, "transform"], source.transform
    if spec.training is not None:
        yield ["training", "factory"], spec.training.factory
    if spec.text is not None:
        return
    for group, features in (("derived", spec.features.derived), ("custom", spec.features.custom)):
        for name, feature in features.items():
            yield ["features", group, name, "function"], feature.function


def _faults(spec: PipelineSpec, folder: Path) -> Iterator[Fault]:
    """What a spec alone cannot know: files that are not there, calendars that cannot be."""
    broken: dict[Path, Problem] = {}
    for keys, reference in _references(spec):
        module, _, name = reference.partition(".")
        source = folder / f"{module}.py"
        if not source.is_file():
            yield keys, f"{reference!r}: there is no {module}.py beside {DEFS_FILE}"
            continue
        names = _function_names(source)
        if isinstance(names, Problem):
            broken[source] = names
        elif name not in names:
            yield keys, _no_function(reference, names)
    yield from broken.values()
    yield from _calendar_faults(spec)
    for name, source in spec.sources.items():
        if not (folder / source.quality.suite).is_file():
            yield ["sources", name, "quality", "suite"], f"there is no {source.quality.suite} beside {DEFS_FILE}"


def _layout_faults(spec: PipelineSpec) -> Iterator[Fault]:
    # Imported here: a plan knows pipelines, and with it this module.
    from headway.training.plan import declared_batch, declared_layout
    from trainer.spec import SpecRefused

    training = spec.training
    if training is None:
        return
    try:
        layout = declared_layout(training)
        layout.check()
        declared_batch(training).check_ranks(layout.data_ranks)
    except SpecRefused as error:
        yield ["training", *_DECLARED_AS.get(error.field, (error.field.rpartition(".")[2],))], error.problem


# Where defs.yaml says what a run spec calls otherwise.
_DECLARED_AS: dict[str, tuple[str, ...]] = {
    "batch.global_size": ("batch",),
    "layout": ("layout",),
    "layout.min_nodes": ("nodes", "min"),
    **{f"layout.{degree}": ("layout",) for degree in ("dp", "shard", "tp", "pp", "sp", "ep")},
}


def _function_names(source: Path) -> list[str] | Problem:
    """Names of a file's functions, or why it is no Python; the file is not imported."""
    try:
        body = ast.parse(source.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        return Problem(str(source), error.lineno or 1, source.stem, f"syntax error: {error.msg}")
    except ValueError as error:
        return Problem(str(source), 1, source.stem, f"syntax error: {error}")
    return sorted(node.name for node in body if isinstance(node, ast.FunctionDef))


def _calendar_faults(spec: PipelineSpec) -> Iterator[Fault]:
    # Imported here: numpy is not needed to load a declaration for Dagster.
    from headway.datasets.partitions import CalendarError, PartitionScheme

    for name, source in spec.sources.items():
        if source.partition is None:
            continue
        try:
            PartitionScheme.from_spec(source.partition)
        except CalendarError as error:
            yield ["sources", name, "partition", *error.field], str(error)


def _no_function(reference: str, names: list[str]) -> str:
    return f"no function {reference!r}; found {names}"


def _import_file(file: Path, digest: str, *, fresh: bool) -> ModuleType:
    """Import a file by path under a name that holds the folder's digest, so that an edited file is never stale."""
    name = f"headway_pipeline_{file.parent.name}_{digest[-12:]}_{file.stem}"
    if name in sys.modules and not fresh:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PipelineNotFound(f"cannot read {file}", "check that the file exists")
    module = importlib.util.module_from_spec(spec)
    if not fresh:
        sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if not fresh:
            del sys.modules[name]
        raise
    return module
