"""The run spec: everything that fixes what a training run computes, and what one attempt at it needs to start.

Both are JSON documents that platform and workers share. Standard library only. Times are int64 microseconds UTC.
A document of another version, with an unknown or a missing field, or with a combination that no engine can run, is
refused with the field's path before anything starts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from enum import IntEnum
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from trainer.blobs import Json, canonical_json, digest_bytes

RUN_FORMAT = "headway.run/1"
ATTEMPT_FORMAT = "headway.attempt/1"

Engine = Literal["ddp", "fsdp2", "deepspeed"]
Precision = Literal["fp32", "bf16", "fp16"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
Offload = Literal["", "optimizer", "parameters"]
Determinism = Literal["deterministic", "fast"]

TokenSplit = Literal["train", "valid", "held_out"]

ENGINES: tuple[str, ...] = get_args(Engine)
LAYOUT_OPTIONS = ("activation_checkpointing", "compile")
MOST_RANKS = 65_536
MOST_TOKENS = 65_536
DEGREES = ("dp", "shard", "tp", "pp", "sp", "ep")
PLAIN_DEGREE: Mapping[str, str] = {"ddp": "dp", "fsdp2": "shard", "deepspeed": "dp"}
"""The degree that an engine's processes count as when nothing else is said."""

STAGES_PER_RANK: Mapping[str, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2}
"""Pipeline stages that each rank along pp holds, by schedule."""

ZERO_STAGES: Mapping[str, tuple[int, ...]] = {"ddp": (0,), "fsdp2": (0,), "deepspeed": (0, 1, 2, 3)}

# A field that came later is left out of the JSON while it has its default, so that the digests of runs that were made
# before it existed stay what they were.
_LATER: Mapping[str, bool] = {"later": True}


class ExitCode(IntEnum):
    """What a node's process says with its exit status."""

    DONE = 0
    REFUSED_SPEC = 64
    USER_CODE = 65
    PREEMPTED = 75
    HUNG = 76
    LOST_PEER = 77


class SpecRefused(ValueError):
    """A run spec that no worker may start; `field` is the dotted path of what is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class LayoutConflict(SpecRefused):
    """Fields of a spec that do not go together: `fields` with their values, the `reason`, and what would do.

    `nearest` and `nearest_precision` are the valid choice that differs least, on as many ranks where there is one.
    """

    def __init__(
        self, fields: Mapping[str, object], reason: str, nearest: LayoutSpec, nearest_precision: Precision
    ) -> None:
        said = ", ".join(f"{name} {value!r}" for name, value in fields.items())
        super().__init__(
            next(iter(fields)),
            f"{said} do not go together: {reason}; the nearest valid choice is "
            f"{describe_choice(nearest, nearest_precision)}",
        )
        self.fields = dict(fields)
        self.reason = reason
        self.nearest = nearest
        self.nearest_precision: Precision = nearest_precision


@dataclass(frozen=True)
class DataFile:
    """One snapshot's values: a Parquet blob in the store, and how many label rows it holds."""

    partition: str
    sha256: str
    size: int
    rows: int


@dataclass(frozen=True)
class DataSpec:
    """Which rows are learned from, and what their columns mean.

    A row is trained on when its label was known before `cut`; the rows observed at or after `validation_from` decide
    when to stop. `categorical` and `numeric` are input columns in the model's order.
    """

    files: tuple[DataFile, ...]
    identity: tuple[str, ...]
    target: str
    observed_at: str
    known_at: str
    cut: int
    validation_from: int
    categorical: tuple[str, ...]
    numeric: tuple[str, ...]

    def check(self) -> None:
        """Refuse data that cannot be learned from."""
        if not self.files:
            raise SpecRefused("data.files", "no snapshot to train on")
        if not self.numeric and not self.categorical:
            raise SpecRefused("data.numeric", "a model needs at least one input column")
        twice = sorted(
            {c for c in (*self.categorical, *self.numeric) if (*self.categorical, *self.numeric).count(c) > 1}
        )
        if twice:
            raise SpecRefused("data.numeric", f"columns {twice} stand twice among the inputs")
        if self.validation_from >= self.cut:
            raise SpecRefused("data.validation_from", f"{self.validation_from} is not before the cut {self.cut}")


@dataclass(frozen=True)
class TokenFile:
    """One shard of a text: a blob in the store of `tokens` raw little-endian uint16, 2 `size` bytes each.

    Documents stand one after another, each ended by the end token.
    """

    split: TokenSplit
    sha256: str
    size: int
    tokens: int


@dataclass(frozen=True)
class TokenDataSpec:
    """Which text is learned from, as tokens.

    A sample is `context` tokens and, one token later, the tokens that follow them; `vocab` tokens are known, of which
    `end_token` ends each document. `tokenizer` is the digest of the blob that makes tokens of text. The files of the
    split `train` are learned from, those of `valid` decide when to stop, those of `held_out` training never opens.
    """

    files: tuple[TokenFile, ...]
    tokenizer: str
    vocab: int
    context: int
    end_token: int
    kind: Literal["tokens"] = "tokens"

    def of_split(self, split: TokenSplit) -> tuple[TokenFile, ...]:
        """The shards of a split, in their order."""
        return tuple(file for file in self.files if file.split == split)

    def check(self) -> None:
        """Refuse tokens that cannot be learned from."""
        for split in ("train", "valid"):
            if not self.of_split(split):
                raise SpecRefused("data.files", f"no shard of the split {split!r}")
        for index, file in enumerate(self.files):
            if file.size != 2 * file.tokens or file.tokens < 0:
                raise SpecRefused(
                    f"data.files[{index}].size", f"{file.size} bytes; {file.tokens} tokens of 2 bytes are expected"
                )
        if not 2 <= self.vocab <= MOST_TOKENS:
            raise SpecRefused("data.vocab", f"{self.vocab} is outside of 2 to {MOST_TOKENS}, what 16 bits can say")
        if not 0 <= self.end_token < self.vocab:
            raise SpecRefused("data.end_token", f"{self.end_token} is none of the {self.vocab} tokens")
        if self.context < 1:
            raise SpecRefused("data.context", f"{self.context} is less than 1")


@dataclass(frozen=True)
class ModelSpec:
    """The torch module: `file` (its path in the code tree) and `function` that build it, and its options.

    `code_digest` names the code tree, `code_manifest` the stored copy of it from which the tree can be put in place.
    """

    file: str
    function: str
    code_digest: str
    code_manifest: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model that a layout divides, as the model's options state them; 0 where they do not.

    `layers` blocks of `heads` query and `kv_heads` key heads, `dim` wide, `hidden` wide inside the feed-forward part;
    `experts` per block of which a token takes `top_k` (0: none); `vocab` tokens, at most `sequence` of them; `tied`:
    the output layer uses the embedding's weights.
    """

    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    dim: int = 0
    vocab: int = 0
    sequence: int = 0
    hidden: int = 0
    top_k: int = 0
    tied: bool = False


def model_facts(options: Mapping[str, Any]) -> ModelFacts:
    """The sizes that a model's options state; values that are no whole number above 0 are for the factory to refuse."""
    sizes: dict[str, Any] = {
        f.name: value
        for f in fields(ModelFacts)
        if f.name != "tied" and type(value := options.get(f.name)) is int and value > 0
    }
    return ModelFacts(**sizes, tied=options.get("tied") is True)


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW with a linear warm-up and cosine decay; `clip_norm` 0 switches clipping off."""

    lr: float = 1e-3
    weight_decay: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_norm: float = 1.0
    warmup_share: float = 0.05

    def check(self) -> None:
        """Refuse rates that cannot train."""
        if not 0 < self.lr < 10:
            raise SpecRefused("optimizer.lr", f"{self.lr} is outside (0, 10)")
        if not 0 <= self.warmup_share < 1:
            raise SpecRefused("optimizer.warmup_share", f"{self.warmup_share} is outside [0, 1)")


@dataclass(frozen=True)
class LayoutSpec:
    """How the work is spread. The product of the six degrees is the world size, nodes x processes_per_node.

    `dp` replicates, `shard` divides parameters, gradients and moments (FSDP2), `tp` divides matrices, `pp` layers,
    `sp` the sequence, `ep` experts. `zero` is DeepSpeed's stage, 0 with the other engines. `schedule` is the order of
    the micro-batches in a pipeline. `offload` keeps the optimizer, or the parameters with it, in host memory.
    `activation_checkpointing` computes the blocks' activations again in the backward pass. `min_nodes` is how few nodes
    an attempt may have after infrastructure took some away; 0: always `nodes`.

    What an engine supports stands in `trainer.layouts`; here is only what makes no sense with any.
    """

    engine: Engine = "ddp"
    zero: int = 0
    nodes: int = 1
    processes_per_node: int = 1
    dp: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1
    schedule: PipelineSchedule = field(default="1f1b", metadata=_LATER)
    offload: Offload = field(default="", metadata=_LATER)
    activation_checkpointing: bool = field(default=False, metadata=_LATER)
    compile: bool = field(default=False, metadata=_LATER)
    min_nodes: int = field(default=0, metadata=_LATER)

    @property
    def world_size(self) -> int:
        """Ranks of the whole run, on all of its nodes."""
        return self.nodes * self.processes_per_node

    @property
    def data_ranks(self) -> int:
        """Over how many parts a global batch is split: ranks along sp, tp and pp see the same rows."""
        return self.dp * self.shard * self.ep

    def to_json(self) -> dict[str, Json]:
        """The layout as JSON."""
        return _to_json(self)

    def check(self) -> None:
        """Refuse what no engine could mean, with the reason."""
        if self.engine not in ENGINES:
            raise SpecRefused("layout.engine", f"{self.engine!r}; engines are {list(ENGINES)}")
        for name in ("nodes", "processes_per_node", *DEGREES):
            if getattr(self, name) < 1:
                raise SpecRefused(f"layout.{name}", f"{getattr(self, name)} is less than 1")
        if not 0 <= self.min_nodes <= self.nodes:
            raise SpecRefused("layout.min_nodes", f"{self.min_nodes} is not from 1 to the {self.nodes} nodes")
        if self.world_size > MOST_RANKS:
            raise SpecRefused("layout.nodes", f"{self.world_size} ranks are more than {MOST_RANKS}")
        product = degree_product(self)
        if product != self.world_size:
            raise SpecRefused(
                "layout.dp",
                f"the product of {', '.join(DEGREES)} is {product}, the world size is {self.world_size} "
                f"({self.nodes} nodes x {self.processes_per_node} processes)",
            )
        stages = ZERO_STAGES[self.engine]
        if self.zero not in stages:
            raise SpecRefused("layout.zero", f"{self.zero}: engine {self.engine} runs ZeRO stages {list(stages)}")


def degree_product(layout: LayoutSpec) -> int:
    """The ranks that a layout's six degrees ask for."""
    return math.prod(getattr(layout, name) for name in DEGREES)


def layout_on(layout: LayoutSpec, nodes: int) -> LayoutSpec:
    """The layout of an attempt on `nodes` nodes: fewer replicas (dp), or fewer shards where dp does not divide.

    What one rank holds of a layer, stage, sequence or expert stays as it is; so does the ZeRO stage.

    Raises:
        SpecRefused: the run may not have so many nodes, or neither dp nor shard divides by them.
    """
    fewest = layout.min_nodes or layout.nodes
    if not fewest <= nodes <= layout.nodes:
        raise SpecRefused("layout.nodes", f"{nodes} is not from {fewest} to {layout.nodes}")
    for name in ("dp", "shard"):
        degree, rest = divmod(getattr(layout, name) * nodes, layout.nodes)
        if degree and not rest:
            changed: dict[str, Any] = {name: degree}
            return replace(layout, nodes=nodes, min_nodes=0, **changed)
    raise SpecRefused(
        "layout.min_nodes",
        f"neither dp {layout.dp} nor shard {layout.shard} goes from {layout.nodes} nodes to {nodes} in whole numbers",
    )


def parse_layout(engine: str, text: str, nodes: int | None = None, processes_per_node: int | None = None) -> LayoutSpec:
    """The layout that `text`, such as `dp=2,shard=2,zero=1`, writes down for `engine`.

    Degrees that are not named are 1; `zero` is 1 with deepspeed when it is not named, and refused elsewhere. Of `nodes`
    and `processes_per_node`, one that is not given follows from the degrees; neither given means one node.

    Raises:
        SpecRefused: an unknown, repeated or impossible entry, or nodes that the degrees do not fill.
    """
    given = _layout_entries(text)
    if "zero" in given and engine != "deepspeed":
        raise SpecRefused("layout.zero", f"{given['zero']}: only engine deepspeed has ZeRO stages, not {engine}")
    zero = given.pop("zero", 1 if engine == "deepspeed" else 0)
    if min(given.values(), default=1) < 1:
        raise SpecRefused(f"layout.{min(given, key=given.__getitem__)}", "a degree is a whole number of at least 1")
    world = math.prod(given.values())
    if nodes is None:
        nodes = 1 if processes_per_node is None else _ratio("processes_per_node", world, processes_per_node)
    if processes_per_node is None:
        processes_per_node = _ratio("nodes", world, nodes)
    degrees: dict[str, Any] = {"engine": engine, **given}
    layout = LayoutSpec(zero=zero, nodes=nodes, processes_per_node=processes_per_node, **degrees)
    layout.check()
    return layout


def layout_text(layout: LayoutSpec) -> str:
    """The degrees of a layout as `parse_layout` reads them: those above 1, and the stage with deepspeed."""
    parts = [f"{name}={getattr(layout, name)}" for name in DEGREES if getattr(layout, name) != 1] or ["dp=1"]
    return ",".join([*parts, *([f"zero={layout.zero}"] if layout.engine == "deepspeed" else [])])


def describe_choice(layout: LayoutSpec, precision: str) -> str:
    """A layout and a precision in words: `deepspeed dp=2,zero=2 bf16, offload optimizer`."""
    named = [f"{name} {getattr(layout, name)}" for name in ("offload",) if getattr(layout, name)]
    if layout.pp > 1:
        named.append(f"schedule {layout.schedule}")
    named += [name for name in LAYOUT_OPTIONS if getattr(layout, name)]
    return ", ".join([f"{layout.engine} {layout_text(layout)} {precision}", *named])


def _layout_entries(text: str) -> dict[str, int]:
    given: dict[str, int] = {}
    for entry in text.split(","):
        name, equals, number = (part.strip() for part in entry.partition("="))
        if name not in (*DEGREES, "zero") or not equals:
            raise SpecRefused("layout", f"{entry.strip()!r:.80}; entries are {list(DEGREES)} or zero, as dp=2")
        if re.fullmatch(r"[0-9]{1,9}", number) is None:
            raise SpecRefused(f"layout.{name}", f"{number!r:.80} is no whole number from 0 to 999999999")
        if name in given:
            raise SpecRefused(f"layout.{name}", f"stands twice in {text!r:.80}")
        given[name] = int(number)
    return given


def _ratio(name: str, world: int, part: int) -> int:
    if part < 1 or world % part:
        raise SpecRefused(f"layout.{name}", f"the {world} ranks of the layout do not divide by {name} {part}")
    return world // part


@dataclass(frozen=True)
class BatchSpec:
    """Samples (rows, sequences) per optimizer step over all ranks, and how many micro-batches a rank's part makes."""

    global_size: int = 1024
    accumulation: int = 1

    def check(self) -> None:
        """Refuse what not even one rank could take."""
        for name in ("global_size", "accumulation"):
            if getattr(self, name) < 1:
                raise SpecRefused(f"batch.{name}", f"{getattr(self, name)} is less than 1")
        self.check_ranks(1)

    def check_ranks(self, data_ranks: int) -> None:
        """Refuse a batch that does not divide over `data_ranks`.

        Raises:
            SpecRefused: says which sizes next to it would.
        """
        share = data_ranks * self.accumulation
        below = self.global_size // share * share
        if below != self.global_size:
            near = f"{below} or {below + share}" if below else str(share)
            raise SpecRefused(
                "batch.global_size",
                f"{self.global_size} rows do not divide by {data_ranks} data-parallel ranks x {self.accumulation} "
                f"micro-batches; {near} would",
            )


@dataclass(frozen=True)
class ScheduleSpec:
    """How long to train, when to judge, and when to save.

    Training takes `epochs` epochs, or `steps` steps when those are given (then `epochs` means nothing), and ends before
    after `patience` judgements without a better validation loss. The validation split is judged at the end of each
    epoch, or each `judge_every` steps when those are given, and after the last step. `checkpoint_every` is in steps.

    `keep_last` newest checkpoints stay, the best one, and of every `keep_every_hours` hours the first (0: none for
    their time). `synchronous` saves hold the training up until they are on the disk; else it goes on meanwhile.
    """

    epochs: int = 10
    patience: int = 3
    checkpoint_every: int = 200
    keep_last: int = field(default=1, metadata=_LATER)
    keep_every_hours: float = field(default=0.0, metadata=_LATER)
    synchronous: bool = field(default=False, metadata=_LATER)
    steps: int = field(default=0, metadata=_LATER)
    judge_every: int = field(default=0, metadata=_LATER)

    def check(self) -> None:
        """Refuse a run without steps, and one that would keep no checkpoint."""
        for name in ("epochs", "patience", "checkpoint_every", "keep_last"):
            if getattr(self, name) < 1:
                raise SpecRefused(f"schedule.{name}", f"{getattr(self, name)} is less than 1")
        for name in ("steps", "judge_every"):
            if getattr(self, name) < 0:
                raise SpecRefused(f"schedule.{name}", f"{getattr(self, name)} is less than 0")
        if not 0 <= self.keep_every_hours < math.inf:
            raise SpecRefused("schedule.keep_every_hours", f"{self.keep_every_hours} is no number of hours from 0 on")


@dataclass(frozen=True)
class RestartSpec:
    """When silence counts as hung, and how often infrastructure may fail before the run does.

    No progress for `hang_factor` times the typical step, and at least for `hang_floor_s` seconds, is hung. `grace_s`
    is how long ranks may take to save after a request to stop. A collective may take `group_timeout_s`, or
    `group_timeout_factor` times the slowest step when that is more (`trainer.pace`).
    """

    max_attempts: int = 4
    hang_factor: float = 20.0
    hang_floor_s: float = 60.0
    grace_s: float = 20.0
    group_timeout_s: float = 60.0
    group_timeout_factor: float = field(default=5.0, metadata=_LATER)

    def check(self) -> None:
        """Refuse a factor that gives steps no time."""
        if not 1.0 <= self.group_timeout_factor < math.inf:
            raise SpecRefused("restart.group_timeout_factor", f"{self.group_timeout_factor} is no number from 1 on")


@dataclass(frozen=True)
class RunSpec:
    """One run, whole. Two specs with one digest compute the same thing on the same machines."""

    pipeline: str
    data: DataSpec | TokenDataSpec
    model: ModelSpec
    seed: int
    layout: LayoutSpec = LayoutSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    batch: BatchSpec = BatchSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    restart: RestartSpec = RestartSpec()
    precision: Precision = "fp32"
    determinism: Determinism = "deterministic"
    threads: int = 1
    format: str = RUN_FORMAT

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            SpecRefused: names the field and the reason.
        """
        if self.format != RUN_FORMAT:
            raise SpecRefused("format", f"{self.format!r}; this code reads {RUN_FORMAT!r}")
        for part in (self.data, self.optimizer, self.schedule, self.restart):
            part.check()
        model = model_facts(self.model.options)
        if isinstance(self.data, TokenDataSpec):
            _check_fits(self.data, model, self.layout)
        check_parallel(self.layout, self.precision, self.optimizer.clip_norm, self.batch, model)

    @property
    def rows(self) -> DataSpec:
        """The rows that the run learns from.

        Raises:
            SpecRefused: it learns from tokens.
        """
        if not isinstance(self.data, DataSpec):
            raise SpecRefused("data.kind", f"{self.data.kind!r}; rows of a table are expected here")
        return self.data

    @property
    def tokens(self) -> TokenDataSpec:
        """The tokens that the run learns from.

        Raises:
            SpecRefused: it learns from rows.
        """
        if not isinstance(self.data, TokenDataSpec):
            raise SpecRefused("data.kind", "missing: the data are rows of a table; tokens are expected here")
        return self.data

    def to_json(self) -> dict[str, Json]:
        """The spec as JSON."""
        return _to_json(self)

    @property
    def digest(self) -> str:
        """The digest of the canonical JSON."""
        return digest_bytes(canonical_json(self.to_json()))

    def on_nodes(self, nodes: int) -> RunSpec:
        """What an attempt on `nodes` nodes computes: the same run with `layout_on` them, the global batch kept.

        Raises:
            SpecRefused: the run may not have so many nodes, or cannot be spread over them.
        """
        if nodes == self.layout.nodes:
            return self
        spec = replace(self, layout=layout_on(self.layout, nodes))
        spec.check()
        return spec

    def possible_nodes(self) -> tuple[int, ...]:
        """On how many nodes an attempt may run, ascending; the fewest and the most are always among them."""
        found: list[int] = []
        for nodes in range(self.layout.min_nodes or self.layout.nodes, self.layout.nodes + 1):
            with suppress(SpecRefused):
                self.on_nodes(nodes)
                found.append(nodes)
        return tuple(found)


def _check_fits(data: TokenDataSpec, model: ModelFacts, layout: LayoutSpec) -> None:
    """Refuse tokens that the model does not know, samples that are too long for it, or that sp does not divide."""
    if model.vocab and model.vocab < data.vocab:
        raise SpecRefused("model.options.vocab", f"{model.vocab} tokens; the data have {data.vocab}")
    if model.sequence and model.sequence < data.context:
        raise SpecRefused("model.options.sequence", f"{model.sequence} positions; a sample has {data.context}")
    if layout.sp > 0 and data.context % layout.sp:
        raise SpecRefused("data.context", f"{data.context} tokens do not divide by {layout.sp} sequence ranks")


def check_parallel(
    layout: LayoutSpec, precision: Precision, clip_norm: float, batch: BatchSpec, model: ModelFacts
) -> None:
    """Refuse a layout that its engine does not support, or that batch or model do not divide over.

    Raises:
        LayoutConflict: the fields that do not go together, why, and the nearest valid choice.
        SpecRefused: a field that makes no sense by itself, or a batch that does not divide.
    """
    # The table is written in terms of this module.
    from trainer.layouts import check_layout

    batch.check()
    layout.check()
    check_layout(layout, precision, clip_norm, model, batch)
    batch.check_ranks(layout.data_ranks)
    if layout.min_nodes:
        try:
            check_parallel(layout_on(layout, layout.min_nodes), precision, clip_norm, batch, model)
        except SpecRefused as error:
            raise SpecRefused("layout.min_nodes", f"{layout.min_nodes} nodes cannot train this: {error}") from error


@dataclass(frozen=True)
class AttemptSpec:
    """What one attempt needs beside the run spec; facts of this attempt, none of which changes what is computed.

    `run_dir` holds `spec.json`, `checkpoints/` and `attempts/<attempt>/`; `store_root` is the content-addressed store
    that the data files come from; `code_root` is the tree from which model code is imported; `token` fences: a stale
    attempt publishes nothing. `worker` is the module that each rank runs.
    """

    run_id: str
    attempt: int
    token: int
    nodes: int
    processes_per_node: int
    run_dir: str
    store_root: str
    code_root: str
    worker: str = "trainer.worker"
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    format: str = ATTEMPT_FORMAT

    @property
    def world_size(self) -> int:
        """Ranks of this attempt."""
        return self.nodes * self.processes_per_node

    def to_json(self) -> dict[str, Json]:
        """The attempt as JSON."""
        return _to_json(self)


def parse_run(data: bytes | str) -> RunSpec:
    """Read and check a run spec.

    Raises:
        SpecRefused: not JSON, an unknown or missing field, a wrong type, or a combination that cannot run.
    """
    spec = _parse(RunSpec, data)
    spec.check()
    return spec


def parse_attempt(data: bytes | str) -> AttemptSpec:
    """Read an attempt.

    Raises:
        SpecRefused: as `parse_run`.
    """
    attempt = _parse(AttemptSpec, data)
    if attempt.format != ATTEMPT_FORMAT:
        raise SpecRefused("format", f"{attempt.format!r}; this code reads {ATTEMPT_FORMAT!r}")
    return attempt


T = TypeVar("T")


def _to_json(value: object) -> dict[str, Json]:
    told = [f for f in fields(cast("Any", value)) if not _is_left_out(f, getattr(value, f.name))]
    return cast("dict[str, Json]", {f.name: _plain(getattr(value, f.name)) for f in told})


def _is_left_out(f: Field[Any], value: object) -> bool:
    return bool(f.metadata.get("later")) and value == f.default


def _plain(value: object) -> Json:
    if is_dataclass(value):
        return _to_json(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    return cast("Json", value)


def _parse(kind: type[T], data: bytes | str) -> T:
    try:
        raw: object = json.loads(data)
    except ValueError as error:
        raise SpecRefused("$", f"not JSON: {error}") from error
    return cast("T", _read(kind, raw, ""))


def _read(kind: Any, raw: object, path: str) -> object:  # noqa: ANN401 - a type hint is any object
    """`raw` as a value of the type hint `kind`."""
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _read_object(kind, raw, path)
    if origin is tuple:
        if not isinstance(raw, list):
            raise SpecRefused(path, f"{raw!r:.80} is no list")
        items = cast("list[object]", raw)
        return tuple(_read(get_args(kind)[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    if origin is Literal:
        if raw not in get_args(kind):
            raise SpecRefused(path, f"{raw!r:.80}; allowed are {list(get_args(kind))}")
        return raw
    if origin in (Union, UnionType):
        return _read_object(_tagged(get_args(kind), raw, path), raw, path)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(raw, dict):
            raise SpecRefused(path, f"{raw!r:.80} is no object")
        return cast("object", raw)
    return _read_scalar(kind, raw, path)


def _tagged(kinds: tuple[Any, ...], raw: object, path: str) -> object:
    """Which of `kinds` the `kind` of `raw` names; the one that has no such field stands for documents without it."""
    tag = cast("dict[str, object]", raw).get("kind") if isinstance(raw, dict) else None
    by_tag = {getattr(kind, "kind", None): kind for kind in kinds}
    if not isinstance(tag, str | None) or tag not in by_tag:
        allowed = sorted(name for name in by_tag if name)
        raise SpecRefused(f"{path}.kind", f"{tag!r:.80}; allowed are {allowed}, or none")
    return by_tag[tag]


def _read_object(kind: Any, raw: object, path: str) -> object:  # noqa: ANN401
    if not isinstance(raw, dict):
        raise SpecRefused(path or "$", f"{raw!r:.80} is no object")
    given = cast("dict[str, object]", raw)
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    for name in given:
        if name not in known:
            raise SpecRefused(f"{path}.{name}".lstrip("."), f"unknown field; fields are {sorted(known)}")
    values: dict[str, object] = {}
    for name, f in known.items():
        place = f"{path}.{name}".lstrip(".")
        if name in given:
            values[name] = _read(hints[name], given[name], place)
        elif f.default is MISSING and f.default_factory is MISSING:
            raise SpecRefused(place, "missing")
    return kind(**values)


def _read_scalar(kind: object, raw: object, path: str) -> object:
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if not isinstance(kind, type) or not isinstance(raw, kind) or (kind is int and isinstance(raw, bool)):
        name = getattr(kind, "__name__", str(kind))
        raise SpecRefused(path, f"{raw!r:.80} is no {name}")
    return raw
