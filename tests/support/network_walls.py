"""What NetworkPolicies let through, decided from the manifests as the API documents it (networking.k8s.io/v1)."""

from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Place:
    """One end of a connection: a pod by namespace and labels, or an address outside."""

    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    address: str = ""
    namespace_labels: dict[str, str] = field(default_factory=dict)


def allowed(
    policies: list[dict[str, Any]], home: str, source: Place, target: Place, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a connection may be opened; the policies lie in the namespace `home`."""
    return _one_way(policies, home, source, target, port, protocol, "Egress") and _one_way(
        policies, home, target, source, port, protocol, "Ingress"
    )


def _one_way(
    policies: list[dict[str, Any]], home: str, here: Place, there: Place, port: int, protocol: str, way: str
) -> bool:
    if here.namespace != home:
        return True
    ours = [
        p["spec"]
        for p in policies
        if way in p["spec"]["policyTypes"] and selects(p["spec"]["podSelector"], here.labels)
    ]
    if not ours:
        return True
    rules = [rule for spec in ours for rule in spec.get(way.lower(), [])]
    peers = "to" if way == "Egress" else "from"
    return any(_port(rule, port, protocol) and _peer(rule.get(peers), home, there) for rule in rules)


def _port(rule: dict[str, Any], port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    return ports is None or any(p["port"] == port and p.get("protocol", "TCP") == protocol for p in ports)


def _peer(peers: list[dict[str, Any]] | None, home: str, there: Place) -> bool:
    if not peers:
        return True
    return any(_matches(peer, home, there) for peer in peers)


def _matches(peer: dict[str, Any], home: str, there: Place) -> bool:
    if "ipBlock" in peer:
        return bool(there.address) and ip_address(there.address) in ip_network(peer["ipBlock"]["cidr"])
    if not there.namespace:
        return False
    spaces = {NAMESPACE_LABEL: there.namespace, **there.namespace_labels}
    in_space = selects(peer["namespaceSelector"], spaces) if "namespaceSelector" in peer else there.namespace == home
    return in_space and selects(peer.get("podSelector", {}), there.labels)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector takes these labels; an empty one takes all."""
    tests = {
        "In": lambda e: labels.get(e["key"]) in e["values"],
        "NotIn": lambda e: labels.get(e["key"]) not in e["values"],
        "Exists": lambda e: e["key"] in labels,
        "DoesNotExist": lambda e: e["key"] not in labels,
    }
    exact = all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())
    return exact and all(tests[e["operator"]](e) for e in selector.get("matchExpressions", []))
