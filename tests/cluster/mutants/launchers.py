"""Six wrong launchers, each the real one but for a few lines: the contract suite has to notice every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headway.training.kubernetes.client import Document, ObjectConflict
from headway.training.kubernetes.facts import AttemptFacts
from headway.training.kubernetes.launcher import KubernetesLauncher
from headway.training.kubernetes.observe import End, Marker
from headway.training.launch import LaunchFailed, Observation


class AdoptsAnyUid(KubernetesLauncher):
    """Adopts a Job of the right name and labels without comparing its uid."""

    def _make_job(self, body: Document, marker: Marker | None) -> Document:
        return super()._make_job(body, None)


class TerminalByOnePod(KubernetesLauncher):
    """Takes the first pod that has succeeded for the end of the attempt."""

    def observe(self, run_id: str, attempt: int) -> Observation:
        seen = super().observe(run_id, attempt)
        phases = [pod["status"].get("phase") for pod in self._pods(run_id, attempt)]
        if seen.state == "running" and "Succeeded" in phases:
            return replace(seen, state="ended", code=0, cause="a pod is done", reason_code="done")
        return seen


class _Unfenced(AttemptFacts):
    """Files that fence nobody."""

    def later_attempts(self) -> list[int]:
        return []

    def write_final(self, end: End) -> Observation:
        return Observation(
            "ended",
            end.code,
            end.cause,
            end.exit_codes,
            end.cancelled,
            end.worker_seconds,
            end.ended_at,
            reason_code=end.reason_code,
        )


class FencesNothing(KubernetesLauncher):
    """Works without a fencing token: an old attempt may be submitted again and goes on writing."""

    def _facts(self, run_id: str, attempt: int) -> AttemptFacts:
        return _Unfenced(super()._facts(run_id, attempt).folder)


class SetsTtl(KubernetesLauncher):
    """Lets the cluster clean up ended Jobs by itself."""

    def _make_job(self, body: Document, marker: Marker | None) -> Document:
        return super()._make_job({**body, "spec": {**body["spec"], "ttlSecondsAfterFinished": 0}}, marker)


class LeavesTheService(KubernetesLauncher):
    """Makes a Service that no Job owns, and deletes Jobs and pods only."""

    def _make_service(self, body: Document, owner_uid: str) -> None:
        metadata = {key: value for key, value in body["metadata"].items() if key != "ownerReferences"}
        self._make("services", {**body, "metadata": metadata}, lambda _: True)

    def _delete(self, name: str, uid: str, resource: str = "jobs") -> None:
        if resource != "services":
            super()._delete(name, uid, resource)


class ConflictIsError(KubernetesLauncher):
    """Takes a name that exists already for a failure."""

    def _make(self, resource: str, body: Document, ours: Callable[[Document], bool]) -> Document:
        try:
            return self._cluster.create(resource, body)
        except ObjectConflict as error:
            raise LaunchFailed(error.message, error.remedy) from error
