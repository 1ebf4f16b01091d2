"""The scheduler: puts pods on nodes, says why it cannot, and preempts pods of lower priority."""

import copy
from collections import Counter
from fractions import Fraction

from tests.cluster.double.quantity import number
from tests.cluster.double.store import Object, Store, stamp

_NAME = "default-scheduler"
_UNHELPFUL = "Preemption is not helpful for scheduling"
_NO_VICTIMS = "No preemption victims found for incoming pod"


def matches(selector: Object | None, labels: Object) -> bool:
    """Whether labels fulfil a LabelSelector (None selects nothing, {} everything)."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(_requirement(one, labels) for one in selector.get("matchExpressions", ()))


def _requirement(rule: Object, labels: Object) -> bool:
    value, operator = labels.get(rule["key"]), rule["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    if operator in ("In", "NotIn"):
        return (value in rule["values"]) == (operator == "In")
    if value is None:
        return False
    return int(value) > int(rule["values"][0]) if operator == "Gt" else int(value) < int(rule["values"][0])


def tolerates(toleration: Object, taint: Object) -> bool:
    """Whether a toleration tolerates a taint."""
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


def requests_of(spec: Object) -> dict[str, Fraction]:
    """What a pod's spec requests in all, limits where nothing is requested, and the pod itself."""
    total: dict[str, Fraction] = {"pods": Fraction(1)}
    for container in spec["containers"]:
        for name, value in _wanted(container).items():
            total[name] = total.get(name, Fraction(0)) + number(value)
    for container in spec.get("initContainers", ()):
        for name, value in _wanted(container).items():
            total[name] = max(total.get(name, Fraction(0)), number(value))
    return total


def _wanted(container: Object) -> Object:
    resources = container.get("resources", {})
    return {**resources.get("limits", {}), **resources.get("requests", {})}


def _alive(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


class Scheduler:
    """Places pods one after another, oldest first."""

    def __init__(self, store: Store) -> None:
        """Work on `store`."""
        self._store = store

    async def run(self) -> None:
        """Look at the waiting pods whenever something changes."""
        changes = self._store.subscribe()
        self._schedule_all()
        while True:
            plural, _, _ = await changes.get()
            relevant = plural in ("pods", "nodes", "persistentvolumeclaims")
            while not changes.empty():
                relevant |= changes.get_nowait()[0] in ("pods", "nodes", "persistentvolumeclaims")
            if relevant:
                self._schedule_all()

    def _schedule_all(self) -> None:
        waiting = [pod for pod in self._store.peek("pods") if self._waits(pod)]
        order = sorted(
            waiting, key=lambda pod: (-pod["spec"].get("priority", 0), int(pod["metadata"]["resourceVersion"]))
        )
        for pod in order:
            self._schedule(copy.deepcopy(pod))

    def _waits(self, pod: Object) -> bool:
        own = pod["spec"].get("schedulerName", _NAME) == _NAME
        gates = pod["spec"].get("schedulingGates")
        unbound = not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
        return own and unbound and not gates and _alive(pod)

    def _schedule(self, pod: Object) -> None:
        missing = self._missing_claim(pod)
        nodes, pods = self._store.peek("nodes"), [one for one in self._store.peek("pods") if _alive(one)]
        reasons: Counter[str] = Counter()
        fits, hopeless = [], {}
        for node in nodes:
            why, resolvable = self._faults(pod, node, nodes, pods)
            if not why:
                fits.append(node)
            reasons.update(why)
            hopeless[node["metadata"]["name"]] = not resolvable
        if missing or not fits:
            self._refuse(pod, missing, reasons, hopeless, nodes, pods)
            return
        load = Counter(one["spec"].get("nodeName") for one in pods)
        best = min(fits, key=lambda node: (load[node["metadata"]["name"]], node["metadata"]["name"]))
        self._bind(pod, best["metadata"]["name"])

    def _missing_claim(self, pod: Object) -> str:
        for volume in pod["spec"].get("volumes", ()):
            name = volume.get("persistentVolumeClaim", {}).get("claimName")
            if name and self._store.get("persistentvolumeclaims", pod["metadata"]["namespace"], name) is None:
                return f'persistentvolumeclaim "{name}" not found'
        return ""

    def _faults(self, pod: Object, node: Object, nodes: list[Object], pods: list[Object]) -> tuple[list[str], bool]:
        """Why a node will not do, and whether preemption could help."""
        spec, name = pod["spec"], node["metadata"]["name"]
        tolerations = spec.get("tolerations", ())
        taints = [one for one in node["spec"].get("taints", ()) if one["effect"] != "PreferNoSchedule"]
        cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
        if node["spec"].get("unschedulable") and not any(tolerates(one, cordon) for one in tolerations):
            return ["node(s) were unschedulable"], False
        for taint in taints:
            if not any(tolerates(one, taint) for one in tolerations):
                return ["node(s) had untolerated taint(s)"], False
        if not self._selected(spec, node):
            return ["node(s) didn't match Pod's node affinity/selector"], False
        here = [one for one in pods if one["spec"].get("nodeName") == name]
        short, resolvable = self._short(spec, node, here)
        if short:
            return short, resolvable
        if not self._spread(pod, node, nodes, pods):
            return ["node(s) didn't match pod topology spread constraints"], True
        return self._affinity(pod, node, nodes, pods)

    def _selected(self, spec: Object, node: Object) -> bool:
        labels = node["metadata"].get("labels", {})
        if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
            return False
        affinity = spec.get("affinity", {}).get("nodeAffinity", {})
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        if not required:
            return True
        fields = {"metadata.name": node["metadata"]["name"]}
        return any(
            all(_requirement(one, labels) for one in term.get("matchExpressions", ()))
            and all(_requirement(one, fields) for one in term.get("matchFields", ()))
            for term in required["nodeSelectorTerms"]
        )

    def _short(self, spec: Object, node: Object, here: list[Object]) -> tuple[list[str], bool]:
        wanted, used = requests_of(spec), Counter[str]()
        for one in here:
            used.update(requests_of(one["spec"]))
        short, resolvable = [], True
        for name, value in wanted.items():
            whole = number(node["status"]["allocatable"].get(name, 0))
            if value and value > whole - used[name]:
                short.append("Too many pods" if name == "pods" else f"Insufficient {name}")
                resolvable &= value <= whole
        return short, resolvable

    def _spread(self, pod: Object, node: Object, nodes: list[Object], pods: list[Object]) -> bool:
        for rule in pod["spec"].get("topologySpreadConstraints", ()):
            key = rule["topologyKey"]
            domain = node["metadata"].get("labels", {}).get(key)
            if rule["whenUnsatisfiable"] != "DoNotSchedule":
                continue
            if domain is None:
                return False
            domains = {one["metadata"]["name"]: one["metadata"].get("labels", {}).get(key) for one in nodes}
            eligible = [one for one in nodes if self._selected(pod["spec"], one)]
            count = {domains[one["metadata"]["name"]]: 0 for one in eligible}
            for one in pods:
                same = one["metadata"]["namespace"] == pod["metadata"]["namespace"]
                place = domains.get(one["spec"].get("nodeName", ""))
                fresh = "deletionTimestamp" not in one["metadata"]
                if (
                    same
                    and fresh
                    and place in count
                    and matches(rule.get("labelSelector"), one["metadata"].get("labels", {}))
                ):
                    count[place] += 1
            own = matches(rule.get("labelSelector"), pod["metadata"].get("labels", {}))
            if count.get(domain, 0) + own - min(count.values()) > rule["maxSkew"]:
                return False
        return True

    def _affinity(self, pod: Object, node: Object, nodes: list[Object], pods: list[Object]) -> tuple[list[str], bool]:
        affinity = pod["spec"].get("affinity", {})
        rule = "requiredDuringSchedulingIgnoredDuringExecution"
        for term in affinity.get("podAntiAffinity", {}).get(rule, ()):
            if any(self._together(term, pod, node, one, nodes) for one in pods):
                return ["node(s) didn't match pod anti-affinity rules"], True
        for other in pods:
            for term in other["spec"].get("affinity", {}).get("podAntiAffinity", {}).get(rule, ()):
                if other["spec"].get("nodeName") and self._together(term, other, node, pod, nodes, place=other):
                    return ["node(s) didn't satisfy existing pods anti-affinity rules"], True
        for term in affinity.get("podAffinity", {}).get(rule, ()):
            others = [one for one in pods if self._selects(term, pod, one) and one["spec"].get("nodeName")]
            first = not others and self._selects(term, pod, pod)
            if not first and not any(self._together(term, pod, node, one, nodes) for one in pods):
                return ["node(s) didn't match pod affinity rules"], False
        return [], True

    def _selects(self, term: Object, pod: Object, other: Object) -> bool:
        namespaces = term.get("namespaces") or [pod["metadata"]["namespace"]]
        labels = other["metadata"].get("labels", {})
        return other["metadata"]["namespace"] in namespaces and matches(term.get("labelSelector"), labels)

    def _together(
        self, term: Object, pod: Object, node: Object, other: Object, nodes: list[Object], place: Object | None = None
    ) -> bool:
        at = (place or other)["spec"].get("nodeName")
        domains = {one["metadata"]["name"]: one["metadata"].get("labels", {}).get(term["topologyKey"]) for one in nodes}
        same = at is not None and domains.get(at) is not None and domains[at] == domains[node["metadata"]["name"]]
        return same and self._selects(term, pod, other)

    def _bind(self, pod: Object, node: str) -> None:
        pod["spec"]["nodeName"] = node
        conditions = [one for one in pod["status"].get("conditions", ()) if one["type"] != "PodScheduled"]
        done = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
        done["lastTransitionTime"] = stamp(self._store.clock.now())
        status = {key: value for key, value in pod["status"].items() if key != "nominatedNodeName"}
        pod["status"] = {**status, "conditions": [*conditions, done]}
        self._store.bind(pod)
        meta = pod["metadata"]
        words = f"Successfully assigned {meta['namespace']}/{meta['name']} to {node}"
        self._store.record_event(pod, "Normal", "Scheduled", words, _NAME, action="Binding")

    def _refuse(
        self,
        pod: Object,
        missing: str,
        reasons: Counter[str],
        hopeless: dict[str, bool],
        nodes: list[Object],
        pods: list[Object],
    ) -> None:
        if not nodes:
            self._mark(pod, "no nodes available to schedule pods", None)
            return
        words = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
        start = f"0/{len(nodes)} nodes are available: {missing or words or 'no nodes'}."
        if pod["status"].get("nominatedNodeName"):
            return
        node, victims = (None, []) if missing else self._victims(pod, hopeless, nodes, pods)
        message = start
        if node is None:
            kinds = Counter(_UNHELPFUL if useless or missing else _NO_VICTIMS for useless in hopeless.values())
            text = ", ".join(sorted(f"{count} {kind}" for kind, count in kinds.items()))
            message = f"{start} no new claims to deallocate, preemption: 0/{len(nodes)} nodes are available: {text}."
        self._mark(pod, message, node)
        for victim in victims:
            self._preempt(pod, victim, str(node))

    def _mark(self, pod: Object, message: str, node: str | None) -> None:
        old = next((one for one in pod["status"].get("conditions", ()) if one["type"] == "PodScheduled"), None)
        if old is not None and old.get("message") == message and node is None:
            return
        since = old["lastTransitionTime"] if old else stamp(self._store.clock.now())
        new = {"type": "PodScheduled", "status": "False", "lastProbeTime": None, "lastTransitionTime": since}
        new |= {"observedGeneration": pod["metadata"]["generation"]}
        new |= {"reason": "Unschedulable", "message": message}
        others = [one for one in pod["status"].get("conditions", ()) if one["type"] != "PodScheduled"]
        pod["status"]["conditions"] = [*others, new]
        if node is not None:
            pod["status"]["nominatedNodeName"] = node
        self._store.update("pods", pod, status=True)
        self._store.record_event(pod, "Warning", "FailedScheduling", message, _NAME, action="Scheduling")

    def _victims(
        self, pod: Object, hopeless: dict[str, bool], nodes: list[Object], pods: list[Object]
    ) -> tuple[str | None, list[Object]]:
        """The node where the fewest pods of lower priority have to go, and these pods."""
        priority, best = pod["spec"].get("priority", 0), (None, [])
        if pod["spec"].get("preemptionPolicy") == "Never":
            return best
        for node in nodes:
            name = node["metadata"]["name"]
            here = [one for one in pods if one["spec"].get("nodeName") == name]
            lower = [one for one in here if one["spec"].get("priority", 0) < priority]
            if hopeless[name] or not lower:
                continue
            lower.sort(key=lambda one: one["spec"].get("priority", 0), reverse=True)
            gone = list(lower)
            if self._faults(pod, node, nodes, [one for one in pods if one not in gone])[0]:
                continue
            for one in lower:
                rest = [other for other in gone if other is not one]
                if not self._faults(pod, node, nodes, [other for other in pods if other not in rest])[0]:
                    gone = rest
            if best[0] is None or len(gone) < len(best[1]):
                best = (name, gone)
        return best

    def _preempt(self, pod: Object, victim: Object, node: str) -> None:
        victim, meta = copy.deepcopy(victim), victim["metadata"]
        if "deletionTimestamp" in meta:
            return
        disrupt(
            self._store, victim, "PreemptionByScheduler", f"{_NAME}: preempting to accommodate a higher priority pod"
        )
        self._store.delete("pods", meta["namespace"], meta["name"], uid=meta["uid"])
        words = f"Preempted by pod {pod['metadata']['uid']} on node {node}"
        self._store.record_event(victim, "Normal", "Preempted", words, _NAME, action="Preempting")


def disrupt(store: Store, pod: Object, reason: str, message: str) -> None:
    """Give a pod the condition DisruptionTarget."""
    found = store.get("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
    if found is None:
        return
    others = [one for one in found["status"].get("conditions", ()) if one["type"] != "DisruptionTarget"]
    new: Object = {"type": "DisruptionTarget", "observedGeneration": found["metadata"]["generation"], "status": "True"}
    new |= {"lastProbeTime": None, "lastTransitionTime": stamp(store.clock.now()), "reason": reason, "message": message}
    found["status"]["conditions"] = [*others, new]
    store.update("pods", found, status=True)


async def run(store: Store) -> None:
    """Run the scheduler."""
    await Scheduler(store).run()
