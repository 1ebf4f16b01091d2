"""Small valid things for tests of the registry: keys, statements, policies, scores, contracts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.registry.evaluation import Evaluation, ScoredRows, measure
from headway.registry.gates import evaluate_gates
from headway.registry.keys import KeyRing
from headway.registry.policy import GATES, parse_policy
from headway.registry.verdicts import ArtifactCheck, Checks, GateVerdict, ProofCheck

START = 1_400_000_000_000_000
SUBJECT = "sha256:" + "ab" * 32
KIND = "urn:tests:claim:1"
ROW_GATES = tuple(gate for gate in GATES if not gate.startswith("bits_per_byte"))


@dataclass
class Hand:
    """A clock that stands still until it is moved, or moves by `step` at each look."""

    now: int = START
    step: int = 0

    def __call__(self) -> int:
        self.now += self.step
        return self.now


@dataclass
class Ring:
    """A key ring with its clock."""

    folder: Path
    clock: Hand = field(default_factory=Hand)

    @property
    def keys(self) -> KeyRing:
        return KeyRing(self.folder, self.clock)


def policy_json(*gates: str, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """A policy document that lists these gates (default: all of rows), margin 0, segments by `carrier`."""
    document: dict[str, Any] = {
        "format": "headway.policy/1",
        "gates": [{"gate": name, "margin": 0.0, "unless": ""} for name in gates or ROW_GATES],
        "segments": {"carrier": {"minimum": 50, "allowance": 0.02}},
        "historical_rate": ["carrier"],
        "resamples": 200,
        "confidence": 0.95,
        "allow_immediate": True,
        "evidence_max_age": "30d",
    }
    return document | changes


def scored(
    rows: int = 600,
    days: int = 20,
    skill: Mapping[str, float] | None = None,
    carriers: tuple[str, ...] = ("AA", "UA"),
    seed: int = 1,
    **changes: Any,  # noqa: ANN401
) -> ScoredRows:
    """Rows whose models order them by label plus noise: more `skill`, more order. Champion only when named."""
    generator = np.random.default_rng(seed)
    labels = (generator.random(rows) < 0.4).astype(np.float64)
    noise = generator.normal(size=rows)
    skills = {"candidate": 3.0, "historical_rate": 0.5, "logistic": 1.0, "gradient_boosting": 2.0} | dict(skill or {})
    scores = {
        name: 1 / (1 + np.exp(-(strength * (labels - 0.5) + noise + generator.normal(size=rows) / 4)))
        for name, strength in skills.items()
    }
    values: dict[str, Any] = {
        "digest": "sha256:" + "cd" * 32,
        "rows": rows,
        "labels": labels,
        "day": np.arange(rows, dtype=np.int64) % max(days, 1),
        "scores": scores,
        "segments": {"carrier": np.asarray([carriers[i % len(carriers)] for i in range(rows)], dtype=np.object_)},
        "blocks": "days of the test",
    }
    return ScoredRows(**values | changes)


def evaluation(rows: ScoredRows | None = None, **policy: Any) -> Evaluation:  # noqa: ANN401
    """Rows measured under a policy."""
    return measure(scored() if rows is None else rows, parse_policy(policy_json(**policy)))


def contract(*inputs: dict[str, Any], **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """A contract over these columns; default: an optional float `x` and a required string `carrier`."""
    columns = list(inputs) or [
        {"name": "carrier", "type": "string", "required": True},
        {"name": "x", "type": "float64", "required": False},
    ]
    document: dict[str, Any] = {
        "format": "headway.contract/1",
        "inputs": columns,
        "output": {"name": "probability", "type": "float64", "range": [0, 1]},
        "feature_set": {"name": "delay", "version": 1},
        "semantics_version": 1,
    }
    return document | changes


def checks(**changes: Any) -> Checks:  # noqa: ANN401
    """Facts with which every gate passes."""
    values: dict[str, Any] = {
        "contract": contract(),
        "artifact": ArtifactCheck(weights_only=True, finite_outputs=True),
        "proofs": (ProofCheck("sha256:" + "01" * 32, "sha256:" + "02" * 32),),
    }
    return Checks(**values | changes)


def verdicts(
    rows: ScoredRows | Evaluation | None = None,
    given: Checks | None = None,
    kind: str = "network",
    **policy: Any,  # noqa: ANN401
) -> dict[str, GateVerdict]:
    """Every gate's verdict, by gate."""
    parsed = parse_policy(policy_json(**policy))
    measured = rows if isinstance(rows, Evaluation) else measure(scored() if rows is None else rows, parsed)
    return {v.gate: v for v in evaluate_gates(parsed, kind, measured, given or checks())}
