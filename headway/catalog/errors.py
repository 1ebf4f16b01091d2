"""What the catalog refuses, one class per cause."""

from headway.errors import HeadwayError


class CatalogError(HeadwayError):
    """Base of the catalog's refusals."""


class InvalidFact(CatalogError):
    """A field that the catalog cannot take."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}: {value!r:.120} is refused", f"give {expected}")
        self.field = field


class UnknownTenant(CatalogError):
    """A command or read for a tenant that was never made."""

    def __init__(self, tenant: str) -> None:
        super().__init__(f"there is no tenant {tenant!r}", "make it first: Catalog.ensure_tenant(principal)")
        self.tenant = tenant


class IdempotencyConflict(CatalogError):
    """One idempotency key was used for two different commands."""

    def __init__(self, key: str, operation: str) -> None:
        super().__init__(
            f"key {key!r} already answered another command than this {operation}",
            "send the same arguments to get the stored answer, or use a new key",
        )
        self.key = key


class IllegalTransition(CatalogError):
    """A dataset version cannot take this step from the state it is in."""

    def __init__(self, dataset: str, version: int, state: str, step: str, why: str) -> None:
        super().__init__(f"dataset {dataset!r} version {version} is {state}: {step} is refused", why)
        self.dataset, self.version, self.state, self.step = dataset, version, state, step


class StaleEpoch(CatalogError):
    """The current version of a partition moved since the caller looked."""

    def __init__(self, dataset: str, partition: str, expected: int, found: int) -> None:
        super().__init__(
            f"dataset {dataset!r} partition {partition!r} is at epoch {found}, the caller expected {expected}",
            "read the partition again and decide anew",
        )
        self.expected, self.found = expected, found


class UnknownVersion(CatalogError):
    """No such dataset version."""

    def __init__(self, dataset: str, version: int) -> None:
        super().__init__(f"dataset {dataset!r} has no version {version}", "list them with Catalog.versions")
        self.dataset, self.version = dataset, version


class UnknownFeatureSet(CatalogError):
    """No such version of a feature set."""

    def __init__(self, feature_set: str, version: int) -> None:
        super().__init__(
            f"feature set {feature_set!r} has no version {version}", "register it: Catalog.register_feature_set"
        )
        self.feature_set, self.version = feature_set, version


class UnknownSnapshot(CatalogError):
    """No such feature snapshot."""

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"there is no snapshot {snapshot_id!r}", "list them with Catalog.current_snapshots")
        self.snapshot_id = snapshot_id


class InputNotReleased(CatalogError):
    """A snapshot names an input that is not released, or that is released on other evidence than the caller saw."""

    def __init__(self, dataset: str, partition: str, version: int, status: str, why: str) -> None:
        where = f" partition {partition!r}" if partition else ""
        super().__init__(
            f"input {dataset!r}{where} version {version} is {status}: {why}", "repair and release it first"
        )
        self.dataset, self.partition, self.version, self.status = dataset, partition, version, status


class ProofMissing(CatalogError):
    """A snapshot without a passed leakage proof."""

    def __init__(self, pipeline: str, partition: str, proof_digest: str) -> None:
        super().__init__(
            f"snapshot of {pipeline!r} partition {partition!r}: leakage proof {proof_digest} did not pass",
            "mend the leak that the proof names",
        )


class Nondeterminism(CatalogError):
    """The same inputs gave other content: a fact that the identity fixes came out differently."""

    def __init__(self, subject: str, field: str, stored: object, given: object) -> None:
        super().__init__(
            f"{subject}: {field} is {given!r} now and {stored!r} in the catalog, for the same identity",
            "find what is not deterministic (an undeclared input, a clock, an unordered read); nothing was changed",
        )
        self.field = field


class BlobSizeConflict(CatalogError):
    """One digest with two sizes: one of the two was not measured on the bytes."""

    def __init__(self, digest: str, stored: int, given: int) -> None:
        super().__init__(f"blob {digest} has {stored} bytes in the catalog, {given} were given", "hash the bytes again")


class CatalogBusy(CatalogError):
    """A lock or an answer did not come before the deadline; nothing was changed unless a repeat says otherwise."""

    def __init__(self, operation: str, cause: str) -> None:
        super().__init__(f"{operation}: {cause}", "repeat the same command; its effect comes once")


class SchemaTooNew(CatalogError):
    """The database was migrated by newer code."""

    def __init__(self, found: str, known: str) -> None:
        super().__init__(f"the catalog is at revision {found}, this code knows {known}", "run the newer code")


class UnsupportedDatabase(CatalogError):
    """A database URL that the catalog does not run on."""

    def __init__(self, scheme: str) -> None:
        super().__init__(f"database {scheme!r} is not supported", "use sqlite:///<path> or postgresql://<...>")


class CatalogUnavailable(CatalogError):
    """The database did not answer, or the connection broke."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"the database cannot be used: {cause}",
            "see that it is there, that it may be written and that its disk has room, then repeat the same command",
        )


class EvidenceRefused(CatalogError):
    """Evidence that proves nothing, or that was gathered under another suite than the validation that runs."""

    def __init__(self, dataset: str, version: int, why: str) -> None:
        super().__init__(f"evidence for dataset {dataset!r} version {version}: {why}", "validate the version again")


class UnknownRun(CatalogError):
    """No such training run."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"there is no run {run_id!r}", "list them: headway runs")
        self.run_id = run_id


class UnknownAttempt(CatalogError):
    """No such attempt of a training run."""

    def __init__(self, run_id: str, attempt: int) -> None:
        super().__init__(f"run {run_id} has no attempt {attempt}", f"see its attempts: headway runs show {run_id}")
        self.run_id, self.attempt = run_id, attempt


class StaleAttempt(CatalogError):
    """Somebody acts for an attempt that is over, or that a later attempt superseded; nothing was changed."""

    def __init__(self, run_id: str, attempt: int, why: str) -> None:
        super().__init__(f"attempt {attempt} of run {run_id}: {why}", "read the run again; a stale attempt must stop")
        self.run_id, self.attempt = run_id, attempt


class RunRefused(CatalogError):
    """A run that its own code or spec failed is asked for again, unchanged."""

    def __init__(self, run_id: str, attempt: int, code: int | None, reason: str | None) -> None:
        super().__init__(
            f"run {run_id} failed by its code: attempt {attempt} ended with {code} ({reason or 'no reason given'})",
            "change the code, the configuration or an input, or ask again with retry: true",
        )
        self.run_id, self.attempt, self.code = run_id, attempt, code


class RunCancelled(CatalogError):
    """A cancelled run is asked for again by a sensor, a backfill or a retry policy."""

    def __init__(self, run_id: str, reason: str | None) -> None:
        super().__init__(
            f"run {run_id} was cancelled ({reason or 'no reason given'}); only a person starts it again",
            "launch it by hand, or with another repeat",
        )
        self.run_id = run_id


class AttemptsSpent(CatalogError):
    """Infrastructure ended as many attempts as the run may cost."""

    def __init__(self, run_id: str, spent: int, limit: int, reason: str | None) -> None:
        super().__init__(
            f"run {run_id}: infrastructure ended {spent} attempts, the limit is {limit}; "
            f"the last: {reason or 'no reason given'}",
            "mend the cause, then ask again with retry: true, or raise max_attempts",
        )
        self.run_id, self.spent, self.limit = run_id, spent, limit


class EventGap(CatalogError):
    """Events of a node's stream came without the ones before them."""

    def __init__(self, run_id: str, attempt: int, node: int, expected: int, given: int) -> None:
        super().__init__(
            f"run {run_id} attempt {attempt} node {node}: event {given} came, {expected} is the next",
            f"read the stream from event {expected}",
        )
        self.expected, self.given = expected, given


class BudgetMissing(CatalogError):
    """A reservation from a budget that has no amount in this period."""

    def __init__(self, budget_id: str, period: str) -> None:
        super().__init__(
            f"budget {budget_id!r} has no amount for {period}",
            f"set one: Catalog.set_budget(principal, None, {budget_id!r}, {period!r}, 'worker_seconds', <amount>)",
        )
        self.budget_id, self.period = budget_id, period


class BudgetExhausted(CatalogError):
    """A reservation that the budget cannot carry any more in this period."""

    def __init__(self, budget_id: str, period: str, limit: int, reserved: int, committed: int, asked: int) -> None:
        super().__init__(
            f"budget {budget_id!r} of {period}: {asked} asked, {limit - reserved - committed} left "
            f"(limit {limit}, reserved {reserved}, spent {committed})",
            "wait for open runs to give back what they hold, raise the budget, or ask for less",
        )
        self.limit, self.reserved, self.committed, self.asked = limit, reserved, committed, asked


class BudgetBelowUse(CatalogError):
    """A budget's amount would become less than what is reserved and spent already."""

    def __init__(self, budget_id: str, period: str, amount: int, used: int) -> None:
        super().__init__(
            f"budget {budget_id!r} of {period} cannot become {amount}: {used} are reserved or spent already",
            f"give at least {used}",
        )
        self.amount, self.used = amount, used


class UnknownModel(CatalogError):
    """No such model, or no such version of it."""

    def __init__(self, model_id: str, version: int | None = None) -> None:
        what = f"model {model_id!r}" if version is None else f"version {version} of model {model_id!r}"
        super().__init__(f"there is no {what}", "list them: headway models list")
        self.model_id, self.version = model_id, version


class VersionRefused(CatalogError):
    """A model version that may not be registered, or may not be retired now."""

    def __init__(self, subject: str, why: str, remedy: str) -> None:
        super().__init__(f"{subject}: {why}", remedy)


class UnknownPolicy(CatalogError):
    """A model without a gate policy, or without that version of it."""

    def __init__(self, model_id: str, version: int | None = None) -> None:
        what = "no gate policy" if version is None else f"no version {version} of its gate policy"
        super().__init__(f"model {model_id!r} has {what}", "set it: Catalog.set_gate_policy")
        self.model_id, self.version = model_id, version


class StatementRefused(CatalogError):
    """A statement that was never attested, or that is about something else, or by another role."""

    def __init__(self, statement_digest: str, why: str) -> None:
        super().__init__(f"statement {statement_digest}: {why}", "sign the statement anew and attest it first")
        self.statement_digest = statement_digest


class PromotionRefused(CatalogError):
    """A version that may not be promoted; `reasons` says why, by gate (or `policy`, `version`, `promotion`)."""

    def __init__(self, endpoint_id: str, model_id: str, version: int, reasons: "dict[str, str]") -> None:
        listed = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items()))
        super().__init__(
            f"{model_id}@{version} may not be promoted to endpoint {endpoint_id!r}: {listed}",
            "gather the evidence again: every gate of the policy in force must pass",
        )
        self.reasons = reasons


class EndpointMoved(CatalogError):
    """The endpoint moved since the caller looked."""

    def __init__(self, endpoint_id: str, expected: int, found: int) -> None:
        super().__init__(
            f"endpoint {endpoint_id!r} is at epoch {found}, the caller expected {expected}",
            "read the endpoint again and decide anew",
        )
        self.expected, self.found = expected, found


class EndpointRefused(CatalogError):
    """Something else that an endpoint cannot take: another model, or a move while a rollout is open."""

    def __init__(self, endpoint_id: str, why: str, remedy: str) -> None:
        super().__init__(f"endpoint {endpoint_id!r}: {why}", remedy)


class UnknownEndpoint(CatalogError):
    """No such endpoint, or no such epoch of it."""

    def __init__(self, endpoint_id: str, epoch: int | None = None) -> None:
        at = "" if epoch is None else f" at epoch {epoch}"
        super().__init__(f"there is no endpoint {endpoint_id!r}{at}", "promote a version to it first: headway promote")
        self.endpoint_id, self.epoch = endpoint_id, epoch


class NothingToRollBack(CatalogError):
    """An endpoint that served only one version so far."""

    def __init__(self, endpoint_id: str) -> None:
        super().__init__(
            f"endpoint {endpoint_id!r} has no previous version to go back to", "promote another version instead"
        )
        self.endpoint_id = endpoint_id


class ImpossiblePrediction(CatalogError):
    """A prediction by a version or an arm that the endpoint did not have at that epoch."""

    def __init__(self, endpoint_id: str, epoch: int, arm: str, version: int, found: int | None) -> None:
        super().__init__(
            f"endpoint {endpoint_id!r} at epoch {epoch}: arm {arm} is version {found}, the prediction names {version}",
            "record the epoch and version that answered",
        )


class UnknownPrediction(CatalogError):
    """No such prediction."""

    def __init__(self, prediction_id: str) -> None:
        super().__init__(f"there is no prediction {prediction_id!r}", "take the id that headway predict printed")
        self.prediction_id = prediction_id


class SegmentMoved(CatalogError):
    """A range of a log segment that does not begin where the last recorded one ended; nothing was changed."""

    def __init__(self, server: str, segment: str, stored: int, given: int) -> None:
        super().__init__(
            f"segment {segment!r} of server {server!r} is recorded up to byte {stored}, the range begins at {given}",
            f"read on from byte {stored}: another shipment was there first, or bytes were left out",
        )
        self.server, self.segment, self.stored, self.given = server, segment, stored, given


class UnknownReport(CatalogError):
    """No such report."""

    def __init__(self, report_id: str) -> None:
        super().__init__(f"there is no report {report_id!r}", "list them with Catalog.reports")
        self.report_id = report_id


class UnknownRetrainRequest(CatalogError):
    """No such request to train again."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"there is no retrain request {request_id!r}", "list them: headway retrain list")
        self.request_id = request_id


class RetrainOpen(CatalogError):
    """A pipeline has an open request to train again: a second one waits for its end."""

    def __init__(self, pipeline: str, request_id: str) -> None:
        super().__init__(
            f"pipeline {pipeline!r} has the open retrain request {request_id}",
            f"wait until it is closed, or reject it: headway retrain reject {request_id}",
        )
        self.pipeline, self.request_id = pipeline, request_id


class RetrainMoved(CatalogError):
    """A retrain request moved since the caller looked."""

    def __init__(self, request_id: str, expected: int, found: int) -> None:
        super().__init__(
            f"retrain request {request_id} is at epoch {found}, the caller expected {expected}",
            "read the request again and decide anew",
        )
        self.request_id, self.expected, self.found = request_id, expected, found


class RetrainRefused(CatalogError):
    """A move that a retrain request cannot make from the state it is in."""

    def __init__(self, request_id: str, state: str, to: str, why: str) -> None:
        super().__init__(f"retrain request {request_id} is {state}: {to} is refused", why)
        self.request_id, self.state, self.to = request_id, state, to
