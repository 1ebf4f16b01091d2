"""Nodes: registration, loss and return, eviction by taint, and the collection of pods that no node ends any more.

Sources: `pkg/controller/nodelifecycle`, `tainteviction` and `podgc` of Kubernetes.
"""

import asyncio
from typing import TYPE_CHECKING

from tests.cluster.double.kubelet import Kubelet
from tests.cluster.double.network import Network
from tests.cluster.double.scheduler import disrupt, tolerates
from tests.cluster.double.store import ApiError, Object, Store, stamp

if TYPE_CHECKING:
    from tests.cluster.double.controllers import FaultSource

_GRACE = 50.0
_TICK = 0.05
_COLLECT = 11.0
_UNTAINT = 3.0
_UNREACHABLE = "node.kubernetes.io/unreachable"
_NOT_READY = "node.kubernetes.io/not-ready"
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_CONDITIONS = (
    ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
)
_SILENT = "Kubelet stopped posting node status."
_CAPACITY = {"cpu": "2", "ephemeral-storage": "264212084Ki", "hugepages-1Gi": "0", "hugepages-2Mi": "0"}
_CAPACITY |= {"memory": "24683656Ki", "pods": "110"}
_INFO = {
    **dict.fromkeys(("machineID", "systemUUID", "bootID"), "00000000-0000-4000-8000-000000000000"),
    **{"kernelVersion": "6.18.0", "osImage": "Debian GNU/Linux 12 (bookworm)", "kubeProxyVersion": ""},
    **{"containerRuntimeVersion": "containerd://1.6.20", "kubeletVersion": "v1.36.2"},
    **{"operatingSystem": "linux", "architecture": "amd64"},
}


def node(name: str, address: str, now: str) -> Object:
    """A node as its kubelet registers it."""
    labels = {"beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    labels |= {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    notes = {"node.alpha.kubernetes.io/ttl": "0", "volumes.kubernetes.io/controller-managed-attach-detach": "true"}
    allocatable = {**_CAPACITY, "ephemeral-storage": "267847642337", "memory": "24581256Ki"}
    features = ["ExtendWebSocketsToKubelet", "InPlacePodLevelResourcesVerticalScaling"]
    features += ["InPlacePodVerticalScalingInitContainers", "RestartAllContainersOnContainerExits"]
    addresses = [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}]
    status = {
        "capacity": _CAPACITY,
        "allocatable": allocatable,
        "conditions": [_condition(row, now, now) for row in _CONDITIONS],
        "addresses": addresses,
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        "nodeInfo": _INFO,
        "declaredFeatures": features,
    }
    return {"metadata": {"name": name, "labels": labels, "annotations": notes}, "spec": {}, "status": status}


def _condition(row: tuple[str, str, str, str], heartbeat: str, since: str) -> Object:
    kind, status, reason, message = row
    times = {"lastHeartbeatTime": heartbeat, "lastTransitionTime": since}
    return {"type": kind, "status": status, **times, "reason": reason, "message": message}


class NodeController:
    """Watches the nodes and what is on them."""

    def __init__(self, store: Store, kubelets: dict[str, Kubelet], faults: "FaultSource", network: Network) -> None:
        """Work on `store`; `faults` says which nodes are lost."""
        self._store, self._kubelets, self._faults, self._network = store, kubelets, faults, network
        self._lost: dict[str, float] = {}
        self._back: dict[str, float] = {}
        self._evictions: dict[str, tuple[float, Object]] = {}
        self._tainted: dict[str, list[Object]] = {}

    async def run(self) -> None:
        """Register the nodes, then look at them again and again."""
        now = stamp(self._store.clock.now())
        for name in self._kubelets:
            if self._store.get("nodes", "", name) is None:
                self._store.create("nodes", node(name, self._network.address(name), now))
        loop = asyncio.get_running_loop()
        collected = loop.time()
        while True:
            for name, kubelet in self._kubelets.items():
                await self._obey(name, kubelet, loop.time())
                self._judge(name, kubelet, loop.time())
            self._evict(loop.time())
            if (loop.time() - collected) * self._store.clock.scale >= _COLLECT:
                self._collect()
                collected = loop.time()
            await asyncio.sleep(_TICK)

    async def _obey(self, name: str, kubelet: Kubelet, now: float) -> None:
        """Do to a node what the fault file says."""
        wanted = self._faults.node(name)
        wanted = "partitioned" if wanted == "cut" else wanted
        if wanted == kubelet.state:
            return
        if "partitioned" in (wanted, kubelet.state):
            await self._network.cut(name, wanted == "partitioned")
        kubelet.become(wanted)
        if wanted == "ready":
            self._lost.pop(name, None)
            self._restore(name)
        else:
            self._lost.setdefault(name, now)

    def _judge(self, name: str, kubelet: Kubelet, now: float) -> None:
        found, scale = self._store.get("nodes", "", name), self._store.clock.scale
        if found is None:
            return
        if name in self._lost and (now - self._lost[name]) * scale >= _GRACE:
            if not any(one["status"] == "Unknown" for one in found["status"]["conditions"]):
                self._lose(found)
            elif not _has(found, _UNREACHABLE, "NoExecute"):
                self._taint(found, "NoExecute")
        elif kubelet.state == "ready" and _has(found, _UNREACHABLE):
            back = self._back.setdefault(name, now)
            if _has(found, _UNREACHABLE, "NoSchedule"):
                self._untaint(found, "NoSchedule")
            elif (now - back) * scale >= _UNTAINT:
                self._untaint(found, "NoExecute")
                del self._back[name]

    def _lose(self, found: Object) -> None:
        now = stamp(self._store.clock.now())
        old = {one["type"]: one for one in found["status"]["conditions"]}
        found["status"]["conditions"] = [
            _condition((kind, "Unknown", "NodeStatusUnknown", _SILENT), old[kind]["lastHeartbeatTime"], now)
            for kind, *_ in _CONDITIONS
        ]
        self._taint(self._store.update("nodes", found, status=True), "NoSchedule")
        for pod in self._store.list("pods"):
            if pod["spec"].get("nodeName") == found["metadata"]["name"]:
                self._unready(pod, now)

    def _unready(self, pod: Object, now: str) -> None:
        ready = next((one for one in pod["status"].get("conditions", ()) if one["type"] == "Ready"), None)
        if ready is None or ready["status"] != "True":
            return
        ready |= {"status": "False", "lastTransitionTime": now}
        self._store.update("pods", pod, status=True)
        self._store.record_event(pod, "Warning", "NodeNotReady", "Node is not ready", "node-controller")

    def _restore(self, name: str) -> None:
        found, now = self._store.get("nodes", "", name), stamp(self._store.clock.now())
        if found is None:
            return
        old = {one["type"]: one for one in found["status"]["conditions"]}
        found["status"]["conditions"] = [
            _condition(row, now, old[row[0]]["lastTransitionTime"] if old[row[0]]["status"] == row[1] else now)
            for row in _CONDITIONS
        ]
        self._store.update("nodes", found, status=True)

    def _taint(self, found: Object, effect: str) -> None:
        taints = found["spec"].setdefault("taints", [])
        taints.append({"key": _UNREACHABLE, "effect": effect, "timeAdded": stamp(self._store.clock.now())})
        self._store.update("nodes", found)

    def _untaint(self, found: Object, effect: str) -> None:
        keys = (_UNREACHABLE, _NOT_READY)
        taints = found["spec"].get("taints", [])
        left = [one for one in taints if one["key"] not in keys or one["effect"] != effect]
        if len(left) != len(taints):
            found["spec"]["taints"] = left
            if not left:
                del found["spec"]["taints"]
            self._store.update("nodes", found)

    def _evict(self, now: float) -> None:
        """The taint manager: delete pods from nodes with taints that they do not tolerate (any longer)."""
        fresh = {}
        for found in self._store.peek("nodes"):
            taints = [one for one in found["spec"].get("taints", ()) if one["effect"] == "NoExecute"]
            fresh[found["metadata"]["name"]] = taints
        for pod in self._store.peek("pods"):
            uid, place = pod["metadata"]["uid"], pod["spec"].get("nodeName")
            taints = fresh.get(place or "", [])
            wait = _tolerated_for(pod["spec"].get("tolerations", ()), taints) if taints else None
            if wait is None:
                if uid in self._evictions and not taints:
                    self._cancel(pod)
                continue
            changed = taints != self._tainted.get(place or "", [])
            if uid not in self._evictions:
                self._evictions[uid] = (now, pod)
            due = self._evictions[uid][0] + wait / self._store.clock.scale
            if now >= due and ("deletionTimestamp" not in pod["metadata"] or (changed and not wait)):
                self._delete(pod)
        self._tainted = fresh
        known = {pod["metadata"]["uid"] for pod in self._store.peek("pods")}
        self._evictions = {uid: value for uid, value in self._evictions.items() if uid in known}

    def _cancel(self, pod: Object) -> None:
        del self._evictions[pod["metadata"]["uid"]]
        if "deletionTimestamp" not in pod["metadata"]:
            self._event(pod, "Cancelling deletion of Pod")

    def _delete(self, pod: Object) -> None:
        meta = pod["metadata"]
        self._event(pod, "Marking for deletion Pod")
        if "deletionTimestamp" in meta:
            return
        words = "Taint manager: deleting due to NoExecute taint"
        disrupt(self._store, pod, "DeletionByTaintManager", words)
        self._store.delete("pods", meta["namespace"], meta["name"], uid=meta["uid"])

    def _event(self, pod: Object, words: str) -> None:
        meta = pod["metadata"]
        about: Object = {"kind": "Pod", "apiVersion": "v1"}
        about["metadata"] = {"name": meta["name"], "namespace": meta["namespace"]}
        message = f"{words} {meta['namespace']}/{meta['name']}"
        self._store.record_event(about, "Normal", "TaintManagerEviction", message, "taint-eviction-controller")

    def _collect(self) -> None:
        """PodGC: end pods of nodes that are gone or out of service."""
        nodes = {one["metadata"]["name"]: one for one in self._store.peek("nodes")}
        for pod in self._store.list("pods"):
            place = pod["spec"].get("nodeName")
            if not place:
                continue
            found = nodes.get(place)
            gone = found is None
            out = found is not None and _has(found, _OUT_OF_SERVICE) and not _ready(found)
            if gone or (out and "deletionTimestamp" in pod["metadata"]):
                self._end(pod, "PodGC: node no longer exists" if gone else "PodGC: node is out of service")

    def _end(self, pod: Object, words: str) -> None:
        meta = pod["metadata"]
        if not any(one["type"] == "DisruptionTarget" for one in pod["status"].get("conditions", ())):
            disrupt(self._store, pod, "DeletionByPodGC", words)
        found = self._store.get("pods", meta["namespace"], meta["name"])
        if found is None:
            return
        if found["status"].get("phase") not in ("Succeeded", "Failed"):
            found["status"] |= {"phase": "Failed", "observedGeneration": found["metadata"]["generation"]}
            self._store.update("pods", found, status=True)
        try:
            self._store.delete("pods", meta["namespace"], meta["name"], grace=0, uid=meta["uid"])
        except ApiError as error:
            if error.status not in (404, 409):
                raise


def _has(found: Object, key: str, effect: str = "") -> bool:
    taints = found["spec"].get("taints", ())
    return any(one["key"] == key and effect in ("", one["effect"]) for one in taints)


def _ready(found: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in found["status"]["conditions"])


def _tolerated_for(tolerations: list[Object], taints: list[Object]) -> float | None:
    """Seconds for which all taints are tolerated; None for ever, 0 when one is not."""
    waits: list[float] = []
    for taint in taints:
        fitting = [one for one in tolerations if tolerates(one, taint)]
        if not fitting:
            return 0.0
        waits += [one["tolerationSeconds"] for one in fitting if "tolerationSeconds" in one]
    return min(waits) if waits else None


async def run(store: Store, kubelets: dict[str, Kubelet], faults: "FaultSource", network: Network) -> None:
    """Run the node controllers."""
    await NodeController(store, kubelets, faults, network).run()
