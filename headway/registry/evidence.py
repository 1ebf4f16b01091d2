"""Evidence of a promotion: complete, fresh, verifying, and about the champion that is there now."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway.artifacts.errors import StoreError
from headway.catalog.registry_facts import ModelVersion
from headway.datasets.zones import iso
from headway.errors import HeadwayError
from headway.registry.contract import compatibility
from headway.registry.dossier import check_dossier, collect_dossier, stored_files
from headway.registry.dsse import Statement
from headway.registry.keys import Trust
from headway.registry.statements import CLOCK_SKEW_US, signed_at
from headway.services import Services

# Verdicts of these compare with the champion, so they say nothing once another version has become it.
_AGAINST_CHAMPION = ("auc_over_champion", "segments", "bits_per_byte_over_champion")


class EvidenceMissing(HeadwayError):
    """A version that may not be promoted; `problems` says why, by gate or by what else is missing."""

    def __init__(self, model_id: str, version: int, problems: Mapping[str, str]) -> None:
        said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        super().__init__(
            f"{model_id}@{version} lacks evidence ({said})",
            f"mend it and judge the version again (materialize its model_version asset); "
            f"`headway models show {model_id}@{version}` shows every gate",
        )
        self.problems = dict(problems)


@dataclass(frozen=True)
class Evidence:
    """Gate statements that verify, all passing and fresh, by gate, and the policy version that asks for them."""

    policy_version: int
    policy_digest: str
    statements: Mapping[str, str]
    verified_at: int


def collect_evidence(
    services: Services, trust: Trust, version: ModelVersion, now: int, stable: ModelVersion | None = None
) -> Evidence:
    """Return the evidence on which a version may be promoted now.

    Args:
        services: the catalog and store that hold it.
        trust: the public keys that count.
        version: the version.
        now: microseconds UTC; statements older than the policy's `evidence_max_age` are stale, and a clock that lies
            behind what was signed or recorded measures no age.
        stable: the version that it would replace.

    Raises:
        EvidenceMissing: names each gate whose statement is missing, does not verify, did not pass or is stale, and
            everything else that does not hold: a file of the artifact, the provenance, the contract.
    """
    try:
        dossier = collect_dossier(services, version)
    except StoreError as error:
        raise EvidenceMissing(version.model_id, version.version, {"dossier": str(error)}) from error
    # Where it serves already is no evidence: a promotion that does not verify is what another one mends.
    checked = check_dossier(replace(dossier, promotions=()), trust)
    problems = {finding.subject: finding.problem for finding in checked.problems}
    problems |= {f"gate {gate}": said for gate, said in checked.unpassed.items()}
    if version.retired:
        problems["version"] = "it is retired"
    if checked.manifest is not None:
        problems |= {f.subject: f.problem for f in stored_files(services.store, checked.manifest) if f.problem}
    newest = _newest_result(services)
    if newest > now + CLOCK_SKEW_US:
        problems["clock"] = f"it says {iso(now)}, and a gate result was recorded at {iso(newest)}: it was set back"
    for gate, statement in checked.statements.items():
        problem = _stale(statement, 0 if checked.policy is None else checked.policy.evidence_max_age, now)
        problem = problem or (_other_champion(statement, stable, version) if gate in _AGAINST_CHAMPION else "")
        if problem:
            problems.setdefault(f"gate {gate}", problem)
    follows = compatibility(None if stable is None else stable.contract, version.contract)
    if follows.verdict != "compatible":
        problems["contract"] = f"{follows.verdict}: {', '.join(follows.problems)}"
    if problems:
        raise EvidenceMissing(version.model_id, version.version, problems)
    statements = {gate: statement.digest for gate, statement in checked.statements.items()}
    return Evidence(dossier.policy_version, dossier.judged.policy_digest, statements, now)


def _newest_result(services: Services) -> int:
    """When the catalog last recorded a verdict about any version; 0: it has none."""
    catalog, principal = services.catalog, services.principal
    versions = catalog.model_versions(principal)
    return max((r.at for v in versions for r in catalog.gate_results(principal, v.model_id, v.version)), default=0)


def _stale(statement: Statement, max_age: int, now: int) -> str:
    signed = signed_at(statement)
    if signed > now + CLOCK_SKEW_US:
        return f"its statement was signed at {iso(signed)}, and the clock says {iso(now)}"
    age = now - signed
    if age <= max_age:
        return ""
    return f"its statement is {age // 1_000_000} s old, at most {max_age // 1_000_000} s count"


def _other_champion(statement: Statement, stable: ModelVersion | None, version: ModelVersion) -> str:
    if stable is None or stable.version == version.version:
        return ""
    judged, now = statement.predicate.get("champion"), f"{stable.model_id}@{stable.version}"
    return "" if judged == now else f"it was judged against {judged or 'no champion'}, and {now} is stable now"
