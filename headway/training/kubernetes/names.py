"""What an attempt's objects are called: names, labels and annotations, made from what the attempt is alone.

A name is the same however often it is made, so that a second create meets the first (409) and looks. It holds hashes
and no cut-off text: runs that differ only at the end of a long name get different names. The full names are
annotations, which may hold anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.spec import AttemptSpec, RunSpec, TokenDataSpec

PREFIX = "headway.dev/"
INSTANCE, TENANT, RUN, ATTEMPT, TOKEN = (PREFIX + name for name in ("instance", "tenant", "run", "attempt", "token"))
TENANT_NAME, RUN_ID, PIPELINE, PARTITION, SPEC_DIGEST = (
    PREFIX + name for name in ("tenant-name", "run-id", "pipeline", "partition", "spec-digest")
)
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOB_LABEL = "batch.kubernetes.io/job-name"
CONTAINER = "trainer"


@dataclass(frozen=True)
class Names:
    """The identity of one attempt in a cluster; `name` is its Job's and its Service's."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    def host(self, index: int, namespace: str) -> str:
        """The DNS name of the pod of node `index`."""
        return f"{self.name}-{index}.{self.name}.{namespace}.svc.cluster.local"


def short_hash(*parts: str, length: int = 12) -> str:
    """The first hex digits of a SHA-256 over `parts`, which no other parts share by being cut differently."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:length]


def job_name(instance: str, tenant: str, run_id: str, attempt: int) -> str:
    """`hw-<tenant hash>-<run hash>-a<attempt>`; at most 35 characters, so that `<name>-<index>` is a hostname."""
    return f"hw-{short_hash(tenant, length=6)}-{short_hash(instance, tenant, run_id)}-a{attempt}"


def selector(instance: str) -> str:
    """The label selector of everything that belongs to `instance`."""
    return f"{INSTANCE}={short_hash(instance)}"


def attempt_labels(instance: str, tenant: str, run_id: str, attempt: int) -> dict[str, str]:
    """The labels by which the objects of one attempt are found; its token is not needed for that."""
    return {
        INSTANCE: short_hash(instance),
        TENANT: short_hash(tenant, length=6),
        RUN: short_hash(instance, tenant, run_id),
        ATTEMPT: str(attempt),
    }


def names_of(instance: str, tenant: str, attempt: AttemptSpec, spec: RunSpec) -> Names:
    """Name an attempt of `tenant` in the catalog `instance`."""
    labels = attempt_labels(instance, tenant, attempt.run_id, attempt.attempt)
    return Names(
        job_name(instance, tenant, attempt.run_id, attempt.attempt),
        labels | {TOKEN: str(attempt.token)},
        {
            TENANT_NAME: tenant,
            RUN_ID: attempt.run_id,
            PIPELINE: spec.pipeline,
            PARTITION: _newest_partition(spec),
            SPEC_DIGEST: spec.digest,
        },
    )


def _newest_partition(spec: RunSpec) -> str:
    """The newest data that a run learns from; text has no partitions."""
    if isinstance(spec.data, TokenDataSpec):
        return ""
    return max(file.partition for file in spec.data.files)


def whose(document: Mapping[str, Any]) -> tuple[str, int] | None:
    """The (run, attempt) that an object is labelled with; None when it carries no such marks."""
    metadata = document["metadata"]
    run_id = (metadata.get("annotations") or {}).get(RUN_ID, "")
    attempt = (metadata.get("labels") or {}).get(ATTEMPT, "")
    return (run_id, int(attempt)) if run_id and attempt.isdecimal() else None
