"""Kueue in small: its Job webhook, queues with quota, Workloads with their conditions, preemption within a queue.

Flavors of one cohort, borrowing, admission checks, topology and partial admission are not modelled. Words, reasons
and the order of conditions are those of the recorded exchanges (Kueue after 0.19.2, v1beta2).
"""

import asyncio
import copy
import hashlib
import math
from collections.abc import Callable
from datetime import datetime
from fractions import Fraction
from typing import TYPE_CHECKING

from tests.cluster.double.jobs import condition, controller_of, finished
from tests.cluster.double.quantity import number, text
from tests.cluster.double.scheduler import requests_of
from tests.cluster.double.store import ApiError, Object, Store, failure, stamp

if TYPE_CHECKING:
    from tests.cluster.double.controllers import FaultSource

_GROUP = "kueue.x-k8s.io"
_QUEUE, _CLASS = f"{_GROUP}/queue-name", f"{_GROUP}/priority-class"
_STOPPING, _NOTE, _IN_USE = f"{_GROUP}/stopping", f"{_GROUP}/workload", f"{_GROUP}/resource-in-use"
_MARKS = (f"{_GROUP}/cluster-queue-name", f"{_GROUP}/local-queue-name", f"{_GROUP}/podset")
_JOBS = "batch/job-kueue-controller"
_ADMISSION = "kueue-admission"
_ORDER = ("QuotaReserved", "Evicted", "Admitted", "Preempted", "Requeued", "Finished", "PodsReady")
_PASS = 0.4
_STEP = 0.03
# Seconds until a Job that was resumed without admission is suspended again: the Job controller is quicker.
_REACTION = 0.025
_WAIT = ("WaitForStart", "Not all pods are ready or succeeded")
_STARTED = ("Started", "All pods reached readiness and the workload is running")
_RECOVER = ("WaitForRecovery", "At least one pod has failed, waiting for recovery")
_KINDS = {"jobs": ("job", "batch-v1-job")}
_KINDS |= {
    plural: (kind, f"kueue-x-k8s-io-v1beta2-{kind}")
    for plural, kind in (
        ("workloads", "workload"),
        ("clusterqueues", "clusterqueue"),
        ("resourceflavors", "resourceflavor"),
    )
}


def admit(
    store: Store, faults: "FaultSource", operation: str, plural: str, obj: Object, old: Object | None = None
) -> Object:
    """Kueue's webhooks.

    Args:
        store: The cluster.
        faults: Whether the webhooks answer.
        operation: `CREATE` or `UPDATE`; deletions are not asked about.
        plural: Kind of the object.
        obj: The object of the request.
        old: What it replaces.

    Returns:
        The object as it is to be stored.

    Raises:
        ApiError: 500 when the webhooks are down, 403 for what they deny.
    """
    if (plural not in _KINDS and plural != "localqueues") or operation not in ("CREATE", "UPDATE"):
        return obj
    if faults.kueue_webhook() == "down" and plural in _KINDS:
        raise _down(operation, *_KINDS[plural])
    obj = copy.deepcopy(obj)
    if plural == "jobs":
        return _admit_job(operation, obj, old)
    if operation == "CREATE":
        _default(plural, obj)
    return obj


def _down(operation: str, kind: str, path: str) -> ApiError:
    letter, verb = ("m", "mutate") if operation == "CREATE" else ("v", "validate")
    url = f"https://kueue-webhook-service.kueue-system.svc:443/{verb}-{path}?timeout=10s"
    why = f'failed calling webhook "{letter}{kind}.kb.io": failed to call webhook: Post "{url}"'
    why = f"{why}: dial tcp 10.96.0.50:443: connect: connection refused"
    return failure(500, "InternalError", f"Internal error occurred: {why}", {"causes": [{"message": why}]})


def _admit_job(operation: str, job: Object, old: Object | None) -> Object:
    queue = job["metadata"].get("labels", {}).get(_QUEUE)
    if operation == "CREATE":
        if queue:
            job["spec"]["suspend"] = True
        return job
    before = (old or {}).get("metadata", {}).get("labels", {}).get(_QUEUE)
    if queue != before and not (old or {})["spec"].get("suspend"):
        value = f'"{queue}"' if queue else '""'
        why = f"metadata.labels[{_QUEUE}]: Invalid value: {value}: field is immutable"
        raise failure(403, "Forbidden", f'admission webhook "vjob.kb.io" denied the request: {why}')
    return job


def _default(plural: str, obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    if plural in ("clusterqueues", "resourceflavors"):
        finalizers = obj["metadata"].setdefault("finalizers", [])
        if _IN_USE not in finalizers:
            finalizers.append(_IN_USE)
    if plural in ("clusterqueues", "localqueues"):
        spec.setdefault("stopPolicy", "None")
    if plural == "clusterqueues":
        spec["flavorFungibility"] = {"whenCanBorrow": "MayStopSearch", "whenCanPreempt": "TryNextFlavor"} | spec.get(
            "flavorFungibility", {}
        )
        preemption = spec.setdefault("preemption", {})
        preemption.setdefault("borrowWithinCohort", {"policy": "Never"})
        preemption.setdefault("reclaimWithinCohort", "Never")
        preemption.setdefault("withinClusterQueue", "Never")
        spec.setdefault("queueingStrategy", "BestEffortFIFO")


def _set(status: Object, now: str, generation: int, kind: str, holds: bool, reason: str, message: str) -> None:
    conditions = status.setdefault("conditions", [])
    old = next((one for one in conditions if one["type"] == kind), None)
    state = "True" if holds else "False"
    since = old["lastTransitionTime"] if old and old["status"] == state else now
    new = {"type": kind, "status": state, "reason": reason, "message": message}
    new |= {"lastTransitionTime": since, "observedGeneration": generation}
    if old is None:
        conditions.append(new)
    else:
        conditions[conditions.index(old)] = new


def _sort(status: Object) -> None:
    status["conditions"].sort(key=lambda one: _ORDER.index(one["type"]))


def _usage(workload: Object) -> dict[str, Fraction]:
    total: dict[str, Fraction] = {}
    for pods in workload["spec"]["podSets"]:
        for name, value in requests_of(pods["template"]["spec"]).items():
            if name != "pods":
                total[name] = total.get(name, Fraction(0)) + value * pods["count"]
    return total


def _words(usage: dict[str, Fraction]) -> Object:
    return {name: text(value, name) for name, value in usage.items()}


class Kueue:
    """The controllers of Kueue."""

    def __init__(self, store: Store, faults: "FaultSource") -> None:
        """Work on `store`; nothing happens while `faults` says that Kueue is down."""
        self._store, self._clock, self._faults = store, store.clock, faults
        self._told: dict[str, str] = {}
        self._queued: dict[str, datetime] = {}

    async def run(self) -> None:
        """Follow Jobs, Workloads and queues."""
        changes = self._store.subscribe()
        follow = asyncio.create_task(self._schedule_again_and_again())
        try:
            while True:
                plural, kind, obj = await changes.get()
                if self._faults.kueue_webhook() == "up" and kind != "DELETED":
                    if plural == "jobs" and not obj["spec"].get("suspend"):
                        await asyncio.sleep(_REACTION)
                        self._guard(obj)
                    elif plural == "workloads" and "deletionTimestamp" in obj["metadata"]:
                        self._let_go(obj)
        finally:
            follow.cancel()

    async def _schedule_again_and_again(self) -> None:
        seen = -1
        while True:
            await asyncio.sleep(max(_PASS / self._clock.scale, _STEP))
            if self._faults.kueue_webhook() == "up" and self._store.version != seen:
                # What a pass itself writes is looked at by the next one.
                before = self._store.version
                try:
                    await self._pass()
                except ApiError as error:
                    if error.status not in (404, 409):
                        raise
                seen = before if self._settled() else -1

    def _settled(self) -> bool:
        return not any(one["metadata"].get("annotations", {}).get(_STOPPING) for one in self._store.peek("jobs"))

    def _now(self) -> str:
        return stamp(self._clock.now())

    def _guard(self, job: Object) -> None:
        """A Job that somebody resumed without admission is suspended again, at once."""
        meta = job["metadata"]
        if not meta.get("labels", {}).get(_QUEUE) or job["spec"].get("suspend") or finished(job):
            return
        workload, now = self._workload(meta["uid"]), self._store.get("jobs", meta["namespace"], meta["name"])
        admitted = workload is not None and condition(workload, "Admitted")
        if admitted or now is None or now["metadata"]["uid"] != meta["uid"] or now["spec"].get("suspend"):
            return
        self._suspend(meta["namespace"], meta["name"])
        fresh = self._store.get("jobs", meta["namespace"], meta["name"])
        if fresh is not None:
            self._restore(fresh)
            self._event(fresh, "Normal", "Stopped", "Not admitted by cluster queue", _JOBS)

    def _suspend(self, namespace: str, name: str) -> None:
        job = self._store.get("jobs", namespace, name)
        if job is not None and not job["spec"].get("suspend"):
            job["spec"]["suspend"] = True
            job["metadata"].setdefault("annotations", {})[_STOPPING] = "true"
            job = self._store.update("jobs", job)

    def _restore(self, job: Object) -> None:
        job["metadata"].get("annotations", {}).pop(_STOPPING, None)
        template = job["spec"]["template"].get("metadata", {})
        for part, names in (("annotations", (_NOTE,)), ("labels", _MARKS)):
            for name in names:
                template.get(part, {}).pop(name, None)
            if not template.get(part, True):
                del template[part]
        self._store.update("jobs", job)

    def _let_go(self, workload: Object) -> None:
        meta = workload["metadata"]
        found = self._store.get("workloads", meta["namespace"], meta["name"])
        if found is not None and _IN_USE in found["metadata"].get("finalizers", ()):
            found["metadata"]["finalizers"].remove(_IN_USE)
            self._store.update("workloads", found)

    def _workload(self, uid: str) -> Object | None:
        for one in self._store.list("workloads"):
            owner = controller_of(one)
            if owner is not None and owner["uid"] == uid:
                return one
        return None

    async def _pass(self) -> None:
        for job in self._store.list("jobs"):
            if job["metadata"].get("labels", {}).get(_QUEUE) and "deletionTimestamp" not in job["metadata"]:
                self._job(job)
        await asyncio.sleep(_STEP / 3)
        pending = [one for one in self._store.list("workloads") if self._pending(one)]
        pending.sort(key=lambda one: (-one["spec"].get("priority", 0), int(self._queue_order(one))))
        blocked: set[str] = set()
        for workload in pending:
            self._evaluate(workload, blocked)
        for workload in self._store.list("workloads"):
            if "deletionTimestamp" in workload["metadata"]:
                self._let_go(workload)
        self._queues()

    def _queue_order(self, workload: Object) -> float:
        return datetime.fromisoformat(workload["metadata"]["creationTimestamp"]).timestamp()

    def _pending(self, workload: Object) -> bool:
        ended = condition(workload, "Finished") or condition(workload, "QuotaReserved")
        return not ended and "deletionTimestamp" not in workload["metadata"]

    def _job(self, job: Object) -> None:
        """Bring a Job and its Workload together."""
        workload = self._workload(job["metadata"]["uid"])
        if workload is None:
            # Kueue comes after the Job controller has seen a new Job.
            if not finished(job) and job.get("status", {}).get("conditions"):
                self._new_workload(job)
            return
        if not finished(job):
            self._pods_ready(job, workload)
        self._reclaim(job, workload)
        if finished(job):
            self._finish(job, workload)
        elif condition(workload, "Evicted") or workload["spec"].get("active") is False:
            self._stop(job, workload)
        elif condition(workload, "Admitted") and job["spec"].get("suspend"):
            self._start(job, workload)

    def _new_workload(self, job: Object) -> None:
        meta, spec = job["metadata"], job["spec"]
        priority = self._priority(job)
        if priority is None:
            return
        template = copy.deepcopy(spec["template"])
        labels = template.get("metadata", {}).get("labels", {})
        kept = {k: v for k, v in labels.items() if "controller-uid" not in k and k not in ("job-name", *_MARKS)}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
        digest = hashlib.sha1(f"{meta['name']}{meta['uid']}".encode()).hexdigest()[:5]
        pods = {"name": "main", "count": spec.get("parallelism", 1)}
        pods["template"] = {"metadata": {"labels": kept} if kept else {}, "spec": template["spec"]}
        if spec.get("completionMode") == "Indexed":
            pods["topologyRequest"] = {"podIndexLabel": "batch.kubernetes.io/job-completion-index"}
        made = self._store.create(
            "workloads",
            {
                "metadata": {
                    "name": f"job-{meta['name'][:50]}-{digest}",
                    "namespace": meta["namespace"],
                    "labels": {f"{_GROUP}/job-uid": meta["uid"]},
                    "finalizers": [_IN_USE],
                    "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
                },
                "spec": {"active": True, "podSets": [pods], "queueName": meta["labels"][_QUEUE], **priority},
            },
        )
        self._queued[made["metadata"]["uid"]] = self._clock.now()
        words = f"Created Workload: {meta['namespace']}/{made['metadata']['name']}"
        self._event(job, "Normal", "CreatedWorkload", words, _JOBS)
        self._write(made, lambda status: self._condition(made, status, "PodsReady", False, *_WAIT))

    def _priority(self, job: Object) -> Object | None:
        """`priority` and its source for a Workload; None when the class does not exist."""
        name = job["metadata"]["labels"].get(_CLASS)
        if name:
            found, group, kind = self._store.get("workloadpriorityclasses", "", name), _GROUP, "WorkloadPriorityClass"
            if found is None:
                words = f'WorkloadPriorityClass "{name}" not found'
                if self._told.get(job["metadata"]["uid"]) != words:
                    self._told[job["metadata"]["uid"]] = words
                    self._event(job, "Warning", "WorkloadPriorityClassNotFound", words, _JOBS)
                return None
        else:
            name = job["spec"]["template"]["spec"].get("priorityClassName")
            found = self._store.get("priorityclasses", "", name) if name else None
            group, kind = "scheduling.k8s.io", "PriorityClass"
            if found is None:
                return {"priority": 0}
        return {"priority": found["value"], "priorityClassRef": {"group": group, "kind": kind, "name": name}}

    def _condition(self, workload: Object, status: Object, kind: str, holds: bool, reason: str, message: str) -> None:
        _set(status, self._now(), workload["metadata"].get("generation", 1), kind, holds, reason, message)

    def _write(self, workload: Object, change: Callable[[Object], None], sort: bool = False) -> Object:
        meta = workload["metadata"]
        found = self._store.get("workloads", meta["namespace"], meta["name"])
        if found is None:
            return workload
        change(found.setdefault("status", {}))
        if sort:
            _sort(found["status"])
        stored = self._store.update("workloads", found, status=True)
        workload["status"] = stored.get("status", {})
        return stored

    def _pods_ready(self, job: Object, workload: Object) -> None:
        status = job.get("status", {})
        if status.get("succeeded", 0) and condition(job, "SuccessCriteriaMet"):
            return
        old = next(
            (one for one in workload.get("status", {}).get("conditions", ()) if one["type"] == "PodsReady"), None
        )
        enough = status.get("ready", 0) + status.get("succeeded", 0) >= job["spec"].get("parallelism", 1)
        was = old is not None and old["reason"] != "WaitForStart"
        words = _WAIT
        if not job["spec"].get("suspend") and condition(workload, "Admitted"):
            words = _STARTED if enough else _RECOVER if was else _WAIT
        elif was and (status.get("active") or status.get("terminating")):
            words = _RECOVER
        if old is None or old["reason"] != words[0]:
            ready = words is _STARTED
            self._write(workload, lambda new: self._condition(workload, new, "PodsReady", ready, *words))

    def _reclaim(self, job: Object, workload: Object) -> None:
        count = job.get("status", {}).get("succeeded", 0)
        wanted = [{"name": "main", "count": count}] if count else []
        if wanted and workload.get("status", {}).get("reclaimablePods", []) != wanted:
            self._write(workload, lambda status: status.update(reclaimablePods=wanted))

    def _finish(self, job: Object, workload: Object) -> None:
        if condition(workload, "Finished"):
            self._let_go(workload)
            return
        good = condition(job, "Complete")
        end = good or condition(job, "Failed") or {}
        reason = "Succeeded" if good else "Failed"
        self._write(
            workload, lambda s: self._condition(workload, s, "Finished", True, reason, end["message"]), sort=True
        )
        meta = workload["metadata"]
        words = f"Workload '{meta['namespace']}/{meta['name']}' is declared finished"
        self._event(job, "Normal", "FinishedWorkload", words, _JOBS)
        self._let_go(workload)

    def _stop(self, job: Object, workload: Object) -> None:
        """Suspend the Job of an evicted Workload; when its pods are on their way out, give the quota back."""
        meta = job["metadata"]
        if not job["spec"].get("suspend"):
            self._suspend(meta["namespace"], meta["name"])
            fresh = self._store.get("jobs", meta["namespace"], meta["name"])
            if fresh is not None and fresh.get("status", {}).pop("startTime", None):
                self._store.update("jobs", fresh, status=True)
            return
        if job.get("status", {}).get("active") or not condition(workload, "QuotaReserved"):
            return
        evicted = condition(workload, "Evicted") or {}
        self._restore(job)
        self._event(job, "Normal", "Stopped", evicted.get("message", ""), _JOBS)
        self._write(workload, lambda status: self._unreserve(workload, status, evicted), sort=True)
        self._queued[workload["metadata"]["uid"]] = self._clock.now()

    def _unreserve(self, workload: Object, status: Object, evicted: Object) -> None:
        admitted = condition(workload, "Admitted")
        if admitted:
            ran = self._clock.now() - datetime.fromisoformat(admitted["lastTransitionTime"])
            status["accumulatedPastExecutionTimeSeconds"] = int(ran.total_seconds())
        status.pop("admission", None)
        again = evicted.get("reason") == "Preempted"
        reason = "PendingEvaluation" if again else "Deactivated"
        self._condition(workload, status, "QuotaReserved", False, reason, evicted.get("message", ""))
        self._condition(workload, status, "Admitted", False, "NoReservation", "The workload has no reservation")
        if again:
            self._condition(workload, status, "Requeued", True, "Preempted", evicted.get("message", ""))

    def _start(self, job: Object, workload: Object) -> None:
        template = job["spec"]["template"].setdefault("metadata", {})
        template.setdefault("annotations", {})[_NOTE] = workload["metadata"]["name"]
        queue, admission = workload["spec"]["queueName"], workload["status"]["admission"]
        values = (admission["clusterQueue"], queue, admission["podSetAssignments"][0]["name"])
        template.setdefault("labels", {}).update(zip(_MARKS, values, strict=True))
        for name in self._flavors(workload):
            flavor = self._store.get("resourceflavors", "", name) or {}
            if flavor.get("spec", {}).get("nodeLabels"):
                job["spec"]["template"]["spec"].setdefault("nodeSelector", {}).update(flavor["spec"]["nodeLabels"])
        job["spec"]["suspend"] = False
        self._store.update("jobs", job)

    def _flavors(self, workload: Object) -> set[str]:
        sets = workload.get("status", {}).get("admission", {}).get("podSetAssignments", ())
        return {flavor for one in sets for flavor in one["flavors"].values()}

    def _evaluate(self, workload: Object, blocked: set[str]) -> None:
        """Admit a Workload, or say why it has to wait."""
        spec, namespace = workload["spec"], workload["metadata"]["namespace"]
        if spec.get("active") is False:
            self._deactivate(workload)
            return
        local = self._store.get("localqueues", namespace, spec["queueName"])
        if local is None:
            self._refuse(workload, "Misconfigured", f"LocalQueue {spec['queueName']} doesn't exist")
            return
        name = local["spec"]["clusterQueue"]
        queue = self._store.get("clusterqueues", "", name)
        if queue is None:
            self._refuse(workload, "Misconfigured", f"ClusterQueue {name} doesn't exist")
            return
        for kind, one in (("LocalQueue", local), ("ClusterQueue", queue)):
            if one["spec"].get("stopPolicy", "None") != "None":
                self._refuse(workload, "Suspended", f"{kind} {one['metadata']['name']} is stopped")
                return
        waits = name in blocked or not self._try(workload, queue)
        if waits and queue["spec"].get("queueingStrategy") == "StrictFIFO":
            blocked.add(name)

    def _try(self, workload: Object, queue: Object) -> bool:
        usage, assigned = _usage(workload), {}
        covered = {res for group in queue["spec"].get("resourceGroups", ()) for res in group["coveredResources"]}
        for resource in usage:
            if resource not in covered and resource.startswith(("cpu", "memory", "nvidia.com", "ephemeral")):
                self._wait_for(workload, "ExceedsMaxQuota", [f"resource {resource} unavailable in ClusterQueue"], usage)
                return False
        large, short = [], []
        for group in queue["spec"].get("resourceGroups", ()):
            for flavor in group["flavors"]:
                quotas = {one["name"]: number(one["nominalQuota"]) for one in flavor["resources"]}
                here = {name: value for name, value in usage.items() if name in quotas}
                where = f"in flavor {flavor['name']}"
                before = self._used(queue, flavor["name"])
                much = [
                    f"insufficient quota for {name} {where}, previously considered podsets requests (0) + current"
                    f" podset request ({text(value, name)}) > maximum capacity ({text(quotas[name], name)})"
                    for name, value in sorted(here.items())
                    if value > quotas[name]
                ]
                more = [
                    f"insufficient unused quota for {name} {where},"
                    f" {text(value + before.get(name, Fraction(0)) - quotas[name], name)} more needed"
                    for name, value in sorted(here.items())
                    if not much and value + before.get(name, Fraction(0)) > quotas[name]
                ]
                if not much and not more:
                    assigned |= dict.fromkeys(here, flavor["name"])
                    break
                large, short = large + much, short + more
        if set(usage) & covered <= set(assigned):
            self._admit(workload, queue, assigned)
            return True
        if short:
            self._preempt_or_wait(workload, queue, short, usage)
        else:
            self._wait_for(workload, "ExceedsMaxQuota", large, usage)
        return False

    def _reserving(self, queue: Object) -> list[Object]:
        name = queue["metadata"]["name"]
        return [
            one
            for one in self._store.list("workloads")
            if one.get("status", {}).get("admission", {}).get("clusterQueue") == name and not condition(one, "Finished")
        ]

    def _used(self, queue: Object, flavor: str, without: list[str] | None = None) -> dict[str, Fraction]:
        used: dict[str, Fraction] = {}
        for one in self._reserving(queue):
            if one["metadata"]["uid"] in (without or ()):
                continue
            for pods in one["status"]["admission"]["podSetAssignments"]:
                back = sum(r["count"] for r in one["status"].get("reclaimablePods", ()) if r["name"] == pods["name"])
                left = Fraction(max(pods["count"] - back, 0), pods["count"] or 1)
                for name, value in pods["resourceUsage"].items():
                    if pods["flavors"].get(name) == flavor:
                        used[name] = used.get(name, Fraction(0)) + number(value) * left
        return used

    def _preempt_or_wait(self, workload: Object, queue: Object, short: list[str], usage: dict[str, Fraction]) -> None:
        victims = self._victims(workload, queue, usage)
        if not victims:
            self._wait_for(workload, "WaitingForQuota", short, usage)
            return
        for victim in victims:
            if not condition(victim, "Evicted"):
                self._evict(workload, victim, queue)
        pending = f". Pending the preemption of {len(victims)} workload(s)"
        self._wait_for(workload, "WaitingForPreemptedWorkloads", short, usage, pending)

    def _victims(self, workload: Object, queue: Object, usage: dict[str, Fraction]) -> list[Object]:
        policy, own = queue["spec"]["preemption"]["withinClusterQueue"], workload["spec"].get("priority", 0)
        lower = [one for one in self._reserving(queue) if one["spec"].get("priority", 0) < own]
        if policy == "LowerOrNewerEqualPriority":
            born = workload["metadata"]["creationTimestamp"]
            same = [one for one in self._reserving(queue) if one["spec"].get("priority", 0) == own]
            lower += [one for one in same if one["metadata"]["creationTimestamp"] > born]
        if policy == "Never":
            return []
        lower.sort(key=lambda one: (not condition(one, "Evicted"), one["spec"].get("priority", 0)))
        for count in range(1, len(lower) + 1):
            gone = [one["metadata"]["uid"] for one in lower[:count]]
            if self._fits_without(queue, usage, gone):
                return lower[:count]
        return []

    def _fits_without(self, queue: Object, usage: dict[str, Fraction], gone: list[str]) -> bool:
        for group in queue["spec"].get("resourceGroups", ()):
            wanted = {name: value for name, value in usage.items() if name in group["coveredResources"]}
            for flavor in group["flavors"]:
                used = self._used(queue, flavor["name"], gone)
                quotas = {one["name"]: number(one["nominalQuota"]) for one in flavor["resources"]}
                if all(value + used.get(name, Fraction(0)) <= quotas[name] for name, value in wanted.items()):
                    break
            else:
                return False
        return True

    def _evict(self, preemptor: Object, victim: Object, queue: Object) -> None:
        name, meta = queue["metadata"]["name"], preemptor["metadata"]
        owner = controller_of(preemptor) or {"uid": ""}
        ids = f"UID: {meta['uid']}, JobUID: {owner['uid']}"
        message = f"Preempted to accommodate a workload ({ids}) due to prioritization in the ClusterQueue"
        message = f"{message}; preemptor path: /{name}; preemptee path: /{name}"

        def change(status: Object) -> None:
            self._condition(victim, status, "Evicted", True, "Preempted", message)
            self._condition(victim, status, "Preempted", True, "InClusterQueue", message)
            stats = status.setdefault("schedulingStats", {}).setdefault("evictions", [])
            if not stats:
                stats.append({"count": 0, "reason": "Preempted", "underlyingCause": ""})
            stats[0]["count"] += 1

        self._write(victim, change, sort=True)
        high, low = preemptor["spec"].get("priority", 0), victim["spec"].get("priority", 0)
        levels = f"preemptor effective priority: {high} (base: {high}, boost: 0)"
        levels = f"{levels}; preemptee effective priority: {low} (base: {low}, boost: 0)"
        self._event(victim, "Normal", "EvictedDueToPreempted", message, _ADMISSION)
        self._event(victim, "Normal", "Preempted", f"{message}; {levels}", _ADMISSION)
        where = f"{victim['metadata']['namespace']}/{victim['metadata']['name']} (UID: {victim['metadata']['uid']})"
        words = f"Preempted workload {where} in ClusterQueue {name}; {levels}"
        self._event(preemptor, "Normal", "PreemptedWorkload", words, _ADMISSION)

    def _admit(self, workload: Object, queue: Object, flavors: dict[str, str]) -> None:
        name, meta = queue["metadata"]["name"], workload["metadata"]
        had = any(one["type"] == "QuotaReserved" for one in workload.get("status", {}).get("conditions", ()))
        usage = _words({key: value for key, value in _usage(workload).items() if key in flavors})
        pods = workload["spec"]["podSets"][0]
        assignment = {"name": pods["name"], "count": pods["count"], "flavors": flavors, "resourceUsage": usage}

        def change(status: Object) -> None:
            status.pop("resourceRequests", None)
            status["admission"] = {"clusterQueue": name, "podSetAssignments": [assignment]}
            words = f"Quota reserved in ClusterQueue {name}"
            self._condition(workload, status, "QuotaReserved", True, "QuotaReserved", words)
            self._condition(workload, status, "Admitted", True, "Admitted", "The workload is admitted")
            for kind in ("Evicted", "Preempted"):
                old = condition(workload, kind)
                if old:
                    self._condition(workload, status, kind, False, "QuotaReserved", f"Previously: {old['message']}")

        stored = self._write(workload, change, sort=had)
        waited = self._clock.now() - self._queued.get(meta["uid"], self._clock.now())
        seconds = math.ceil(waited.total_seconds())
        words = f"Quota reserved in ClusterQueue {name}, wait time since queued was {seconds}s"
        self._event(workload, "Normal", "QuotaReserved", words, _ADMISSION)
        words = f"Admitted by ClusterQueue {name}, wait time since reservation was 0s"
        self._event(workload, "Normal", "Admitted", words, _ADMISSION)
        owner = controller_of(stored)
        job = self._store.get("jobs", meta["namespace"], owner["name"]) if owner else None
        if job is not None and owner is not None and job["metadata"]["uid"] == owner["uid"]:
            self._start(job, stored)

    def _wait_for(
        self, workload: Object, reason: str, why: list[str], usage: dict[str, Fraction], ending: str = ""
    ) -> None:
        message = f"couldn't assign flavors to pod set main: {', '.join(dict.fromkeys(why))}{ending}"
        requests = [{"name": pods["name"], "resources": _words(usage)} for pods in workload["spec"]["podSets"]]
        if self._refuse(workload, reason, message, requests):
            self._event(workload, "Warning", reason, message, _ADMISSION)

    def _refuse(self, workload: Object, reason: str, message: str, requests: list[Object] | None = None) -> bool:
        """Say why a Workload has no quota; whether that is new."""
        conditions = workload.get("status", {}).get("conditions", ())
        old = next((one for one in conditions if one["type"] == "QuotaReserved"), {})
        if (old.get("reason"), old.get("message")) == (reason, message):
            return False

        def change(status: Object) -> None:
            self._condition(workload, status, "QuotaReserved", False, reason, message)
            self._condition(workload, status, "Admitted", False, "NoReservation", "The workload has no reservation")
            if requests:
                status["resourceRequests"] = requests

        self._write(workload, change, sort=reason == "Misconfigured")
        return True

    def _deactivate(self, workload: Object) -> None:
        words = "The workload is deactivated"
        if self._refuse(workload, "Deactivated", words):
            self._event(workload, "Normal", "EvictedDueToDeactivated", words, _ADMISSION)

    def _queues(self) -> None:
        """The status of every queue."""
        for queue in self._store.list("clusterqueues"):
            name = queue["metadata"]["name"]
            locals_ = [one for one in self._store.list("localqueues") if one["spec"]["clusterQueue"] == name]
            mine = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in locals_}
            self._queue_status("clusterqueues", queue, queue, mine, "Can admit new workloads")
            for local in locals_:
                own = {(local["metadata"]["namespace"], local["metadata"]["name"])}
                self._queue_status("localqueues", local, queue, own, "Can submit new workloads to localQueue")

    def _queue_status(self, plural: str, obj: Object, queue: Object, own: set[tuple[str, str]], words: str) -> None:
        works = [one for one in self._store.list("workloads") if not condition(one, "Finished")]
        works = [one for one in works if (one["metadata"]["namespace"], one["spec"]["queueName"]) in own]
        reserving = [one for one in works if condition(one, "QuotaReserved")]
        usage = []
        for group in queue["spec"].get("resourceGroups", ()):
            for flavor in group["flavors"]:
                totals = []
                for resource in flavor["resources"]:
                    total = sum((self._of(one, flavor["name"], resource["name"]) for one in reserving), Fraction(0))
                    row = {"name": resource["name"], "total": text(total, resource["name"])}
                    totals.append({**row, "borrowed": "0"} if plural == "clusterqueues" else row)
                usage.append({"name": flavor["name"], "resources": totals})
        status = copy.deepcopy(obj.get("status", {}))
        stopped = obj["spec"].get("stopPolicy", "None") != "None"
        ready = (False, "Stopped", "Can't admit new workloads: is stopped.") if stopped else (True, "Ready", words)
        _set(status, self._now(), obj["metadata"].get("generation", 1), "Active", *ready)
        status |= {"pendingWorkloads": len(works) - len(reserving), "reservingWorkloads": len(reserving)}
        status |= {"admittedWorkloads": sum(1 for one in works if condition(one, "Admitted"))}
        status |= {"flavorsReservation": usage, "flavorsUsage": usage}
        if status != obj.get("status"):
            self._store.update(plural, {**obj, "status": status}, status=True)

    def _of(self, workload: Object, flavor: str, resource: str) -> Fraction:
        sets = workload.get("status", {}).get("admission", {}).get("podSetAssignments", ())
        rows = [one for one in sets if one["flavors"].get(resource) == flavor]
        return sum((number(one["resourceUsage"][resource]) for one in rows), Fraction(0))

    def _event(self, about: Object, type_: str, reason: str, message: str, component: str) -> None:
        self._store.record_event(about, type_, reason, message, component, action=reason)


async def run(store: Store, faults: "FaultSource") -> None:
    """Run Kueue."""
    await Kueue(store, faults).run()
