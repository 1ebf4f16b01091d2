"""The Job controller: pods of a Job, its counts and conditions, after `pkg/controller/job` of Kubernetes 1.36.

Like there, a pod's finalizer is taken off only when the status that counts the pod is stored, changes of pods are
looked at once a second, and a condition of intent (SuccessCriteriaMet, FailureTarget) comes before the terminal one.
"""

import asyncio
import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tests.cluster.double.store import ApiError, Object, Store, random_suffix, stamp

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
_FAILURES = "batch.kubernetes.io/job-index-failure-count"
_IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"
_BATCH = 1.0
# Seconds between the creation of pods and the status that tells of it: others may change the Job in between.
_LATENCY = 0.05
_BACKOFF, _BACKOFF_MAX = 10.0, 600.0


def indexes_text(indexes: set[int]) -> str:
    """Indexes as the API writes them: `0,2-5`; two in a row are listed apart."""
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and parts[-1][-1] == index - 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    words = []
    for part in parts:
        words += [str(one) for one in part] if len(part) < 3 else [f"{part[0]}-{part[-1]}"]
    return ",".join(words)


def indexes_of(text: str) -> set[int]:
    """The indexes of such a text."""
    found: set[int] = set()
    for word in filter(None, text.split(",")):
        first, _, last = word.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def condition(obj: Object, kind: str) -> Object | None:
    """The condition of a type that holds, or None."""
    found = (one for one in obj.get("status", {}).get("conditions", ()) if one["type"] == kind)
    return next((one for one in found if one["status"] == "True"), None)


def finished(job: Object) -> bool:
    """Whether a Job has its terminal condition."""
    return bool(condition(job, "Complete") or condition(job, "Failed"))


def controller_of(obj: Object) -> Object | None:
    """The owner reference of the controller."""
    return next((one for one in obj["metadata"].get("ownerReferences", ()) if one.get("controller")), None)


def _phase(pod: Object) -> str:
    return pod.get("status", {}).get("phase", "Pending")


def _index(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get(INDEX, -1))


def _tracked(pod: Object) -> bool:
    return TRACKING in pod["metadata"].get("finalizers", ())


def _deleted(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_ready(pod: Object) -> bool:
    return condition(pod, "Ready") is not None


def _only_failed(job: Object) -> bool:
    return job["spec"].get("podReplacementPolicy") == "Failed"


def _is_failed(pod: Object, job: Object) -> bool:
    if _phase(pod) == "Failed":
        return True
    return not _only_failed(job) and _deleted(pod) and _phase(pod) != "Succeeded"


def match_policy(job: Object, pod: Object) -> tuple[str, str]:
    """The first matching rule of the podFailurePolicy: (action, message of FailJob); ("", "") when none matches."""
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(job["spec"].get("podFailurePolicy", {}).get("rules", ())):
        ending = f"matching {rule['action']} rule at index {number}"
        if rule.get("onExitCodes"):
            hit = _match_codes(pod, rule["onExitCodes"])
            if hit:
                code = hit["state"]["terminated"]["exitCode"]
                return rule["action"], f"Container {hit['name']} for pod {name} failed with exit code {code} {ending}"
        elif hit := _match_conditions(pod, rule.get("onPodConditions", ())):
            return rule["action"], f"Pod {name} has condition {hit['type']} {ending}"
    return "", ""


def _match_codes(pod: Object, rule: Object) -> Object | None:
    status = pod.get("status", {})
    for one in status.get("containerStatuses", []) + status.get("initContainerStatuses", []):
        code = one["state"].get("terminated", {}).get("exitCode", 0)
        if rule.get("containerName") not in (None, one["name"]) or not code:
            continue
        if (code in rule["values"]) == (rule["operator"] == "In"):
            return one
    return None


def _match_conditions(pod: Object, rules: list[Object]) -> Object | None:
    for one in pod.get("status", {}).get("conditions", ()):
        if any(rule["type"] == one["type"] and rule.get("status", "True") == one["status"] for rule in rules):
            return one
    return None


@dataclass
class _Sync:
    """What one look at a Job has found."""

    job: Object
    pods: list[Object]
    active: list[Object]
    terminating: int
    ready: int
    end: Object | None = None
    succeeded: int = 0
    failed: int = 0
    succeeded_indexes: set[int] = field(default_factory=set)
    failed_indexes: set[int] = field(default_factory=set)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    new_failures: list[datetime] = field(default_factory=list)
    created: bool = False

    @property
    def spec(self) -> Object:
        return self.job["spec"]

    @property
    def status(self) -> Object:
        return self.job["status"]

    @property
    def indexed(self) -> bool:
        return self.spec.get("completionMode") == "Indexed"

    @property
    def uncounted(self) -> Object:
        return self.status.setdefault("uncountedTerminatedPods", {})


class JobController:
    """Keeps every Job's pods and status."""

    def __init__(self, store: Store, admit: Callable[[Object], Object]) -> None:
        """Work on `store`; `admit` defaults and admits new pods."""
        self._store, self._clock, self._admit = store, store.clock, admit
        self._due: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._busy: set[tuple[str, str]] = set()
        self._again: dict[tuple[str, str], float] = {}
        self._failures: dict[str, list[datetime]] = {}
        self._seen: dict[str, int] = {}
        self._ended: dict[str, datetime] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Follow Jobs and pods."""
        changes = self._store.subscribe()
        for job in self._store.list("jobs"):
            self._see_job("ADDED", job)
        for pod in self._store.list("pods"):
            self._see_pod(pod)
        while True:
            plural, kind, obj = await changes.get()
            if plural == "jobs":
                self._see_job(kind, obj)
            elif plural == "pods":
                self._see_pod(obj)

    def _see_job(self, kind: str, job: Object) -> None:
        meta = job["metadata"]
        if kind == "DELETED" or "deletionTimestamp" in meta:
            self._release(meta["uid"])
        if kind == "DELETED":
            self._failures.pop(meta["uid"], None)
            self._seen.pop(meta["uid"], None)
            return
        same = self._seen.get(meta["uid"]) == meta["generation"]
        self._seen[meta["uid"]] = meta["generation"]
        self._enqueue((meta["namespace"], meta["name"]), _BATCH if same else 0.0)

    def _see_pod(self, pod: Object) -> None:
        owner = controller_of(pod)
        if owner is None or owner["kind"] != "Job":
            if owner is None and _tracked(pod):
                self._untrack(pod)
            return
        namespace = pod["metadata"]["namespace"]
        job = self._store.get("jobs", namespace, owner["name"])
        gone = job is None or job["metadata"]["uid"] != owner["uid"] or "deletionTimestamp" in job["metadata"]
        if gone and _tracked(pod):
            self._untrack(pod)
        if job is not None and job["metadata"]["uid"] == owner["uid"]:
            self._enqueue((namespace, owner["name"]), _BATCH)

    def _release(self, uid: str) -> None:
        """The Job goes: its pods are not to be counted any more."""
        for pod in self._store.list("pods"):
            owner = controller_of(pod)
            if owner is not None and owner["uid"] == uid and _tracked(pod):
                self._untrack(pod)

    def _untrack(self, pod: Object) -> None:
        meta = pod["metadata"]
        found = self._store.get("pods", meta["namespace"], meta["name"])
        if found is None or found["metadata"]["uid"] != meta["uid"] or not _tracked(found):
            return
        found["metadata"]["finalizers"].remove(TRACKING)
        self._store.update("pods", found)

    def _enqueue(self, key: tuple[str, str], delay: float) -> None:
        """Look at a Job in `delay` seconds of the cluster's time, unless that is due sooner anyway."""
        loop = asyncio.get_running_loop()
        at = loop.time() + delay / self._clock.scale
        known = self._due.get(key)
        if known is not None:
            if known.when() <= at:
                return
            known.cancel()
        self._due[key] = loop.call_at(at, self._begin, key)

    def _begin(self, key: tuple[str, str]) -> None:
        del self._due[key]
        if key in self._busy:
            self._again.setdefault(key, 0.0)
            return
        self._busy.add(key)
        task = asyncio.create_task(self._work(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, key: tuple[str, str]) -> None:
        try:
            await self._sync(key)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            self._again.setdefault(key, 0.0)
        finally:
            self._busy.discard(key)
            if key in self._again:
                self._enqueue(key, self._again.pop(key))

    async def _sync(self, key: tuple[str, str]) -> None:
        job = self._store.get("jobs", *key)
        if job is None:
            return
        if finished(job):
            self._expire(job)
            return
        sync = self._look(job)
        self._decide(sync)
        active = len(sync.active)
        if sync.end is not None:
            active -= self._delete_all(sync)
        elif "deletionTimestamp" not in job["metadata"]:
            active = self._manage(sync, active)
            self._mark_suspension(sync)
        if sync.end is None and self._complete(sync, active):
            sync.end = self._condition("SuccessCriteriaMet", "CompletionsReached", _REACHED)
        self._counts(sync, active)
        if sync.created:
            # The controller waits until it has seen its own pods; what came meanwhile is looked at with them.
            await asyncio.sleep(_LATENCY)
            if key in self._again:
                self._again[key] = _BATCH
        self._track(sync)

    def _look(self, job: Object) -> _Sync:
        meta = job["metadata"]
        job.setdefault("status", {})
        pods = []
        for pod in self._store.list("pods", meta["namespace"]):
            owner = controller_of(pod)
            if owner is not None and owner["uid"] == meta["uid"]:
                pods.append(pod)
        alive = [pod for pod in pods if _phase(pod) not in ("Succeeded", "Failed")]
        active = [pod for pod in alive if not _deleted(pod)]
        sync = _Sync(job, pods, active, len(alive) - len(active), sum(map(_is_ready, active)))
        self._count(sync)
        return sync

    def _count(self, sync: _Sync) -> None:
        status, uncounted = sync.status, sync.status.get("uncountedTerminatedPods", {})
        known = {*uncounted.get("succeeded", ()), *uncounted.get("failed", ())}
        new = [pod for pod in sync.pods if _tracked(pod) and pod["metadata"]["uid"] not in known]
        failed = [pod for pod in new if _is_failed(pod, sync.job)]
        counted = [pod for pod in failed if match_policy(sync.job, pod)[0] != "Ignore"]
        sync.failed = status.get("failed", 0) + len(counted) + len(uncounted.get("failed", ()))
        done = [pod for pod in new if _phase(pod) == "Succeeded"]
        sync.succeeded = status.get("succeeded", 0) + len(done) + len(uncounted.get("succeeded", ()))
        ends = self._failures.setdefault(sync.job["metadata"]["uid"], [])
        if done:
            ends.clear()
        sync.new_failures = [self._ended_at(pod) for pod in counted]
        if not sync.indexed:
            return
        total = sync.spec["completions"]
        sync.succeeded_indexes = indexes_of(status.get("completedIndexes", "")) | {
            _index(pod)
            for pod in sync.pods
            if _tracked(pod) and _phase(pod) == "Succeeded" and 0 <= _index(pod) < total
        }
        sync.succeeded_indexes = {index for index in sync.succeeded_indexes if index < total}
        sync.succeeded = len(sync.succeeded_indexes)
        if "backoffLimitPerIndex" in sync.spec:
            sync.failed_indexes = indexes_of(status.get("failedIndexes", "")) | {
                _index(pod) for pod in sync.pods if _tracked(pod) and self._index_failed(sync, pod)
            }

    def _index_failed(self, sync: _Sync, pod: Object) -> bool:
        if not _is_failed(pod, sync.job) or not 0 <= _index(pod) < sync.spec["completions"]:
            return False
        action, _ = match_policy(sync.job, pod)
        count = int(pod["metadata"].get("annotations", {}).get(_FAILURES, 0))
        return action == "FailIndex" or (action != "Ignore" and count >= sync.spec["backoffLimitPerIndex"])

    def _decide(self, sync: _Sync) -> None:
        """Whether the Job is to end, and why."""
        job, spec, status = sync.job, sync.spec, sync.status
        suspended = spec.get("suspend", False)
        if "startTime" not in status and not suspended:
            status["startTime"] = stamp(self._clock.now())
        sync.end = condition(job, "SuccessCriteriaMet") or condition(job, "FailureTarget")
        if sync.end is not None:
            return
        for pod in sync.pods:
            action, message = match_policy(job, pod) if _is_failed(pod, job) else ("", "")
            if action == "FailJob":
                sync.end = self._condition("FailureTarget", "PodFailurePolicy", message)
                return
        sync.end = self._limits(sync)
        if sync.end is None and sync.indexed:
            sync.end = self._policy_met(sync)

    def _limits(self, sync: _Sync) -> Object | None:
        spec = sync.spec
        limit = spec.get("backoffLimit", 6)
        restarts = 0
        if spec["template"]["spec"].get("restartPolicy") == "OnFailure":
            for pod in sync.active:
                every = pod["status"].get("containerStatuses", []) + pod["status"].get("initContainerStatuses", [])
                restarts += sum(one["restartCount"] for one in every)
        if sync.failed > limit or (restarts > 0 and restarts >= limit):
            return self._condition(
                "FailureTarget", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
            )
        if "activeDeadlineSeconds" in spec and not spec.get("suspend") and "startTime" in sync.status:
            start = datetime.fromisoformat(sync.status["startTime"])
            left = start + timedelta(seconds=spec["activeDeadlineSeconds"]) - self._clock.now()
            if left.total_seconds() <= 0:
                words = "Job was active longer than specified deadline"
                return self._condition("FailureTarget", "DeadlineExceeded", words)
            key = (sync.job["metadata"]["namespace"], sync.job["metadata"]["name"])
            asyncio.get_running_loop().call_later(left.total_seconds() + 0.01, self._enqueue, key, 0.0)
        return None

    def _policy_met(self, sync: _Sync) -> Object | None:
        spec, total = sync.spec, sync.spec["completions"]
        if "backoffLimitPerIndex" in spec and sync.failed_indexes:
            if len(sync.failed_indexes) > spec.get("maxFailedIndexes", total):
                words = "Job has exceeded the specified maximal number of failed indexes"
                return self._condition("FailureTarget", "MaxFailedIndexesExceeded", words)
            if len(sync.failed_indexes) + len(sync.succeeded_indexes) >= total:
                return self._condition("FailureTarget", "FailedIndexes", "Job has failed indexes")
        for number, rule in enumerate(spec.get("successPolicy", {}).get("rules", ())):
            wanted = indexes_of(rule["succeededIndexes"]) if rule.get("succeededIndexes") else set(range(total))
            have = wanted & sync.succeeded_indexes
            need = rule.get("succeededCount", len(wanted))
            if len(have) >= need:
                return self._condition("SuccessCriteriaMet", "SuccessPolicy", f"Matched rules at index {number}")
        return None

    def _condition(self, kind: str, reason: str, message: str, status: str = "True") -> Object:
        now = stamp(self._clock.now())
        times = {"lastProbeTime": now, "lastTransitionTime": now}
        return {"type": kind, "status": status, **times, "reason": reason, "message": message}

    def _delete_all(self, sync: _Sync) -> int:
        """The Job ends: delete what is active; it is counted before it loses its finalizer."""
        for pod in sync.active:
            self._delete(sync, pod)
        return len(sync.active)

    def _delete(self, sync: _Sync, pod: Object) -> None:
        meta = pod["metadata"]
        self._store.delete("pods", meta["namespace"], meta["name"], uid=meta["uid"], propagation="Background")
        self._event(sync.job, "Normal", "SuccessfulDelete", f"Deleted pod: {meta['name']}")
        sync.ready -= _is_ready(pod)
        sync.terminating += 1

    def _manage(self, sync: _Sync, active: int) -> int:
        """Make or delete pods so that as many run as should.

        Returns:
            How many are active then.
        """
        spec = sync.spec
        total, parallelism = spec.get("completions"), spec.get("parallelism", 1)
        if spec.get("suspend"):
            return self._drop(sync, sync.active)
        if total is None:
            wanted = active if sync.succeeded else parallelism
        else:
            wanted = max(min(total - sync.succeeded, parallelism), 0)
        if active > wanted:
            late = sorted(sync.active, key=lambda pod: (_is_ready(pod), -_index(pod)))
            return self._drop(sync, late[: active - wanted])
        missing = wanted - active - (sync.terminating if _only_failed(sync.job) else 0)
        return active + self._create(sync, missing) if missing > 0 else active

    def _drop(self, sync: _Sync, pods: list[Object]) -> int:
        for pod in pods:
            self._untrack(pod)
        for pod in pods:
            self._delete(sync, pod)
        return len(sync.active) - len(pods)

    def _create(self, sync: _Sync, missing: int) -> int:
        key = (sync.job["metadata"]["namespace"], sync.job["metadata"]["name"])
        per_index = "backoffLimitPerIndex" in sync.spec
        wait = 0.0 if per_index else self._wait(self._recent(sync))
        if wait > 0:
            self._enqueue(key, wait)
            return -len(sync.active)
        if not sync.indexed:
            return sum(self._new_pod(sync, None, {}) for _ in range(missing))
        taken = {_index(pod) for pod in sync.active} | sync.succeeded_indexes | sync.failed_indexes
        if _only_failed(sync.job):
            taken |= {_index(pod) for pod in sync.pods if _deleted(pod) and _phase(pod) not in ("Succeeded", "Failed")}
        pending = [index for index in range(sync.spec["completions"]) if index not in taken][:missing]
        made = 0
        for index in pending:
            counts, wait = self._history(sync, index) if per_index else ({}, 0.0)
            if wait > 0:
                self._enqueue(key, wait)
            else:
                made += self._new_pod(sync, index, counts)
        return made

    def _ended_at(self, pod: Object) -> datetime:
        """When a pod failed.

        Its last container's end as its status says it, in whole seconds; too coarse where the cluster's time is scaled.
        """
        uid, now = pod["metadata"]["uid"], self._clock.now()
        statuses = pod.get("status", {}).get("containerStatuses", ())
        ends = [one["state"].get("terminated", {}).get("finishedAt") for one in statuses]
        if self._clock.scale == 1 and ends and all(ends):
            return max(datetime.fromisoformat(end) for end in ends)
        return self._ended.setdefault(uid, now)

    def _recent(self, sync: _Sync) -> list[datetime]:
        return self._failures[sync.job["metadata"]["uid"]] + sync.new_failures

    def _wait(self, ends: list[datetime]) -> float:
        """Seconds of the cluster's time until a pod may be made after the failures in a row."""
        if not ends:
            return 0.0
        delay = min(_BACKOFF * 2 ** (len(ends) - 1), _BACKOFF_MAX)
        gone = (self._clock.now() - max(ends)).total_seconds() * self._clock.scale
        return delay - gone

    def _history(self, sync: _Sync, index: int) -> tuple[Object, float]:
        """Failure counts for the next pod of an index, and how long it has to wait."""
        old = [pod for pod in sync.pods if _index(pod) == index and _tracked(pod) and _is_failed(pod, sync.job)]
        if not old:
            return {_FAILURES: "0"}, 0.0
        last = max(old, key=lambda pod: int(pod["metadata"]["annotations"].get(_FAILURES, 0)))
        notes = last["metadata"]["annotations"]
        failures, ignored = int(notes.get(_FAILURES, 0)), int(notes.get(_IGNORED, 0))
        if match_policy(sync.job, last)[0] == "Ignore":
            ignored += 1
        else:
            failures += 1
        ends = [self._ended_at(last)] * (failures + ignored)
        counts = {_FAILURES: str(failures), **({_IGNORED: str(ignored)} if ignored else {})}
        return counts, self._wait(ends)

    def _new_pod(self, sync: _Sync, index: int | None, counts: Object) -> int:
        pod = self._render(sync.job, index, counts)
        try:
            made = self._store.create("pods", self._admit(pod))
        except ApiError as error:
            self._event(sync.job, "Warning", "FailedCreate", f"Error creating: {error.body['message']}")
            key = (sync.job["metadata"]["namespace"], sync.job["metadata"]["name"])
            self._enqueue(key, _BACKOFF)
            return 0
        self._event(sync.job, "Normal", "SuccessfulCreate", f"Created pod: {made['metadata']['name']}")
        sync.created = True
        return 1

    def _render(self, job: Object, index: int | None, counts: Object) -> Object:
        meta, template = job["metadata"], copy.deepcopy(job["spec"]["template"])
        prefix = f"{meta['name']}-" if index is None else f"{meta['name']}-{index}-"
        labels = {**template.get("metadata", {}).get("labels", {})}
        notes = {**template.get("metadata", {}).get("annotations", {}), **counts}
        spec = template["spec"]
        if index is not None:
            labels[INDEX] = notes[INDEX] = str(index)
            source = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{INDEX}']"}}
            for container in spec["containers"] + spec.get("initContainers", []):
                if all(one["name"] != "JOB_COMPLETION_INDEX" for one in container.get("env", ())):
                    container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": source})
            spec["hostname"] = f"{meta['name']}-{index}"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
        made = {"name": prefix + random_suffix(), "generateName": prefix, "namespace": meta["namespace"]}
        made |= {"labels": labels, "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}]}
        made |= {"annotations": notes} if notes else {}
        finalizers = [*template.get("metadata", {}).get("finalizers", []), TRACKING]
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {**made, "finalizers": finalizers}, "spec": spec}

    def _mark_suspension(self, sync: _Sync) -> None:
        conditions = sync.status.get("conditions", [])
        place = next((i for i, one in enumerate(conditions) if one["type"] == "Suspended"), None)
        held = place is not None and conditions[place]["status"] == "True"
        if sync.spec.get("suspend"):
            if held:
                return
            new = self._condition("Suspended", "JobSuspended", "Job suspended")
            sync.events.append(("Normal", "Suspended", "Job suspended"))
            sync.status.pop("startTime", None)
        elif held:
            new = self._condition("Suspended", "JobResumed", "Job resumed", "False")
            sync.events.append(("Normal", "Resumed", "Job resumed"))
            sync.status["startTime"] = stamp(self._clock.now())
        else:
            return
        if place is None:
            sync.status["conditions"] = [*conditions, new]
        else:
            conditions[place] = new

    def _complete(self, sync: _Sync, active: int) -> bool:
        total = sync.spec.get("completions")
        if total is None:
            return sync.succeeded > 0 and active == 0
        return sync.succeeded >= total and active == 0

    def _counts(self, sync: _Sync, active: int) -> None:
        if active:
            sync.status["active"] = active
        else:
            sync.status.pop("active", None)
        sync.status.update({"terminating": sync.terminating, "ready": max(sync.ready, 0)})
        sync.uncounted.setdefault("failed", [])
        sync.uncounted.setdefault("succeeded", [])

    def _track(self, sync: _Sync) -> None:
        """Store the counts, then take finalizers off, then clear what is counted, then end the Job."""
        loose = [pod for pod in sync.pods if _tracked(pod) and self._note(sync, pod)]
        if sync.indexed:
            text = indexes_text(sync.succeeded_indexes)
            if text:
                sync.status.update({"succeeded": len(sync.succeeded_indexes), "completedIndexes": text})
            if "backoffLimitPerIndex" in sync.spec:
                sync.status["failedIndexes"] = indexes_text(sync.failed_indexes)
        if sync.end is not None and condition(sync.job, sync.end["type"]) is None:
            sync.status["conditions"] = [*sync.status.get("conditions", []), sync.end]
        self._write(sync)
        self._failures[sync.job["metadata"]["uid"]] += sync.new_failures
        for event in sync.events:
            self._event(sync.job, *event)
        for pod in loose:
            self._untrack(pod)
        for kind in ("succeeded", "failed"):
            if sync.uncounted[kind]:
                sync.status[kind] = sync.status.get(kind, 0) + len(sync.uncounted[kind])
                sync.uncounted[kind] = []
        ended = self._enact(sync)
        self._write(sync)
        if ended is not None:
            good = ended["type"] == "Complete"
            words = "Job completed" if good else ended["message"]
            self._event(sync.job, "Normal" if good else "Warning", "Completed" if good else ended["reason"], words)

    def _note(self, sync: _Sync, pod: Object) -> bool:
        """Count a pod that is over; whether its finalizer may go."""
        uid, failed = pod["metadata"]["uid"], _is_failed(pod, sync.job)
        if _phase(pod) == "Succeeded":
            if not sync.indexed and uid not in sync.uncounted["succeeded"]:
                sync.uncounted["succeeded"].append(uid)
            return True
        if failed and "backoffLimitPerIndex" in sync.spec and sync.end is None and not self._replaced(sync, pod):
            return False
        if not failed and sync.end is None:
            return False
        if failed or (sync.end is not None and sync.end["type"] == "FailureTarget"):
            ignored = match_policy(sync.job, pod)[0] == "Ignore"
            if not ignored and uid not in sync.uncounted["failed"]:
                sync.uncounted["failed"].append(uid)
        return True

    def _replaced(self, sync: _Sync, pod: Object) -> bool:
        """Whether a failed pod of an index is done with: its counts live on in a newer pod, or the index is out."""
        index = _index(pod)
        if index in sync.failed_indexes or index in sync.succeeded_indexes:
            return True
        count = int(pod["metadata"]["annotations"].get(_FAILURES, 0))
        current = self._store.list("pods", sync.job["metadata"]["namespace"])
        owned = [one for one in current if (controller_of(one) or {}).get("uid") == sync.job["metadata"]["uid"]]
        return any(
            _index(one) == index and int(one["metadata"]["annotations"].get(_FAILURES, 0)) > count for one in owned
        )

    def _enact(self, sync: _Sync) -> Object | None:
        """The terminal condition, once nothing is left to count or to end."""
        suspended = sync.spec.get("suspend", False)
        if sync.end is None or sync.terminating or (suspended and sync.end["type"] == "FailureTarget"):
            return None
        kind = "Complete" if sync.end["type"] == "SuccessCriteriaMet" else "Failed"
        end = self._condition(kind, sync.end["reason"], sync.end["message"])
        sync.status["conditions"] = [*sync.status["conditions"], end]
        if kind == "Complete":
            sync.status["completionTime"] = end["lastTransitionTime"]
        return end

    def _write(self, sync: _Sync) -> None:
        shown = copy.deepcopy(sync.job)
        kept = {key: value for key, value in sync.uncounted.items() if value}
        shown["status"]["uncountedTerminatedPods"] = kept
        stored = self._store.update("jobs", shown, status=True)
        sync.job["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]

    def _event(self, job: Object, type_: str, reason: str, message: str) -> None:
        self._store.record_event(job, type_, reason, message, "job-controller")

    def _expire(self, job: Object) -> None:
        """Delete an ended Job when its time to live is over."""
        meta, ttl = job["metadata"], job["spec"].get("ttlSecondsAfterFinished")
        for pod in self._store.list("pods", meta["namespace"]):
            owner = controller_of(pod)
            if owner is not None and owner["uid"] == meta["uid"] and _tracked(pod):
                self._untrack(pod)
        if ttl is None or "deletionTimestamp" in meta:
            return
        end = condition(job, "Complete") or condition(job, "Failed") or {}
        left = ttl - (self._clock.now() - datetime.fromisoformat(end["lastTransitionTime"])).total_seconds()
        if left > 0:
            key = (meta["namespace"], meta["name"])
            asyncio.get_running_loop().call_later(left + 0.01, self._enqueue, key, 0.0)
            return
        with contextlib.suppress(ApiError):
            self._store.delete("jobs", meta["namespace"], meta["name"], propagation="Foreground", uid=meta["uid"])


_REACHED = "Reached expected number of succeeded pods"


async def run(store: Store, admit: Callable[[Object], Object]) -> None:
    """Run the Job controller."""
    await JobController(store, admit).run()
