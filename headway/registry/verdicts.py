"""What gates take and give: facts about a version, and a verdict in one sentence and in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headway.artifacts.digests import Json
from headway.registry.evaluation import CANDIDATE

Verdict: TypeAlias = Literal["pass", "fail", "undecided"]

_NAMED = 6


@dataclass(frozen=True)
class GateVerdict:
    """What a gate says of a version, in one sentence and in numbers."""

    gate: str
    verdict: Verdict
    reason: str
    metrics: Mapping[str, Json]


@dataclass(frozen=True)
class ArtifactCheck:
    """What loading the artifact found (`trainer.check`). None: that part could not be tried; `problems` say why."""

    weights_only: bool | None
    finite_outputs: bool | None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProofCheck:
    """The leakage proof of one snapshot that was used, and what is wrong with it ("" when it verifies)."""

    snapshot_id: str
    proof_digest: str
    problem: str = ""


@dataclass(frozen=True)
class Checks:
    """Facts about a version beside its evaluation.

    `contract` None: the version has none. `stable_contract` is that of the endpoint's stable version; `champion` names
    that version, and both are None without one. `champion_report` is the evaluation by which the champion was judged.
    """

    contract: Json
    artifact: ArtifactCheck
    proofs: tuple[ProofCheck, ...]
    stable_contract: Json = None
    champion: str | None = None
    champion_report: Mapping[str, Json] | None = None


def lost_metrics(metrics: Mapping[str, Mapping[str, object]], report: Mapping[str, Json] | None) -> list[str]:
    """Metrics of the candidate in the champion's `report` that are not in the `metrics` of the candidate now."""
    recorded = {} if report is None else report.get("metrics")
    before = recorded.get(CANDIDATE) if isinstance(recorded, Mapping) else None
    names = [n for n, value in before.items() if value is not None] if isinstance(before, Mapping) else []
    mine = metrics.get(CANDIDATE, {})
    return [name for name in names if name not in mine]


def listed(names: list[str]) -> str:
    """The first names, and how many more there are: a reason is one line."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(name[:300] for name in names[:_NAMED]) + more
