"""The launcher of a cluster: an attempt is an Indexed Job and its Service, known by name, labels and uid.

Submitting is a row of steps, each of which finds its own earlier effect: files, Job (suspended), `job.json`, Service
owned by the Job, start (or the queue's), `job.json` again as whole. A submitter that is killed between two of them
leaves an attempt that is still `absent`, and whoever submits next goes on.

The API server's word is believed for ends only when it was asked for them: what a watch has told is enough to say that
an attempt runs, and every end is looked up anew before it is written down.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.training.attempt import Accelerator
from headway.training.kubernetes import observe
from headway.training.kubernetes.blame import in_settings
from headway.training.kubernetes.client import (
    Cluster,
    ClusterUnreachable,
    Document,
    Forbidden,
    ManifestRefused,
    ObjectConflict,
    ObjectMissing,
)
from headway.training.kubernetes.facts import AttemptFacts, Heard
from headway.training.kubernetes.logs import LogKeeper
from headway.training.kubernetes.manifest import owned_by, render
from headway.training.kubernetes.names import (
    JOB_LABEL,
    RUN_ID,
    TOKEN,
    attempt_labels,
    job_name,
    names_of,
    selector,
    whose,
)
from headway.training.kubernetes.observe import End, Marker, NodeFacts, PodFact, Sight, pod_fact
from headway.training.kubernetes.platform import Platform
from headway.training.kubernetes.view import View, bears
from headway.training.launch import KillFailed, LaunchError, LaunchRefused, Observation, Stray
from headway.training.run_files import run_folder
from trainer.events import Event, StreamBroken, now_us, read_events
from trainer.spec import AttemptSpec, ExitCode, RunSpec

# Of a Dagster sensor's 60 s; what is still there then is ended further the next time.
KILL_S = 30.0
# How long a submit waits for an object of the same name to be gone; longer, and it is tried again later.
ADOPT_S = 2.0
CATCH_UP_S = 5.0
# The kubelet takes it as "now", and the API server still waits until the container is gone; with 0 it would not.
_AT_ONCE_S = 1
_LOOK_EVERY_S = 0.25
_HOSTS_AGAIN_S = 300.0
# Why an attempt waits changes slowly, and whoever follows it looks three times a second.
_WHY_AGAIN_S = 2.0
_JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"

logger = logging.getLogger(__name__)


class KubernetesLauncher:
    """Runs attempts as Jobs of one namespace, with their directories under `runs_root` on a volume that pods share.

    `store_root` and `code_root` are what the attempts' specs should name. `instance` tells apart the catalogs that use
    one namespace: objects of another instance are never touched. `tenant` is its full name.
    """

    name = "kubernetes"

    @property
    def accelerator(self) -> Accelerator:
        """What the nodes of the profile compute on."""
        return "cuda" if self._platform.gpu.count else "cpu"

    def __init__(
        self,
        runs_root: Path,
        store_root: Path,
        code_root: Path,
        platform: Platform,
        client: Cluster,
        instance: str,
        tenant: str,
    ) -> None:
        self._runs_root = runs_root.resolve()
        self.store_root = store_root.resolve()
        self.code_root = code_root.resolve()
        self._platform = platform
        self._cluster = client.in_namespace(platform.namespace)
        self._instance = instance
        self._tenant = tenant
        self._selector = selector(instance)
        self._view = View(self._cluster, self._selector, self._remember)
        self._logs = LogKeeper(self._cluster, self.run_dir)
        self._heard = Heard()
        self._first_steps: dict[Path, int] = {}
        self._hosts_unreadable_s: float | None = None
        self._asked: dict[tuple[str, str], tuple[float, list[Document]]] = {}

    def run_dir(self, run_id: str) -> Path:
        """Return the run's directory.

        Raises:
            LaunchRefused: `run_id` is no name for a directory.
        """
        return run_folder(self._runs_root, run_id)

    def artifact_dir(self, run_id: str, attempt: int, name: str) -> Path:
        """Return where the attempt leaves its artifact `name` (network, logistic)."""
        return self._facts(run_id, attempt).folder / "artifact" / name

    def submit(self, attempt: AttemptSpec, spec: RunSpec) -> None:
        """Start the attempt, unless it was started before; safe at any number of submitters, killed at any moment.

        Raises:
            LaunchRefused: another spec stands under the same name, a later attempt exists, an object of this name is
                somebody else's, the attempt lies outside the shared volume, or no cluster would take its manifest.
            ManifestRefused: the API server refuses the manifest; the message names the fields.
            Forbidden: the account may not do this.
            LauncherUnavailable: the API server does not answer, or what bore the name is still being deleted.
        """
        facts = self._facts(attempt.run_id, attempt.attempt)
        self._refuse_elsewhere(attempt)
        names = names_of(self._instance, self._tenant, attempt, spec)
        rendered = render(attempt, spec, self._platform, names)
        if later := facts.later_attempts():
            raise LaunchRefused(
                f"attempt {attempt.attempt} of run {attempt.run_id} is fenced off: attempt {max(later)} exists",
                "submit the newest attempt",
            )
        facts.prepare(attempt, spec)
        marker = facts.marker()
        if facts.final() is not None:
            return
        if marker is not None and marker.submitted:
            self._refuse_another(self._found("jobs", names.name), marker)
            return
        if facts.wished():
            self._end_before_start(facts)
            return
        job = self._make_job(rendered.job, marker)
        metadata = job["metadata"]
        if facts.final() is not None or facts.later_attempts():
            # Its end was recorded, and its first Job released, while this submitter was held up.
            self._delete(names.name, metadata["uid"])
            return
        marker = Marker(names.name, self._platform.namespace, metadata["uid"], metadata["creationTimestamp"])
        facts.write_marker(marker)
        self._make_service(owned_by(rendered.service, names.name, marker.uid), marker.uid)
        if self._platform.queue is None and job["spec"].get("suspend"):
            self._cluster.patch("jobs", names.name, {"metadata": {"uid": marker.uid}, "spec": {"suspend": False}})
        facts.write_marker(replace(marker, submitted=True))
        if facts.wished():
            # The wish came while the Job was being made, and found none to delete.
            self._delete(marker.name, marker.uid)

    def observe(self, run_id: str, attempt: int) -> Observation:
        """Say what is known of the attempt now, and write down an end when that is what it is.

        Raises:
            FactsUnreadable: a file of the attempt is no such document.
            LauncherUnavailable: the API server does not answer.
        """
        facts = self._facts(run_id, attempt)
        if (final := facts.final()) is not None:
            return final
        specs = facts.specs()
        if specs is None:
            return Observation("absent")
        seen = observe.observe(self._look(facts, *specs, fresh=False), self._platform)
        if isinstance(seen, Observation) and seen.state in ("starting", "running"):
            return seen
        sight = self._look(facts, *specs, fresh=True)
        seen = observe.observe(sight, self._platform)
        if isinstance(seen, Observation):
            return seen
        return self._conclude(facts, sight, seen)

    def stream(self, run_id: str, attempt: int, node: int, after: int, limit: int) -> list[Event]:
        """Return up to `limit` events of node `node` that follow seq `after`.

        Raises:
            StreamBroken: the stream lost events.
        """
        folder = self._facts(run_id, attempt).folder
        return read_events(folder / f"node-{node}" / "events.jsonl", after, limit)

    def cancel(self, run_id: str, attempt: int, reason: str) -> None:
        """Ask the attempt to save and end: the wish is written down, then its Job is deleted; its nodes get SIGTERM."""
        facts = self._facts(run_id, attempt)
        facts.wish(reason)
        marker = facts.marker()
        name = job_name(self._instance, self._tenant, run_id, attempt)
        if marker is not None:
            self._delete(marker.name, marker.uid)
        elif (job := self._found("jobs", name)) is not None and self._is_ours(job, run_id, attempt):
            self._delete(name, job["metadata"]["uid"])

    def kill(self, run_id: str, attempt: int) -> None:
        """Delete everything of the attempt, and return when nothing is left but pods of hosts that do not answer.

        Those are fenced: what they still do is refused.

        Raises:
            KillFailed: something is still there after `KILL_S` seconds.
        """
        deadline = time.monotonic() + KILL_S
        asked: set[str] = set()
        owners: set[str] = set()
        while left := self._blocking(run_id, attempt, owners):
            for resource, item in left:
                if (uid := item["metadata"]["uid"]) not in asked:
                    asked.add(uid)
                    self._delete_now(resource, item)
            if time.monotonic() > deadline:
                shown = [f"{resource}/{item['metadata']['name']}" for resource, item in left]
                raise KillFailed(
                    f"{shown} of attempt {run_id}/{attempt} are still there after {KILL_S:.0f} s",
                    "look at their finalizers and at their hosts; then reconcile again",
                )
            time.sleep(_LOOK_EVERY_S)

    def capacity(self) -> int | None:
        """None: only the scheduler knows, and only when it is asked for a place."""
        return None

    def release(self, run_id: str, attempt: int) -> None:
        """Delete Job and Service of an attempt whose end is recorded; its pods follow, after their logs were kept."""
        pods = self._pods(run_id, attempt)
        torn = self._logs.catch_up(run_id, attempt, pods, CATCH_UP_S)
        if torn:
            logger.warning("the logs of pods %s of attempt %s/%d could not be kept whole", torn, run_id, attempt)
        for resource, item in self._objects(run_id, attempt):
            self._delete(item["metadata"]["name"], item["metadata"]["uid"], resource)

    def strays(self) -> Sequence[Stray]:
        """Return every Job, Service and pod of this instance that is not being deleted, of any attempt."""
        found: list[Stray] = []
        for resource, kind in (("jobs", "Job"), ("services", "Service"), ("pods", "Pod")):
            for item in self._cluster.list(resource, labels=self._selector).items:
                owner = whose(item)
                if owner is not None and not item["metadata"].get("deletionTimestamp"):
                    found.append((*owner, f"{kind} {self._platform.namespace}/{item['metadata']['name']}"))
        return sorted(found, key=str)

    def close(self) -> None:
        """Stop looking; attempts go on."""
        self._view.close()
        self._logs.close()

    def _facts(self, run_id: str, attempt: int) -> AttemptFacts:
        return AttemptFacts(self.run_dir(run_id) / "attempts" / str(attempt))

    def _labels(self, run_id: str, attempt: int) -> dict[str, str]:
        return attempt_labels(self._instance, self._tenant, run_id, attempt)

    def _is_ours(self, item: Mapping[str, Any], run_id: str, attempt: int) -> bool:
        annotations = item["metadata"].get("annotations") or {}
        return bears(item, self._labels(run_id, attempt)) and annotations.get(RUN_ID) == run_id

    def _refuse_elsewhere(self, attempt: AttemptSpec) -> None:
        if Path(attempt.run_dir).resolve() != self.run_dir(attempt.run_id):
            raise LaunchRefused(
                f"attempt {attempt.run_id}/{attempt.attempt} names run directory {attempt.run_dir}",
                f"this launcher keeps it in {self.run_dir(attempt.run_id)}",
            )
        mount = self._platform.volume.mount_path
        for place in (attempt.run_dir, attempt.store_root, attempt.code_root):
            if not Path(place).is_relative_to(mount):
                raise LaunchRefused(
                    f"{place} does not lie on the volume that training pods share, mounted at {mount}",
                    "set HEADWAY_HOME to a folder of that volume, or `volume.mount_path` of the profile to where it is",
                )

    def _end_before_start(self, facts: AttemptFacts) -> None:
        words = "cancelled before it started"
        facts.write_final(End(int(ExitCode.PREEMPTED), words, "cancelled", (), 0.0, now_us(), cancelled=True))

    def _refuse_another(self, found: Document | None, marker: Marker | None) -> None:
        """Refuse a Job that bears the attempt's name and labels, and is not the one that was made for it."""
        if found is not None and marker is not None and found["metadata"]["uid"] != marker.uid:
            raise LaunchRefused(
                f"Job {marker.name} has uid {found['metadata']['uid']}; the one made for this attempt had {marker.uid}",
                "somebody made another one under its name: delete that, and reconcile again",
            )

    def _make_job(self, body: Document, marker: Marker | None) -> Document:
        """Create the Job, or adopt the one that an earlier submission of the same attempt created."""
        name = body["metadata"]["name"]

        def ours(found: Document) -> bool:
            if not bears(found, body["metadata"]["labels"]) or not _same_annotations(found, body):
                raise _somebody_elses("Job", name, found)
            self._refuse_another(found, marker)
            return not found["metadata"].get("deletionTimestamp")

        return self._make("jobs", body, ours)

    def _make_service(self, body: Document, owner_uid: str) -> None:
        name, labels = body["metadata"]["name"], body["metadata"]["labels"]

        def ours(found: Document) -> bool:
            if not bears(found, labels):
                raise _somebody_elses("Service", name, found)
            if owner_uid in _owners(found):
                return not found["metadata"].get("deletionTimestamp")
            # Of an earlier Job of this name, and about to be collected.
            self._delete(name, found["metadata"]["uid"], "services")
            return False

        self._make("services", body, ours)

    def _make(self, resource: str, body: Document, ours: Callable[[Document], bool]) -> Document:
        """Create an object or find it made: a name that is taken means look, and one that is going means wait."""
        deadline = time.monotonic() + ADOPT_S
        name = body["metadata"]["name"]
        while True:
            try:
                return self._cluster.create(resource, body)
            except ManifestRefused as refused:
                raise ManifestRefused(in_settings(refused.message), refused.remedy) from refused
            except ObjectConflict as conflict:
                found = self._found(resource, name)
                if found is not None and ours(found):
                    return found
                if time.monotonic() > deadline:
                    raise ClusterUnreachable(
                        f"{resource}/{name} is still being deleted: {conflict.message}", "it is tried again"
                    ) from conflict
                time.sleep(_LOOK_EVERY_S)

    def _look(self, facts: AttemptFacts, attempt: AttemptSpec, spec: RunSpec, *, fresh: bool) -> Sight:
        """Gather what is known; `fresh` asks the API server, otherwise what the watch has told will do."""
        name = job_name(self._instance, self._tenant, attempt.run_id, attempt.attempt)
        marker = facts.marker()
        job = self._found("jobs", name) if fresh else self._view.job(name)
        if job is not None and not self._is_ours(job, attempt.run_id, attempt.attempt):
            job = None
        labels = self._labels(attempt.run_id, attempt.attempt)
        pods = self._pods(attempt.run_id, attempt.attempt) if fresh else self._view.pods(labels)
        for pod in pods:
            self._remember(pod)
        self._logs.keep(attempt.run_id, attempt.attempt, pods)
        known = tuple(map(pod_fact, pods))
        living = [pod for pod in known if not pod.ended]
        watched = {pod.index: min(spec.restart.hang_floor_s, self._platform.node_lost_after_s) for pod in living}
        nodes = self._with_first_steps(facts, facts.nodes(attempt, self._heard, watched))
        workload = self._workload(job, fresh=fresh)
        return Sight(
            attempt,
            spec,
            now_us(),
            ahead_us=self._cluster.ahead_us,
            job=job,
            marker=marker,
            pods=known,
            remembered=facts.remembered(),
            nodes=nodes,
            workload=workload,
            events=self._events(job, workload, living, fresh=fresh),
            hosts=self._hosts(living, nodes, watched),
            wished=facts.wished(),
        )

    def _conclude(self, facts: AttemptFacts, sight: Sight, end: End) -> Observation:
        """Fence the attempt first; only then is its Job deleted, when it is we who end it."""
        stands = facts.write_final(end)
        if end.gives_up and sight.own_job is not None:
            self._delete(sight.own_job["metadata"]["name"], sight.own_job["metadata"]["uid"])
        return stands

    def _remember(self, pod: Document) -> None:
        """Keep what is seen of a pod that ended or is going."""
        owner = whose(pod)
        if owner is None or not self._is_ours(pod, *owner):
            return
        fact, facts = pod_fact(pod), self._facts(*owner)
        if not (fact.ended or fact.deleted_at is not None or fact.disruption):
            return
        try:
            if facts.folder.is_dir():
                facts.remember(fact)
        except (OSError, LaunchError) as error:
            # The volume is full or away: what the node itself wrote must do.
            logger.warning("what was seen of pod %s could not be kept: %s", fact.name, error)

    def _with_first_steps(self, facts: AttemptFacts, nodes: tuple[NodeFacts, ...]) -> tuple[NodeFacts, ...]:
        if self._platform.active_deadline_s is None or not nodes or nodes[0].began_at is None:
            return nodes
        if facts.folder not in self._first_steps:
            try:
                at = facts.first_step_at(0)
            except StreamBroken:
                # The reconciler ends an attempt whose stream is broken.
                return nodes
            if at is None:
                return nodes
            self._first_steps[facts.folder] = at
        return (replace(nodes[0], first_step_at=self._first_steps[facts.folder]), *nodes[1:])

    def _workload(self, job: Document | None, *, fresh: bool) -> Document | None:
        if self._platform.queue is None or job is None or not (fresh or job["spec"].get("suspend")):
            return None
        try:
            selected = f"{_JOB_UID_LABEL}={job['metadata']['uid']}"
            found = self._now_and_then("workloads", selected, labels=selected, fresh=fresh)
        except ObjectMissing:
            return None
        return found[0] if found else None

    def _events(
        self, job: Document | None, workload: Document | None, living: Sequence[PodFact], *, fresh: bool
    ) -> list[Document]:
        """Events, where nothing else says why an attempt does not start."""
        if job is None:
            return []
        name = job["metadata"]["name"]
        if job["spec"].get("suspend"):
            unknown = self._platform.queue is not None and workload is None
            return self._events_of(name, fresh=fresh) if unknown else []
        if not living:
            return [] if observe.terminal(job) else self._events_of(name, fresh=fresh)
        creating = [pod for pod in living if pod.waiting_reason == "ContainerCreating"]
        return [event for pod in creating for event in self._events_of(pod.name, fresh=fresh)]

    def _events_of(self, name: str, *, fresh: bool) -> list[Document]:
        return self._now_and_then("events", name, fields=f"involvedObject.name={name}", fresh=fresh)

    def _now_and_then(
        self, resource: str, key: str, *, labels: str = "", fields: str = "", fresh: bool
    ) -> list[Document]:
        """List what explains a wait; unless `fresh`, an answer of a moment ago will do."""
        then = self._asked.get((resource, key))
        now = time.monotonic()
        if not fresh and then is not None and now - then[0] < _WHY_AGAIN_S:
            return then[1]
        self._asked = {which: kept for which, kept in self._asked.items() if now - kept[0] < _WHY_AGAIN_S}
        found = self._cluster.list(resource, labels=labels, fields=fields).items
        self._asked[resource, key] = (now, found)
        return found

    def _hosts(
        self, living: Sequence[PodFact], nodes: Sequence[NodeFacts], watched: Mapping[int, float]
    ) -> dict[str, bool] | None:
        """Whether the hosts of pods that are going or silent are ready; None where hosts may not be read."""
        silent = {n.node for n in nodes if n.silent_s is not None and n.silent_s > watched.get(n.node, n.silent_s)}
        asked = {pod.host for pod in living if pod.host and (pod.deleted_at is not None or pod.index in silent)}
        ready: dict[str, bool] = {}
        for host in sorted(asked):
            answer = self._host_is_ready(host)
            if answer is None:
                return None
            ready[host] = answer
        return ready

    def _host_is_ready(self, host: str) -> bool | None:
        since = self._hosts_unreadable_s
        if since is not None and time.monotonic() - since < _HOSTS_AGAIN_S:
            return None
        try:
            node = self._cluster.get("nodes", host)
        except ObjectMissing:
            return False
        except Forbidden:
            self._hosts_unreadable_s = time.monotonic()
            return None
        conditions = (node.get("status") or {}).get("conditions") or []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _found(self, resource: str, name: str) -> Document | None:
        try:
            return self._cluster.get(resource, name)
        except ObjectMissing:
            return None

    def _pods(self, run_id: str, attempt: int) -> list[Document]:
        return self._cluster.list("pods", labels=_selected(self._labels(run_id, attempt))).items

    def _objects(self, run_id: str, attempt: int) -> list[tuple[str, Document]]:
        """The Job and the Service of the attempt."""
        labels = _selected(self._labels(run_id, attempt))
        return [
            (resource, item)
            for resource in ("jobs", "services")
            for item in self._cluster.list(resource, labels=labels).items
        ]

    def _blocking(self, run_id: str, attempt: int, owners: set[str]) -> list[tuple[str, Document]]:
        """What is left of the attempt, without the pods that nobody is there to end.

        The Job comes first: its controller would replace a pod that is deleted before it. `owners` gathers the uids of
        its Jobs, for pods that bear none of our labels.
        """
        left = self._objects(run_id, attempt)
        owners |= {item["metadata"]["uid"] for resource, item in left if resource == "jobs"}
        name = job_name(self._instance, self._tenant, run_id, attempt)
        made = self._cluster.list("pods", labels=f"{JOB_LABEL}={name}").items
        pods = {item["metadata"]["uid"]: item for item in self._pods(run_id, attempt)}
        pods |= {item["metadata"]["uid"]: item for item in made if owners & _owners(item)}
        return left + [("pods", item) for item in pods.values() if not self._is_left_alone(pod_fact(item))]

    def _is_left_alone(self, pod: PodFact) -> bool:
        if pod.deleted_at is None or not pod.host:
            return False
        ready = self._host_is_ready(pod.host)
        return (now_us() - pod.deleted_at) / 1e6 > observe.UNHEARD_S if ready is None else not ready

    def _delete(self, name: str, uid: str, resource: str = "jobs") -> None:
        """Delete that very object in the background; one that is gone, or another of its name, is left alone."""
        try:
            self._cluster.delete(resource, name, uid=uid)
        except (ObjectMissing, ObjectConflict):
            return

    def _delete_now(self, resource: str, item: Document) -> None:
        metadata = item["metadata"]
        grace_s = _AT_ONCE_S if resource == "pods" else None
        try:
            self._cluster.delete(resource, metadata["name"], uid=metadata["uid"], grace_s=grace_s)
        except (ObjectMissing, ObjectConflict):
            return


def _same_annotations(found: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    given = found["metadata"].get("annotations") or {}
    return all(given.get(name) == value for name, value in body["metadata"]["annotations"].items())


def _somebody_elses(kind: str, name: str, found: Mapping[str, Any]) -> LaunchRefused:
    labels = found["metadata"].get("labels") or {}
    return LaunchRefused(
        f"{kind} {name} exists and is not this attempt's: its token is {labels.get(TOKEN)!r}, its labels are {labels}",
        "it belongs to another submission or another user: delete it, or use another namespace",
    )


def _owners(item: Mapping[str, Any]) -> set[str]:
    return {owner["uid"] for owner in item["metadata"].get("ownerReferences") or []}


def _selected(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())
