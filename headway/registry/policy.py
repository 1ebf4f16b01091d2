"""The conditions of promotion as one document: what the catalog keeps in force and gate statements cite by digest."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from headway.artifacts.digests import Json
from headway.declaration import ROW_GATES, EvaluationSpec, GateSpec, PromotionSpec, duration_us
from headway.errors import HeadwayError

POLICY_FORMAT = "headway.policy/1"
GATES: tuple[str, ...] = get_args(GateSpec.model_fields["gate"].annotation)

_FIELDS = {
    "format",
    "gates",
    "segments",
    "historical_rate",
    "resamples",
    "confidence",
    "allow_immediate",
    "evidence_max_age",
}


class PolicyInvalid(HeadwayError):
    """A policy document that leaves something open; nothing is taken by default."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"policy: {field} is {value!r:.120}", f"give {expected}")


@dataclass(frozen=True)
class Gate:
    """One condition: `margin` is what the interval's lower end must exceed; 0 is a margin like any other."""

    name: str
    margin: float
    unless: str


@dataclass(frozen=True)
class SegmentRule:
    """Values of `column` with at least `minimum` rows may lose `allowance` of AUC, at the interval's lower end."""

    column: str
    minimum: int
    allowance: float


@dataclass(frozen=True)
class Policy:
    """A read policy document. `evidence_max_age` is microseconds."""

    gates: tuple[Gate, ...]
    segments: tuple[SegmentRule, ...]
    resamples: int
    confidence: float
    allow_immediate: bool
    evidence_max_age: int

    def applicable(self, kind: str) -> tuple[Gate, ...]:
        """The gates that a version of this kind must pass."""
        return tuple(gate for gate in self.gates if gate.unless != kind)


def policy_document(promotion: PromotionSpec, evaluation: EvaluationSpec) -> dict[str, Json]:
    """Return the document of declared conditions: all that decides a verdict and nothing else."""
    return {
        "format": POLICY_FORMAT,
        "gates": [{"gate": g.gate, "margin": g.margin, "unless": g.unless} for g in promotion.gates],
        "segments": {
            column: {"minimum": rule.minimum, "allowance": rule.allowance}
            for column, rule in evaluation.segments.items()
        },
        "historical_rate": [
            part if isinstance(part, str) else {"column": part.column, "width": part.width}
            for part in evaluation.historical_rate
        ],
        "resamples": evaluation.resamples,
        "confidence": evaluation.confidence,
        "allow_immediate": promotion.allow_immediate,
        "evidence_max_age": promotion.evidence_max_age,
    }


def parse_policy(document: Json) -> Policy:
    """Return the policy of a document.

    Raises:
        PolicyInvalid: a field is missing, unknown, of another type or out of its range; a gate that this code does
            not know (a condition that nobody can check is not met).
    """
    fields = _fields(document, _FIELDS, "document")
    if fields["format"] != POLICY_FORMAT:
        raise PolicyInvalid("format", fields["format"], repr(POLICY_FORMAT))
    listed, segments = fields["gates"], fields["segments"]
    if not isinstance(listed, list | tuple) or not listed:
        raise PolicyInvalid("gates", listed, "a list of at least one gate")
    if not isinstance(segments, Mapping):
        raise PolicyInvalid("segments", segments, "an object of columns")
    gates = tuple(_gate(item) for item in listed)
    _check_rate(fields["historical_rate"], needed=any(gate.name in ROW_GATES for gate in gates))
    confidence = _number("confidence", fields["confidence"])
    if not 0.5 < confidence < 1:
        raise PolicyInvalid("confidence", confidence, "a share between 0.5 and 1")
    if not isinstance(fields["allow_immediate"], bool):
        raise PolicyInvalid("allow_immediate", fields["allow_immediate"], "true or false")
    return Policy(
        gates=gates,
        segments=tuple(_segment(column, rule) for column, rule in segments.items()),
        resamples=_count("resamples", fields["resamples"]),
        confidence=confidence,
        allow_immediate=fields["allow_immediate"],
        evidence_max_age=_age(fields["evidence_max_age"]),
    )


def _check_rate(parts: Json, *, needed: bool) -> None:
    """Refuse columns of the historical rate that `trainer.evaluate` would not take; gates of rows need some."""
    if not isinstance(parts, list | tuple) or (needed and not parts):
        raise PolicyInvalid("historical_rate", parts, "a list of at least one column")
    for part in parts:
        if isinstance(part, str) and part:
            continue
        fields = _fields(part, {"column", "width"}, "historical_rate")
        if not isinstance(fields["column"], str) or _number("historical_rate.width", fields["width"]) <= 0:
            raise PolicyInvalid("historical_rate", part, "a column, or a column and a width above 0")


def _gate(item: Json) -> Gate:
    fields = _fields(item, {"gate", "margin", "unless"}, "gates")
    name, unless = fields["gate"], fields["unless"]
    if name not in GATES or not isinstance(name, str):
        raise PolicyInvalid("gates.gate", name, f"one of {list(GATES)}")
    if not isinstance(unless, str):
        raise PolicyInvalid(f"gates.{name}.unless", unless, 'a kind of model, or ""')
    return Gate(name, _number(f"gates.{name}.margin", fields["margin"]), unless)


def _segment(column: str, rule: Json) -> SegmentRule:
    fields = _fields(rule, {"minimum", "allowance"}, f"segments.{column}")
    allowance = _number(f"segments.{column}.allowance", fields["allowance"])
    if allowance < 0:
        raise PolicyInvalid(f"segments.{column}.allowance", allowance, "a number of at least 0")
    return SegmentRule(column, _count(f"segments.{column}.minimum", fields["minimum"]), allowance)


def _fields(value: Json, names: set[str], what: str) -> Mapping[str, Json]:
    if not isinstance(value, Mapping) or set(value) != names:
        found = sorted(value) if isinstance(value, Mapping) else value
        raise PolicyInvalid(what, found, f"an object with exactly the fields {sorted(names)}")
    return value


def _number(field: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PolicyInvalid(field, value, "a finite number")
    return float(value)


def _count(field: str, value: Json) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyInvalid(field, value, "a whole number of at least 1")
    return value


def _age(value: Json) -> int:
    if not isinstance(value, str):
        raise PolicyInvalid("evidence_max_age", value, "a duration such as 30d")
    try:
        return duration_us(value)
    except ValueError as error:
        raise PolicyInvalid("evidence_max_age", value, "a duration such as 30d") from error
