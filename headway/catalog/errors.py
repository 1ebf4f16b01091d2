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
        super().__init__(f"{operation}: {cause}", "repeat the same command with the same key")


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
        super().__init__(f"the database cannot be reached: {cause}", "repeat the same command with the same key")


class EvidenceRefused(CatalogError):
    """Evidence that proves nothing, or that was gathered under another suite than the validation that runs."""

    def __init__(self, dataset: str, version: int, why: str) -> None:
        super().__init__(f"evidence for dataset {dataset!r} version {version}: {why}", "validate the version again")
