"""What `defs.yaml` may say: frozen pydantic models of one model pipeline.

The models are plain data. They know which combinations make sense, and nothing of where or how a pipeline runs.
Python named in a declaration is a dotted reference `module.function` to a file beside `defs.yaml`.
Durations are text such as `90s`, `15m`, `3h`, `7d`; zero is not a duration.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from headway.declaration_base import Name, Share, Spec
from headway.declaration_text import InterpreterFiles, TextFiles, TextSpec
from headway.errors import HeadwayError

_UNIT_US = {"us": 1, "ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}

_DATE_DIRECTIVES = "YymdHIMSfpjbBz%"

LONGEST_DURATION_US = 3_650_000 * _UNIT_US["d"]


def _bounded(text: object) -> object:
    duration_us(text)
    return text


# Checked before pydantic's own: a number or a pattern would not say what to write.
Duration = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*(us|ms|s|m|h|d)$"), BeforeValidator(_bounded)]
Reference = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*$")]
ColumnType = Literal["string", "int64", "float64", "bool", "date", "timestamp"]
Aggregate = Literal["count", "count_value", "sum", "mean", "std", "min", "max", "first", "last", "distinct"]
TieBreak = Literal["event_time", "available_time", "sequence", "row_id"]


def duration_us(text: object) -> int:
    """Microseconds of a declared duration such as `3h`; at most 3,650,000 days, so that no time leaves int64."""
    found = re.fullmatch(r"([1-9][0-9]*)(us|ms|s|m|h|d)", text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(
            f"{text!r} is not a duration: write a positive whole number and us, ms, s, m, h or d, such as 90s or 7d"
        )
    span = int(found[1]) * _UNIT_US[found[2]]
    if span > LONGEST_DURATION_US:
        raise ValueError(f"{text!r} is longer than 3650000d, the longest duration")
    return span


def _checked_zone(name: str | None) -> str | None:
    if name is not None:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"time zone {name!r} is not known; write an IANA name such as America/New_York") from error
    return name


class NoLabelRows(HeadwayError):
    """A question about label rows or features, asked of a pipeline that learns from text."""


class ColumnSpec(Spec):
    """One column: its type and, where the file needs it, how its text is written."""

    type: ColumnType = Field(description="Logical type. Timestamps are instants, kept as microseconds in UTC.")
    required: bool = Field(default=False, description="A null here rejects the row.")
    description: str = ""
    unit: str = Field(default="", description="Unit of measure, for people.")
    zone: str | None = Field(
        default=None, description="IANA zone of local times that carry no offset; none: they are refused."
    )
    date_format: str | None = Field(
        default=None, description="strptime pattern, e.g. %d-%m-%y; none: ISO 8601 with or without offset."
    )
    century_start: int | None = Field(
        default=None,
        ge=0,
        le=9900,
        description="First year that a two-digit year may mean, e.g. 1970 reads 69 as 2069.",
    )
    decimal: Literal[".", ","] | None = Field(default=None, description="Decimal mark; none: the format's.")
    thousands: Literal[".", ",", " ", "'"] | None = Field(
        default=None, description="Grouping mark; none: no grouping allowed."
    )
    plus_sign: bool | None = Field(default=None, description="Whether numbers may start with +; none: the format's.")
    missing: tuple[str, ...] | None = Field(default=None, description="Texts that mean null; none: the format's.")
    known_at: str | None = Field(
        default=None,
        description="Column that says when this value is known; none: when the source says that its row is.",
    )

    @field_validator("zone")
    @classmethod
    def _known_zone(cls, value: str | None) -> str | None:
        return _checked_zone(value)

    @field_validator("date_format")
    @classmethod
    def _known_directives(cls, value: str | None) -> str | None:
        found = re.findall(r"%(.)", value or "")
        if value is not None and (not found or not set(found) <= set(_DATE_DIRECTIVES)):
            allowed = " ".join(f"%{d}" for d in _DATE_DIRECTIVES)
            raise ValueError(f"date_format {value!r} is written with strptime directives out of {allowed}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.decimal is not None and self.decimal == self.thousands:
            raise ValueError(f"decimal mark and thousands mark are both {self.decimal!r}")
        if "%y" in (self.date_format or "") and self.century_start is None:
            raise ValueError(
                f"date_format {self.date_format!r} has two-digit years; declare century_start, e.g. 1970 for 1970-2069"
            )
        return self


class CsvFormat(Spec):
    """How a delimited text file is written. Nothing is guessed."""

    type: Literal["csv"] = "csv"
    delimiter: Annotated[str, StringConstraints(min_length=1, max_length=1)] = ","
    quote: Annotated[str, StringConstraints(min_length=1, max_length=1)] = '"'
    encoding: Literal["utf-8", "utf-8-sig", "latin-1", "cp1252"] = "utf-8"
    header_blanks: Literal["refuse", "keep", "strip"] = Field(
        default="refuse", description="What to do with blanks around column names."
    )
    duplicate_headers: Literal["refuse"] = Field(default="refuse", description="Equal column names are always refused.")
    case_only_difference: Literal["refuse", "distinct"] = Field(
        default="refuse", description="Names that differ by case only: refused, or two columns."
    )
    missing: tuple[str, ...] = Field(default=("",), description="Texts that mean null.")
    decimal: Literal[".", ","] = "."
    thousands: Literal[".", ",", " ", "'"] | None = None
    plus_sign: bool = False
    zone: str | None = None
    extra_columns: Literal["report", "refuse"] = Field(
        default="report", description="Columns in the file that nobody declared: reported as schema drift, or refused."
    )

    @field_validator("zone")
    @classmethod
    def _known_zone(cls, value: str | None) -> str | None:
        return _checked_zone(value)


class ParquetFormat(Spec):
    """A Parquet delivery; types come from the file and must fit the declaration."""

    type: Literal["parquet"] = "parquet"
    missing: tuple[str, ...] = ()
    zone: str | None = None
    extra_columns: Literal["report", "refuse"] = "report"

    @field_validator("zone")
    @classmethod
    def _known_zone(cls, value: str | None) -> str | None:
        return _checked_zone(value)


class PackageFiles(Spec):
    """Data files inside an installed Python distribution, which is read and never imported."""

    package: str
    paths: tuple[str, ...] = Field(min_length=1)


class FolderFiles(Spec):
    """Files relative to the pipeline's folder; shell patterns are allowed."""

    paths: tuple[str, ...] = Field(min_length=1)


def _files_form(value: object) -> str:
    for form, kind in (("package", PackageFiles), ("interpreter", InterpreterFiles)):
        if isinstance(value, kind) or (isinstance(value, dict) and form in value):
            return form.capitalize()
    return "Folder"


Files = Annotated[
    Annotated[PackageFiles, Tag("Package")]
    | Annotated[FolderFiles, Tag("Folder")]
    | Annotated[InterpreterFiles, Tag("Interpreter")],
    Discriminator(_files_form),
]


class PartitionSpec(Spec):
    """The source's own partition column and the calendar that cuts it."""

    column: str = Field(description="Timestamp column of the canonical rows that decides the partition.")
    cadence: Literal["hourly", "daily", "weekly", "monthly"] = "daily"
    zone: str = Field(default="UTC", description="IANA zone in which hours, days, weeks (Monday) and months are cut.")
    start: str = Field(description="First partition, as a date: 2013-01-01.")
    end: str | None = Field(default=None, description="First day that is no partition any more; none: open-ended.")
    expected_empty: tuple[str, ...] = Field(default=(), description="Partitions in which nothing is published.")
    before: Duration | None = Field(
        default=None, description="How far an event or its availability may lie before the partition column's time."
    )
    after: Duration | None = Field(
        default=None, description="How far an event may lie after the partition column's time."
    )


class Delay(Spec):
    """Availability stated as a fixed delay after the event time, by name because it is an assumption."""

    delay: Duration
    reason: str = Field(min_length=1, description="Why this delay holds.")


class Static(Spec):
    """A table without any time: known from one declared instant on."""

    static_from: str = Field(description="ISO 8601 instant with offset from which the table counts as known.")
    reason: str = Field(min_length=1, description="Why it is right to use the table from then on.")


def _static_form(value: object) -> str:
    return "Static" if isinstance(value, dict | Static) else "Column"


def _clock_form(value: object) -> str:
    fields = value if isinstance(value, dict) else {}
    if isinstance(value, Static) or "static_from" in fields:
        return "Static"
    return "Delay" if isinstance(value, Delay | dict) else "Column"


# Alternatives are told apart by their form, so that a mistake is told once, of the one that was meant.
EventTime = Annotated[Annotated[str, Tag("Column")] | Annotated[Static, Tag("Static")], Discriminator(_static_form)]
AvailableTime = Annotated[
    Annotated[str, Tag("Column")] | Annotated[Delay, Tag("Delay")] | Annotated[Static, Tag("Static")],
    Discriminator(_clock_form),
]


class PrivacySpec(Spec):
    """What the source may hold and what happens with personal columns."""

    disposition: Literal["open", "internal", "restricted"] = "internal"
    personal: dict[str, Literal["drop", "hash"]] = Field(
        default_factory=dict, description="Personal columns and their treatment before anything is stored."
    )


class QualitySpec(Spec):
    """The Great Expectations suite beside the pipeline, and how much may fail."""

    suite: str = Field(pattern=r"^[A-Za-z0-9_.-]+\.suite\.json$")
    max_quarantined_share: Share = Field(
        default=0.0, description="Rows that may go to quarantine while the rest is released."
    )
    max_quarantined_partitions: Share = Field(
        default=0.0, description="In a range run: partitions that may be quarantined before the blocking check fails."
    )
    max_identity_loss: Share | None = Field(
        default=None,
        description="Share of known row identities that may be absent from a new delivery of the same partition.",
    )
    clock_skew: Duration = Field(default="1s", description="How far an event time may lie after its availability.")


class SourceSpec(Spec):
    """One source: where its rows are, how they are written, what they mean in time."""

    description: str = ""
    files: Files
    format: CsvFormat | ParquetFormat | TextFiles = Field(discriminator="type")
    raw: dict[str, ColumnSpec] | None = Field(
        default=None, description="Columns as they stand in the file, when `transform` makes the canonical ones."
    )
    transform: Reference | None = Field(default=None, description="Function raw table -> canonical table.")
    lookups: tuple[Name, ...] = Field(default=(), description="Unpartitioned sources that the transform reads.")
    columns: dict[str, ColumnSpec] = Field(min_length=1, description="The canonical columns.")
    row_id: tuple[str, ...] = Field(min_length=1, description="Columns that name the event (not the entity).")
    keys: tuple[str, ...] = Field(min_length=1, description="Columns by which rows may be looked up.")
    event_time: EventTime
    available_time: AvailableTime = Field(
        description="When a row could be known: a column, a delay declared by name, or a static instant."
    )
    sequence: str | None = Field(default=None, description="Integer column that orders versions known at one instant.")
    deleted: str | None = Field(default=None, description="Boolean column of retractions.")
    partition: PartitionSpec | None = None
    privacy: PrivacySpec = PrivacySpec()
    quality: QualitySpec

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        named = [*self.row_id, *self.keys, *self.privacy.personal]
        named += [c for c in (self.event_time, self.available_time, self.sequence, self.deleted) if isinstance(c, str)]
        if self.partition is not None:
            named.append(self.partition.column)
        for column in named:
            if column not in self.columns:
                raise ValueError(f"column {column!r} is not declared; columns are {sorted(self.columns)}")
        for column in (*self.row_id, *self.keys):
            if self.columns[column].type == "float64":
                raise ValueError(f"column {column!r} is a float and cannot be part of a key; declare int64 or string")
        self._require_type("sequence", self.sequence, "int64")
        self._require_type("deleted", self.deleted, "bool")
        self._require_type("event_time", self.event_time, "timestamp")
        self._require_type("available_time", self.available_time, "timestamp")
        for column, treatment in self.privacy.personal.items():
            self._check_personal(column, treatment)
        if self.transform is not None and self.raw is None:
            raise ValueError("a source with `transform` declares the file's own columns under `raw`")
        if isinstance(self.event_time, Static) != isinstance(self.available_time, Static):
            raise ValueError("a static source is static in both times: give event_time and available_time static_from")
        if self.partition is not None:
            self._require_type("partition.column", self.partition.column, "timestamp")
            if self.event_time != self.partition.column and None in (self.partition.before, self.partition.after):
                raise ValueError(
                    f"events of this source have their own time ({self.event_time}): say in partition.before and "
                    f"partition.after how far it may lie from {self.partition.column!r}; it decides what is read"
                )
            if self.partition.cadence == "hourly" and self.partition.zone != "UTC":
                raise ValueError(
                    f"hourly partitions in {self.partition.zone} repeat or skip an hour when clocks change; use UTC"
                )
        return self

    def _require_type(self, field: str, column: object, wanted: str) -> None:
        if isinstance(column, str) and self.columns[column].type != wanted:
            raise ValueError(f"{field} {column!r} is {self.columns[column].type}; it must be {wanted}")

    def _check_personal(self, column: str, treatment: str) -> None:
        clocks = (self.event_time, self.available_time, self.sequence, self.deleted)
        structural = {*self.row_id, *self.keys, *(c for c in clocks if isinstance(c, str))}
        structural |= set() if self.partition is None else {self.partition.column}
        if treatment == "drop" and column in structural:
            raise ValueError(f"privacy.personal: {column!r} names the rows or their times and cannot be dropped")
        if treatment == "hash" and self.columns[column].type != "string":
            raise ValueError(f"privacy.personal: {column!r} is {self.columns[column].type}; only string can be hashed")

    def file_columns(self) -> dict[str, ColumnSpec]:
        """Columns expected in the file itself."""
        return self.raw if self.raw is not None else self.columns


class LatestFeature(Spec):
    """The newest visible value of a column."""

    latest: str


class WindowFeature(Spec):
    """An aggregate over the events of a duration before the observation, as known then."""

    window: str
    aggregate: Aggregate
    duration: Duration


def _feature_form(value: object) -> str:
    fields = value if isinstance(value, dict) else {}
    windowed = isinstance(value, WindowFeature) or {"window", "aggregate", "duration"} & set(fields)
    return "Window" if windowed else "Latest"


Feature = Annotated[
    Annotated[LatestFeature, Tag("Latest")] | Annotated[WindowFeature, Tag("Window")], Discriminator(_feature_form)
]


def _allowed_aggregates(kind: str) -> tuple[str, ...]:
    """Aggregates that make sense for a column type: text and times can be counted, numbers and flags added up."""
    countable = ("count", "count_value", "distinct")
    return countable if kind in ("string", "date", "timestamp") else get_args(Aggregate)


class FeatureViewSpec(Spec):
    """Features that share a source, a key, a clock and the rules of visibility."""

    source: Name
    description: str = ""
    keys: dict[str, str] = Field(min_length=1, description="Label column -> source column.")
    boundary: Literal["lt", "le"] = Field(description="Whether a row known exactly at the observation is visible.")
    lookback: Duration | None = Field(default=None, description="Oldest age of a `latest` answer; none: unlimited.")
    null_policy: Literal["row_wins", "last_known"] = "row_wins"
    tie_break: tuple[TieBreak, ...] = ("event_time", "available_time", "sequence")
    allowed_lateness: Duration | None = Field(
        default=None, description="A watermark further behind the observation than this flags the cell incomplete."
    )
    event_time: str | None = Field(default=None, description="Another event time column of the source for this view.")
    available_time: str | None = Field(
        default=None, description="Another availability column of the source for this view."
    )
    features: dict[Name, Feature] = Field(min_length=1)

    @field_validator("tie_break")
    @classmethod
    def _ordered(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        allowed = ("event_time", "available_time", "sequence", "row_id")
        if value not in (allowed, allowed[:3]):
            raise ValueError(f"tie_break is {list(allowed[:3])} or {list(allowed)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.event_time is None) != (self.available_time is None):
            raise ValueError("a view that overrides its clock names both event_time and available_time")
        return self

    def latest_features(self) -> dict[str, LatestFeature]:
        """The `latest` features by name."""
        return {n: f for n, f in self.features.items() if isinstance(f, LatestFeature)}

    def window_features(self) -> dict[str, WindowFeature]:
        """The window features by name."""
        return {n: f for n, f in self.features.items() if isinstance(f, WindowFeature)}


class DerivedFeature(Spec):
    """A pure function of label columns and other features of the same row."""

    function: Reference
    inputs: tuple[str, ...] = Field(min_length=1, description="Label columns or features `<view>__<feature>`.")
    type: Literal["float64", "int64", "string", "bool"] = "float64"


class CustomFeature(Spec):
    """A function of the label rows and a whole source: powerful, and held to the leakage proof like all others."""

    function: Reference
    source: Name
    lookback: Duration | None = Field(
        default=None,
        description="Oldest event that the function gets, before the partition's first observation; needed when the "
        "source is partitioned.",
    )
    type: Literal["float64", "int64"] = "float64"


class NullBudget(Spec):
    """How many cells of a feature may be null before the snapshot is refused."""

    default: Share = 1.0
    features: dict[str, Share] = Field(default_factory=dict)


class FeatureSetSpec(Spec):
    """The feature set: views, derived features and budgets."""

    version: int = Field(ge=1, description="Semantics version; raise it when a meaning changes.")
    views: dict[Name, FeatureViewSpec] = Field(min_length=1)
    derived: dict[Name, DerivedFeature] = Field(default_factory=dict)
    custom: dict[Name, CustomFeature] = Field(default_factory=dict)
    null_budget: NullBudget = NullBudget()
    strict_watermark: bool = Field(
        default=False, description="Refuse a snapshot whose source is behind, instead of flagging."
    )
    on_quarantined_input: Literal["skip", "refuse"] = Field(
        default="skip",
        description="A quarantined partition in reach: left out, counted and flagged, or the snapshot is refused. "
        "The label rows' own partition is always refused.",
    )


class LabelSpec(Spec):
    """Label rows: which source, observed when, with what target, known when."""

    source: Name
    observation_time: str = Field(description="Timestamp column at which the prediction is asked for.")
    target: str
    known_at: str = Field(description="Timestamp column at which the target became known.")
    carry: tuple[str, ...] = Field(default=(), description="Columns kept beside the features (keys are always kept).")
    exclude: dict[str, str] = Field(
        default_factory=dict, description="Reason -> boolean column; such rows have no label and are counted."
    )


def _clock_words(clock: str | Delay | Static) -> str:
    if isinstance(clock, Delay):
        return f"{clock.delay} after the event"
    return f"{clock.static_from} on" if isinstance(clock, Static) else repr(clock)


class AsOfSpec(Spec):
    """Training partitions, monthly: the window ends where a partition starts, the partition itself is evaluated."""

    start: str = Field(description="First as_of, as the first day of a month: 2013-04-01.")
    end: str | None = Field(default=None, description="First day that is no as_of any more; none: open-ended.")


class EarlyStoppingSpec(Spec):
    """When to stop: the last part of the training window decides, never the evaluation month."""

    last: Duration = Field(default="14d", description="Rows observed this long before as_of are kept for validation.")
    patience: int = Field(default=3, ge=1, description="Epochs without a better validation loss.")


class TrainingBudgetSpec(Spec):
    """Worker time: what one run reserves, and what a month may cost all runs of the pipeline."""

    per_run: Duration = "1h"
    per_month: Duration = "100h"


class NodesSpec(Spec):
    """A range of nodes: a run begins on the most, and goes on with fewer when infrastructure took some away."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


def _number_or_range(value: object) -> str:
    return "Range" if isinstance(value, dict | NodesSpec) else "Number"


# Told apart by their form, so that a mistake is told of the one that was meant.
Nodes = Annotated[
    Annotated[int, Field(ge=1), Tag("Number")] | Annotated[NodesSpec, Tag("Range")], Discriminator(_number_or_range)
]


class CheckpointsSpec(Spec):
    """Which checkpoints stay beside the best one, and whether training waits for them."""

    keep_last: int = Field(default=1, ge=1, description="Newest checkpoints that stay.")
    keep_every_hours: float = Field(
        default=0.0, ge=0, description="Of every so many hours the first checkpoint stays; 0: none for its time."
    )
    synchronous: bool = Field(
        default=False, description="Hold the training up until a checkpoint is on the disk, instead of going on."
    )


class TrainingSpec(Spec):
    """How the model is trained: what goes in, how the work is spread, when it ends."""

    factory: Reference = Field(description="Function in a file of this folder that builds the torch module.")
    options: dict[str, int | float | str | bool] = Field(default_factory=dict, description="Options of the factory.")
    as_of: AsOfSpec | None = Field(default=None, description="Months to train for; not for text, which has no months.")
    window: int = Field(default=12, ge=1, description="Months before as_of whose snapshots are trained on.")
    categorical: tuple[str, ...] = Field(default=(), description="Label columns and text features to embed.")
    exclude: tuple[str, ...] = Field(default=(), description="Features that the model does not get, such as times.")
    max_missing_share: Share = Field(
        default=0.0, description="Share of the window's partitions that may have no snapshot because they were refused."
    )
    max_null_share: Share = Field(
        default=0.95, description="An input that is null in more of the window's rows than this is refused by name."
    )
    engine: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    layout: str = Field(
        default="",
        description="How the work is spread: dp=2,shard=2,tp=2,pp=2,sp=2,ep=2,zero=1, degrees of 1 left out. Empty: "
        "all processes are replicas (shards with fsdp2). What goes together stands in docs/layouts.md.",
    )
    zero: int | None = Field(
        default=None, ge=0, le=3, description="ZeRO stage of the deepspeed engine without a layout; 1 when not given."
    )
    nodes: Nodes = Field(
        default=2, description="How many, or {min, max}: the fewest that an attempt may go on with after a loss."
    )
    processes_per_node: int | None = Field(
        default=None, ge=1, description="What the layout leaves for each node when not given; 1 without a layout."
    )
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = Field(
        default="1f1b", description="Order of the micro-batches in a pipeline."
    )
    offload: Literal["", "optimizer", "parameters"] = Field(
        default="", description="What is kept in host memory: the optimizer, or the parameters with it."
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Compute each block's activations again in the backward pass instead of keeping them.",
    )
    compile: bool = Field(default=False, description="Compile the model by torch.compile.")
    batch: int = Field(default=1024, ge=1, description="Rows, or samples of text, per optimizer step over all ranks.")
    accumulation: int = Field(default=1, ge=1)
    epochs: int = Field(default=10, ge=1)
    steps: int = Field(default=0, ge=0, description="Optimizer steps of the whole training; 0: by epochs.")
    judge_every: int = Field(default=0, ge=0, description="Steps between validations; 0: at the end of each epoch.")
    early_stopping: EarlyStoppingSpec = EarlyStoppingSpec()
    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=1e-2, ge=0)
    seed: int = Field(default=0, ge=0)
    checkpoint_every: int = Field(default=200, ge=1, description="Optimizer steps between checkpoints.")
    checkpoints: CheckpointsSpec = CheckpointsSpec()
    max_attempts: int = Field(default=4, ge=1, description="Attempts that infrastructure may cost a run.")
    budget: TrainingBudgetSpec = TrainingBudgetSpec()

    @property
    def most_nodes(self) -> int:
        """The nodes of the first attempt, which the layout is declared for."""
        return self.nodes.max if isinstance(self.nodes, NodesSpec) else self.nodes

    @property
    def fewest_nodes(self) -> int:
        """The fewest nodes that an attempt may have; as many as the most when no range is declared."""
        return self.nodes.min if isinstance(self.nodes, NodesSpec) else self.nodes


class Binned(Spec):
    """A numeric column cut into equal bins."""

    column: str
    width: float = Field(gt=0)


class SegmentSpec(Spec):
    """A column whose values are looked at one by one."""

    minimum: int = Field(default=500, ge=1, description="Rows that a segment needs to be judged; fewer: unknown.")
    allowance: float = Field(
        default=0.02, ge=0, description="AUC that a segment may lose against the champion, at the interval's lower end."
    )


class EvaluationSpec(Spec):
    """What a candidate is measured on and against."""

    historical_rate: tuple[str | Binned, ...] = Field(
        default=(), description="Columns whose combination's past rate is the baseline; not for text."
    )
    segments: dict[str, SegmentSpec] = Field(default_factory=dict)
    resamples: int = Field(default=1000, ge=100, description="Bootstrap resamples of days, or of documents.")
    confidence: float = Field(default=0.95, gt=0.5, lt=1)


class GateSpec(Spec):
    """One condition of promotion. `margin` is committed before the test months are looked at."""

    gate: Literal[
        "auc_over_historical_rate",
        "auc_over_logistic",
        "auc_over_champion",
        "segments",
        "bits_per_byte_over_gzip",
        "bits_per_byte_over_champion",
        "finite_outputs",
        "contract",
        "leakage_proof",
        "weights_only",
    ]
    margin: float = Field(default=0.0, description="What the lower end of the interval must exceed.")
    unless: Literal["", "logistic"] = Field(default="", description="Kind of candidate to which it does not apply.")


class PromotionSpec(Spec):
    """What the registry asks before a version may serve."""

    gates: tuple[GateSpec, ...] = Field(min_length=1)
    allow_immediate: bool = Field(default=False, description="Whether a rollout may go to all traffic at once.")
    evidence_max_age: Duration = Field(default="30d", description="Older statements are asked for again.")

    @field_validator("gates")
    @classmethod
    def _once(cls, value: tuple[GateSpec, ...]) -> tuple[GateSpec, ...]:
        names = [g.gate for g in value]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"gates {twice} stand twice")
        return value


class RequestColumn(Spec):
    """One field of a request, and the label column that it fills."""

    type: ColumnType
    required: bool = False
    column: str = Field(default="", description="Label column that it fills; none: it is kept with the prediction.")
    description: str = ""


class FeatureGroupSpec(Spec):
    """How old one view's features may be when a request is answered."""

    max_staleness: Duration | None = Field(
        default=None, description="Age at which the view counts as stale; none: only its source's watermark decides."
    )
    policy: Literal["serve", "fail"] = Field(
        default="serve", description="Stale or missing: answer and say so, or refuse the request."
    )


class InferenceLogSpec(Spec):
    """The local spool of answers that wait to be shipped."""

    policy: Literal["drop", "must_log"] = Field(
        default="must_log", description="When the spool is full: answer and count the loss, or refuse to answer."
    )
    max_bytes: int = Field(default=256 * 1024 * 1024, ge=4096)


class ServingSpec(Spec):
    """What a caller sends: only what is known at the observation. Everything else is computed here."""

    request: dict[Name, RequestColumn] = Field(min_length=1)
    observed: str = Field(description="Timestamp field of the request from which the observation is counted back.")
    before: Duration = Field(description="How long before it the prediction is asked for.")
    deadline: Duration = Field(default="2s", description="Time for an answer when the request names none.")
    max_rows: int = Field(default=1000, ge=1, description="Rows of one request.")
    groups: dict[Name, FeatureGroupSpec] = Field(default_factory=dict, description="By view; others are served.")
    log: InferenceLogSpec = InferenceLogSpec()


class LabelMatchSpec(Spec):
    """How labels find their predictions, and when they are expected."""

    match: dict[str, str] = Field(
        default_factory=dict,
        description="Request field -> column of the label source; together they name one event. None: by id only.",
    )
    expected_within: Duration = Field(default="7d", description="By then a label is due, or it never comes.")
    horizon: Duration = Field(default="400d", description="Labels of older predictions are refused.")
    maturity: float = Field(
        default=0.95, gt=0, le=1, description="Share of expected labels that a cohort needs to be judged."
    )


class DriftSpec(Spec):
    """When the inputs or scores of a week count as moved, against what the model saw in training."""

    entity: tuple[str, ...] = Field(default=(), description="Request fields whose rows move together.")
    minimum: int = Field(default=500, ge=50, description="Rows that a week needs to be judged.")
    psi: float = Field(default=0.1, gt=0, description="Population stability index that counts as an effect.")
    distance: float = Field(default=0.1, gt=0, description="Standardised Wasserstein distance that counts as one.")
    false_discovery: float = Field(default=0.05, gt=0, lt=0.5)
    permutations: int = Field(default=400, ge=100)
    weeks: int = Field(default=3, ge=1, description="Weeks with drift, of the last `of`, that make it persistent.")
    of: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _some_of_many(self) -> Self:
        if self.weeks > self.of:
            raise ValueError(f"weeks: {self.weeks} of {self.of} weeks cannot be")
        return self


class RetrainingSpec(Spec):
    """What evidence, money and time a retraining needs."""

    minimum_labels: int = Field(default=1000, ge=1, description="Mature labels since the present model's data ended.")
    minimum_gain: float = Field(default=0.002, ge=0, description="Expected AUC gain below which nothing is asked for.")
    quality_loss: float = Field(
        default=0.03, gt=0, description="AUC below that of the evaluation, at the interval's upper end, that counts."
    )
    cooldown: Duration = Field(default="14d", description="Between two requests; at least the labels' maturity.")
    per_run: Duration = Field(default="30m", description="Worker time that a request reserves.")
    per_month: Duration = Field(default="4h", description="Worker time of a month's retrainings.")
    max_failures: int = Field(default=3, ge=1, description="Failed candidates after which a person is asked.")
    approval: Literal["automatic", "person"] = "automatic"


class MonitoringSpec(Spec):
    """How answers are followed: labels, quality, drift, and what may retrain by itself."""

    labels: LabelMatchSpec = LabelMatchSpec()
    segments: tuple[str, ...] = Field(
        default=(), description="Columns whose values are looked at one by one; none: those of the evaluation."
    )
    drift: DriftSpec = DriftSpec()
    retraining: RetrainingSpec | None = Field(default=None, description="None: nothing retrains by itself.")


_ROW_TRAINING = ("as_of", "window", "categorical", "exclude", "max_missing_share", "max_null_share")
ROW_GATES = ("auc_over_historical_rate", "auc_over_logistic", "auc_over_champion", "segments")
"""Gates of models of rows: they compare with the historical rate, by themselves or for want of a champion."""
TEXT_GATES = ("bits_per_byte_over_gzip", "bits_per_byte_over_champion")
"""Gates of models of text."""


def _no_rows(pipeline: str, what: str) -> NoLabelRows:
    return NoLabelRows(
        f"pipeline {pipeline!r} learns from text: it has no {what}",
        "this works on pipelines that declare `label` and `features`",
    )


class PipelineSpec(Spec):
    """One model pipeline, from raw files to a promoted model."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Name
    description: str = ""
    owner: str = Field(pattern=r"^(team:[A-Za-z0-9_-]+|[^@\s]+@[^@\s]+)$", description="team:<name> or an e-mail.")
    sources: dict[Name, SourceSpec] = Field(min_length=1)
    label_rows: LabelSpec | None = Field(default=None, alias="label")
    feature_set: FeatureSetSpec | None = Field(default=None, alias="features")
    text: TextSpec | None = Field(default=None, description="In place of label and features: learn from documents.")
    training: TrainingSpec | None = None
    evaluation: EvaluationSpec | None = None
    promotion: PromotionSpec | None = None
    serving: ServingSpec | None = None
    monitoring: MonitoringSpec | None = None

    @property
    def label(self) -> LabelSpec:
        """The label rows.

        Raises:
            NoLabelRows: the pipeline learns from text.
        """
        if self.label_rows is None:
            raise _no_rows(self.name, "label rows")
        return self.label_rows

    @property
    def features(self) -> FeatureSetSpec:
        """The feature set.

        Raises:
            NoLabelRows: the pipeline learns from text.
        """
        if self.feature_set is None:
            raise _no_rows(self.name, "features")
        return self.feature_set

    @property
    def learned_source(self) -> str:
        """The source whose rows are learned from: that of the label rows, or that of the text."""
        return self.label.source if self.text is None else self.text.source

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, source in self.sources.items():
            for other in source.lookups:
                if self._source(f"sources.{name}.lookups", other).partition is not None:
                    raise ValueError(f"sources.{name}.lookups: {other!r} is partitioned; only whole tables can be read")
        if self.text is None:
            self._check_rows()
        else:
            self._check_text(self.text)
        return self

    def _check_rows(self) -> None:
        for section, declared in (("label", self.label_rows), ("features", self.feature_set)):
            if declared is None:
                raise ValueError(f"{section}: is required, unless the pipeline learns from `text`")
        self._check_label()
        for name, view in self.features.views.items():
            self._check_view(name, view)
        for name, custom in self.features.custom.items():
            source = self._source(f"features.custom.{name}.source", custom.source)
            if source.partition is not None and custom.lookback is None:
                raise ValueError(
                    f"features.custom.{name}: the partitioned source {custom.source!r} needs a lookback; without one "
                    "what the function gets would depend on what other features read"
                )
        self._check_label_inputs()
        self._check_derived()
        self._check_training()
        self._check_serving()
        self._check_monitoring()

    def _check_text(self, text: TextSpec) -> None:
        for section, declared in (
            ("label", self.label_rows),
            ("features", self.feature_set),
            ("serving", self.serving),
            ("monitoring", self.monitoring),
        ):
            if declared is not None:
                raise ValueError(f"{section}: is for pipelines with label rows, and this one learns from `text`")
        source = self._source("text.source", text.source)
        if source.partition is not None:
            raise ValueError(f"text.source: {text.source!r} is partitioned; text is learned from one whole source")
        for field, column in (("document", text.document), ("content", text.content)):
            found = source.columns.get(column)
            if found is None:
                raise ValueError(f"text.{field}: {text.source} has no column {column!r}; it has {list(source.columns)}")
            if found.type != "string" or not found.required:
                raise ValueError(f"text.{field}: {column!r} must be declared {{type: string, required: true}}")
            if column in source.privacy.personal:
                raise ValueError(f"text.{field}: {column!r} is personal and not stored as it is delivered")
        if source.row_id != (text.document,):
            raise ValueError(f"text.document: {text.document!r} must be the only row_id, which is {source.row_id}")
        self._check_judged()
        if self.training is not None and self.evaluation is not None and self.promotion is not None:
            self._check_text_training(text, self.training, self.evaluation, self.promotion)

    @staticmethod
    def _check_text_training(
        text: TextSpec, training: TrainingSpec, evaluation: EvaluationSpec, promotion: PromotionSpec
    ) -> None:
        for section, declared, fields in (
            ("training", training, _ROW_TRAINING),
            ("training.early_stopping", training.early_stopping, ("last",)),
            ("evaluation", evaluation, ("historical_rate", "segments")),
        ):
            for field in fields:
                if field in declared.model_fields_set:
                    raise ValueError(f"{section}.{field}: is for label rows, and this pipeline learns from `text`")
        for option, value in (("vocab", text.tokenizer.vocab), ("sequence", text.context)):
            if training.options.get(option, value) != value:
                raise ValueError(
                    f"training.options.{option}: {training.options[option]!r} is not the {value} of `text`; leave it "
                    "out, it is filled in"
                )
        for gate in promotion.gates:
            if gate.gate in ROW_GATES or gate.unless:
                raise ValueError(
                    f"promotion.gates: {gate.gate!r} judges label rows, and this pipeline learns from text"
                )

    def _check_judged(self) -> None:
        if self.training is None:
            for name in ("evaluation", "promotion"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: there is nothing to judge without `training`")
        elif self.evaluation is None or self.promotion is None:
            raise ValueError("training: declare `evaluation` and `promotion` too, before the first model is judged")

    def feature_names(self) -> tuple[str, ...]:
        """Every feature column: `<view>__<feature>`, then custom, then derived, in declared order."""
        views = (f"{v}__{f}" for v, view in self.features.views.items() for f in view.features)
        return (*views, *self.features.custom, *self.features.derived)

    def label_inputs(self) -> tuple[str, ...]:
        """Label columns that a feature may read: keys of views, carried columns and the observation time."""
        keys = (left for view in self.features.views.values() for left in view.keys)
        return tuple(dict.fromkeys([*keys, *self.label.carry, self.label.observation_time]))

    def model_inputs(self) -> tuple[str, ...]:
        """Numeric input columns of the model: every feature that is neither categorical nor excluded."""
        training = self.training
        left_out = set() if training is None else {*training.categorical, *training.exclude}
        return tuple(n for n in self.feature_names() if n not in left_out)

    def feature_type(self, feature: str) -> str:
        """Column type of a feature: that of its source column, its aggregate, or as declared."""
        if feature in self.features.derived:
            return self.features.derived[feature].type
        if feature in self.features.custom:
            return self.features.custom[feature].type
        view_name, _, name = feature.partition("__")
        view = self.features.views[view_name]
        declared = view.features[name]
        column = declared.latest if isinstance(declared, LatestFeature) else declared.window
        if isinstance(declared, WindowFeature) and declared.aggregate in ("count", "count_value", "distinct"):
            return "int64"
        return self.sources[view.source].columns[column].type

    def known_at(self, source: str, column: str) -> str | Delay | Static:
        """When a column's values are known: its own clock, the label's for the target, else the source's."""
        declared = self.sources[source]
        if declared.columns[column].known_at is not None:
            return str(declared.columns[column].known_at)
        if source == self.label.source and column == self.label.target:
            return self.label.known_at
        return declared.available_time

    def _check_label_inputs(self) -> None:
        """Label rows are asked at the observation: what features read of them has to be known by then."""
        source = self.sources[self.label.source]
        identity = {*source.row_id, self.label.observation_time}
        for column in self.label_inputs():
            known_at = self.known_at(self.label.source, column)
            if column not in identity and known_at != self.label.observation_time:
                raise ValueError(
                    f"label: column {column!r} is read as an input, and is known at {_clock_words(known_at)}, not at "
                    f"the observation. Drop it, or declare known_at: {self.label.observation_time} on the column if "
                    "that is true"
                )

    def _check_derived(self) -> None:
        known = {*self.label_inputs(), *self.feature_names()} - set(self.features.derived)
        for name, derived in self.features.derived.items():
            for column in derived.inputs:
                if column not in known:
                    raise ValueError(f"features.derived.{name}: no input {column!r}; inputs are {sorted(known)}")
        names = self.feature_names()
        for name in self.features.null_budget.features:
            if name not in names:
                raise ValueError(f"features.null_budget: no feature {name!r}; features are {list(names)}")

    def _check_training(self) -> None:
        self._check_judged()
        training = self.training
        if training is None or self.evaluation is None or self.promotion is None:
            return
        if training.as_of is None:
            raise ValueError("training.as_of: is required")
        if not self.evaluation.historical_rate:
            raise ValueError("evaluation.historical_rate: is required, with at least one column")
        for gate in self.promotion.gates:
            if gate.gate in TEXT_GATES:
                raise ValueError(f"promotion.gates: {gate.gate!r} judges text, and this pipeline has label rows")
        columns = {*self.label_inputs(), *self.feature_names()}
        for name in (*training.categorical, *training.exclude):
            if name not in columns:
                raise ValueError(f"training: no column {name!r}; columns are {sorted(columns)}")
        for name in self.model_inputs():
            kind = self.feature_type(name)
            if kind not in ("int64", "float64", "bool"):
                raise ValueError(
                    f"training: feature {name!r} is {kind}, and the model takes numbers: list it under "
                    "training.exclude, or under training.categorical"
                )
        if self.sources[self.label.source].columns[self.label.target].type not in ("int64", "bool"):
            raise ValueError(f"training: the target {self.label.target!r} must be bool, or int64 holding 0 and 1")
        for place, name in self._evaluated_columns():
            if name not in columns:
                raise ValueError(f"evaluation.{place}: no column {name!r}; columns are {sorted(columns)}")

    def _evaluated_columns(self) -> list[tuple[str, str]]:
        if self.evaluation is None:
            return []
        rate = [b if isinstance(b, str) else b.column for b in self.evaluation.historical_rate]
        return [("historical_rate", n) for n in rate] + [("segments", n) for n in self.evaluation.segments]

    def _check_serving(self) -> None:
        serving = self.serving
        if serving is None:
            return
        inputs, source = self.label_inputs(), self.sources[self.label.source]
        for name, field in serving.request.items():
            if field.column and field.column not in inputs:
                raise ValueError(f"serving.request.{name}: no label input {field.column!r}; they are {list(inputs)}")
            if field.column and source.columns[field.column].type != field.type:
                kind = source.columns[field.column].type
                raise ValueError(f"serving.request.{name}: {field.column!r} is {kind}, the request says {field.type}")
        observed = serving.request.get(serving.observed)
        if observed is None or observed.type != "timestamp" or not observed.required:
            raise ValueError(f"serving.observed: {serving.observed!r} must be a required timestamp of the request")
        filled = [f.column for f in serving.request.values() if f.column]
        if len(set(filled)) != len(filled):
            raise ValueError("serving.request: a label column is filled twice")
        needed = {left for v in self.features.views.values() for left in v.keys}
        needed |= {i for d in self.features.derived.values() for i in d.inputs if i in inputs}
        needed |= set() if self.training is None else {c for c in self.training.categorical if c in inputs}
        lost = sorted(needed - {*filled, self.label.observation_time})
        if lost:
            raise ValueError(f"serving.request: features read {lost}, and no field of the request fills them")
        unfilled = sorted(set(inputs) - {*filled, self.label.observation_time})
        if self.features.custom and unfilled:
            raise ValueError(
                f"serving.request: custom features {sorted(self.features.custom)} get label rows whole, and no field "
                f"of the request fills {unfilled}. Add fields that fill them, or drop them from label.carry"
            )

        for name in serving.groups:
            if name not in self.features.views:
                raise ValueError(f"serving.groups: no view {name!r}; views are {sorted(self.features.views)}")

    def _check_monitoring(self) -> None:
        monitoring = self.monitoring
        if monitoring is None:
            return
        if self.training is None or self.serving is None:
            raise ValueError("monitoring: there are no answers to follow without `training` and `serving`")
        request, source = self.serving.request, self.sources[self.label.source]
        for field, column in monitoring.labels.match.items():
            if field not in request:
                raise ValueError(f"monitoring.labels.match: no request field {field!r}; they are {sorted(request)}")
            if column not in source.columns:
                raise ValueError(f"monitoring.labels.match.{field}: {self.label.source} has no column {column!r}")
            if source.columns[column].type != request[field].type:
                kind = source.columns[column].type
                raise ValueError(f"monitoring.labels.match.{field}: {column!r} is {kind}, not {request[field].type}")
        for field in monitoring.drift.entity:
            if field not in request:
                raise ValueError(f"monitoring.drift.entity: no request field {field!r}; they are {sorted(request)}")
        columns = {*self.label_inputs(), *self.feature_names()}
        for name in monitoring.segments:
            if name not in columns:
                raise ValueError(f"monitoring.segments: no column {name!r}; columns are {sorted(columns)}")

    def monitored_segments(self) -> tuple[str, ...]:
        """Columns whose values monitoring looks at one by one."""
        declared = () if self.monitoring is None else self.monitoring.segments
        return declared or tuple(() if self.evaluation is None else self.evaluation.segments)

    def _source(self, where: str, name: str) -> SourceSpec:
        if name not in self.sources:
            raise ValueError(f"{where}: no source {name!r}; sources are {sorted(self.sources)}")
        return self.sources[name]

    def _check_label(self) -> None:
        source = self._source("label.source", self.label.source)
        if source.partition is None:
            raise ValueError(f"label.source: {self.label.source!r} has no partition; snapshots need one")
        wanted = {self.label.observation_time: "timestamp", self.label.known_at: "timestamp", self.label.target: None}
        wanted |= dict.fromkeys(self.label.exclude.values(), "bool") | dict.fromkeys(self.label.carry)
        for column, kind in wanted.items():
            if column not in source.columns:
                raise ValueError(f"label: column {column!r} is not in {self.label.source}: {sorted(source.columns)}")
            if kind is not None and source.columns[column].type != kind:
                raise ValueError(f"label: column {column!r} is {source.columns[column].type}; it must be {kind}")
        late = {self.label.target, self.label.known_at, *self.label.exclude.values()} & set(self.label.carry)
        if late:
            raise ValueError(f"label.carry: {sorted(late)} are known after the observation and cannot be inputs")

    def _check_view(self, name: str, view: FeatureViewSpec) -> None:
        where = f"features.views.{name}"
        source = self._source(f"{where}.source", view.source)
        label = self.sources[self.label.source]
        if len(set(view.keys.values())) != len(view.keys):
            raise ValueError(f"{where}.keys: a source column stands twice in {dict(view.keys)}")
        for left, right in view.keys.items():
            if left not in label.columns:
                raise ValueError(f"{where}.keys: label column {left!r} is not in {sorted(label.columns)}")
            if right not in source.keys:
                raise ValueError(f"{where}.keys: {right!r} is not a key of {view.source}; keys are {list(source.keys)}")
            if label.columns[left].type != source.columns[right].type:
                raise ValueError(
                    f"{where}.keys: {left!r} is {label.columns[left].type} and {view.source}.{right} is "
                    f"{source.columns[right].type}; keys are never coerced, declare one type"
                )
        for feature, f in view.features.items():
            column = f.latest if isinstance(f, LatestFeature) else f.window
            if column not in source.columns:
                raise ValueError(
                    f"{where}.features.{feature}: {view.source} has no column {column!r}; columns are "
                    f"{sorted(source.columns)}"
                )
            if isinstance(f, WindowFeature) and f.aggregate not in _allowed_aggregates(source.columns[column].type):
                kind = source.columns[column].type
                raise ValueError(
                    f"{where}.features.{feature}: {f.aggregate!r} of {kind} column {column!r} has no meaning; "
                    f"allowed are {_allowed_aggregates(kind)}"
                )
            known_at = self.known_at(view.source, column)
            looks_at = view.available_time if view.available_time is not None else source.available_time
            if known_at != looks_at:
                raise ValueError(
                    f"{where}.features.{feature}: {view.source}.{column} is known at {_clock_words(known_at)}, and "
                    f"this view goes by {_clock_words(looks_at)}: reading it could look ahead. Drop the feature, or "
                    "read it in a view whose available_time is the column's known_at"
                )
        for clock in (view.event_time, view.available_time):
            if clock is not None and (clock not in source.columns or source.columns[clock].type != "timestamp"):
                raise ValueError(f"{where}: {clock!r} is not a timestamp column of {view.source}")
        if view.latest_features() and view.lookback is None and source.partition is not None:
            raise ValueError(
                f"{where}: a `latest` feature over the partitioned source {view.source!r} needs a lookback; "
                "without one every partition since the start would be in reach"
            )
