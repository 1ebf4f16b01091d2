"""What callers may send a model and what they get: the contract, and when one may follow another on an endpoint.

A contract is a JSON document (`headway.contract/1`). The artifact brings `inputs`, the columns that the model reads,
and `output`; registration adds `request`, the columns that a caller sends, `feature_set` and `semantics_version`.
What a caller may send is `request` where there is one (the platform computes the rest), otherwise `inputs`.

`values` of an input are those that training knew. They limit what is accepted only with `closed: true`; otherwise other
values are accepted too. `nullable` (default true) says whether a value may be missing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from headway.artifacts.digests import Json, digest_json
from headway.catalog.facts import FeatureSetVersion
from headway.declaration import ServingSpec
from headway.errors import HeadwayError

CONTRACT_FORMAT = "headway.contract/1"
Judgement: TypeAlias = Literal["compatible", "breaking", "forbidden", "invalid"]

_TYPES = ("string", "int64", "float64", "bool", "date", "timestamp")
_REQUIRED = {"format", "inputs", "output", "feature_set", "semantics_version"}
_INPUT_FIELDS = {"name", "type", "required", "nullable", "values", "closed", "range", "unit", "description"}
# What an output means. Any other field may be added, and none that is there may change or go.
_OUTPUT_MEANING = ("name", "type", "classes", "range", "ordering", "calibration")


class ContractInvalid(HeadwayError):
    """A document that is no contract: nothing can be registered or promoted with it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"contract: {message}", "train the model again with this code, which writes whole contracts")


@dataclass(frozen=True)
class Column:
    """One column that a caller may send. `range` is inclusive; `values` None: any value of the type."""

    name: str
    type: str
    required: bool
    nullable: bool = True
    values: frozenset[Json] | None = None
    range: tuple[float, float] | None = None
    unit: str = ""


@dataclass(frozen=True)
class Contract:
    """A read contract: what is accepted, what the output means, and by which features."""

    accepted: tuple[Column, ...]
    output: Mapping[str, Json]
    feature_set: str | None
    semantics_version: int


@dataclass(frozen=True)
class Compatibility:
    """Whether a candidate may follow the stable version on its endpoint, and everything that is against it."""

    verdict: Judgement
    problems: tuple[str, ...] = ()


def registered_contract(
    artifact: Json, feature_set: FeatureSetVersion, semantics_version: int, serving: ServingSpec | None
) -> dict[str, Json]:
    """Return the contract of a version: the artifact's own, completed by what the platform knows.

    Raises:
        ContractInvalid: the artifact has none, or the result is not whole.
    """
    if not isinstance(artifact, Mapping):
        raise ContractInvalid("the artifact has none")
    facts = feature_set.facts
    document: dict[str, Json] = {
        **artifact,
        "feature_set": {
            "name": facts.feature_set,
            "version": feature_set.version,
            "contract_digest": facts.contract_digest,
            "code_digest": facts.code_digest,
        },
        "semantics_version": semantics_version,
    }
    if serving is not None:
        document["request"] = request_columns(serving)
    parse_contract(document)
    return document


def request_columns(serving: ServingSpec) -> list[Json]:
    """Return the columns that a caller sends, as a contract lists them."""
    return [
        {"name": name, "type": column.type, "required": column.required, "nullable": not column.required}
        for name, column in serving.request.items()
    ]


def parse_contract(document: Json) -> Contract:
    """Return the contract of a document.

    Raises:
        ContractInvalid: it is none, or a part is missing or malformed.
    """
    if not isinstance(document, Mapping):
        raise ContractInvalid("there is none")
    if set(document) - {"request"} != _REQUIRED:
        raise ContractInvalid(f"it has the fields {sorted(document)}, expected {sorted(_REQUIRED)} and perhaps request")
    if document["format"] != CONTRACT_FORMAT:
        raise ContractInvalid(f"format {document['format']!r:.60}, this code reads {CONTRACT_FORMAT!r}")
    output, version, features = document["output"], document["semantics_version"], document["feature_set"]
    if not isinstance(output, Mapping) or not {"name", "type"} <= set(output):
        raise ContractInvalid("output names no column with a type")
    if isinstance(version, bool) or not isinstance(version, int):
        raise ContractInvalid(f"semantics_version {version!r:.40} is no whole number")
    inputs = _accepted_columns(document["inputs"])
    accepted = _accepted_columns(document["request"]) if "request" in document else inputs
    name = features.get("name") if isinstance(features, Mapping) else None
    return Contract(accepted, output, None if name is None else str(name), version)


def compatibility(stable: Json, candidate: Json) -> Compatibility:
    """Return whether `candidate` may follow `stable`: every request that is valid now stays valid and means the same.

    Compatible: new optional columns, optional instead of required, wider type, range or closed set of values, new
    fields of the output. Breaking: the opposite of each, other names, another meaning of the output, another feature
    set or semantics version. Forbidden: another unit under the same name and semantics version. `stable` None: only
    whether the candidate has a contract.
    """
    try:
        after = parse_contract(candidate)
        before = after if stable is None else parse_contract(stable)
    except ContractInvalid as error:
        return Compatibility("invalid", (error.message,))
    renamed_units = list(_units(before, after))
    if renamed_units and before.semantics_version == after.semantics_version:
        return Compatibility("forbidden", tuple(renamed_units))
    problems = [*renamed_units, *_meaning(before, after), *_columns(before, after), *_output(before, after)]
    return Compatibility("breaking" if problems else "compatible", tuple(problems))


def contract_hash(document: Mapping[str, Json]) -> str:
    """Return the digest of a contract's canonical JSON."""
    return digest_json(document)


def _units(before: Contract, after: Contract) -> Iterator[str]:
    now = {column.name: column for column in after.accepted}
    for column in before.accepted:
        if column.name in now and now[column.name].unit != column.unit:
            yield f"{column.name!r} is measured in {now[column.name].unit!r}, was {column.unit!r}"


def _meaning(before: Contract, after: Contract) -> Iterator[str]:
    if before.semantics_version != after.semantics_version:
        yield f"semantics_version is {after.semantics_version}, was {before.semantics_version}"
    if before.feature_set != after.feature_set:
        yield f"feature set is {after.feature_set!r}, was {before.feature_set!r}"


def _columns(before: Contract, after: Contract) -> Iterator[str]:
    old, new = ({c.name: c for c in contract.accepted} for contract in (before, after))
    for name in sorted(set(old) - set(new)):
        yield f"{name!r} was accepted and is not any more"
    for name in sorted(set(new) - set(old)):
        if new[name].required:
            yield f"{name!r} is new and required"
    for name in sorted(set(old) & set(new)):
        yield from _narrower(old[name], new[name])


def _narrower(old: Column, new: Column) -> Iterator[str]:
    if new.type != old.type and (old.type, new.type) != ("int64", "float64"):
        yield f"{old.name!r} is {new.type}, was {old.type}"
    if new.required and not old.required:
        yield f"{old.name!r} is required, was optional"
    if old.nullable and not new.nullable:
        yield f"{old.name!r} must have a value, and could be null"
    if new.values is not None and (old.values is None or not old.values <= new.values):
        lost = "any" if old.values is None else sorted(old.values - new.values, key=repr)
        yield f"{old.name!r} no longer accepts {lost} of its values"
    if new.range is not None and (old.range is None or new.range[0] > old.range[0] or new.range[1] < old.range[1]):
        yield f"{old.name!r} has the range {list(new.range)}, was {None if old.range is None else list(old.range)}"


def _output(before: Contract, after: Contract) -> Iterator[str]:
    for field in dict.fromkeys([*_OUTPUT_MEANING, *before.output]):
        if before.output.get(field) != after.output.get(field):
            yield f"output {field} is {after.output.get(field)!r}, was {before.output.get(field)!r}"


def _accepted_columns(columns: Json) -> tuple[Column, ...]:
    if not isinstance(columns, list | tuple):
        raise ContractInvalid(f"{columns!r:.80} is no list of columns")
    found = tuple(_column(item) for item in columns)
    names = [column.name for column in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ContractInvalid(f"columns {twice} stand twice")
    return found


def _column(item: Json) -> Column:
    if not isinstance(item, Mapping) or not {"name", "type", "required"} <= set(item) <= _INPUT_FIELDS:
        raise ContractInvalid(f"column {item!r:.120} must have name, type, required, of {sorted(_INPUT_FIELDS)}")
    name, kind, unit = item["name"], item["type"], item.get("unit", "")
    if not isinstance(name, str) or not name or kind not in _TYPES or not isinstance(unit, str):
        raise ContractInvalid(f"column {name!r:.80} has type {kind!r:.40}; types are {list(_TYPES)}")
    flags = [item["required"], item.get("nullable", True), item.get("closed", False)]
    if not all(isinstance(flag, bool) for flag in flags):
        raise ContractInvalid(f"column {name!r:.80}: required, nullable and closed are true or false")
    required, nullable, closed = cast("list[bool]", flags)
    values = _values(name, item.get("values"))
    if closed and values is None:
        raise ContractInvalid(f"column {name!r:.80} is closed and lists no values")
    limits = _limits(name, item.get("range"))
    return Column(name, str(kind), required, nullable, values if closed else None, limits, unit)


def _values(name: str, values: Json) -> frozenset[Json] | None:
    if values is None:
        return None
    if not isinstance(values, list | tuple) or any(isinstance(v, list | tuple | Mapping) for v in values):
        raise ContractInvalid(f"column {name!r:.80}: values {values!r:.80} is no list of plain values")
    return frozenset(values)


def _limits(name: str, limits: Json) -> tuple[float, float] | None:
    if limits is None:
        return None
    numbers = [v for v in limits if isinstance(v, int | float)] if isinstance(limits, list | tuple) else []
    if len(numbers) != 2 or not numbers[0] <= numbers[1]:
        raise ContractInvalid(f"column {name!r:.80}: range {limits!r:.80} is no pair of lowest and highest")
    return float(numbers[0]), float(numbers[1])
