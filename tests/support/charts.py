"""Helm itself (its library, without a cluster) renders the chart; manifests come back as data."""

from pathlib import Path
from typing import Any

import helm_python
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "charts" / "headway"
EXAMPLE = DEPLOY / "values" / "headway.example.yaml"
_KIND_OF_SOURCE = {"configMapRef": "ConfigMap", "secretRef": "Secret"}

Manifest = dict[str, Any]


def example_values() -> dict[str, Any]:
    return yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))


def merged(values: dict[str, Any], **dotted: object) -> dict[str, Any]:
    """The values with some changed; `a__b=1` is `a.b: 1`."""
    changed = yaml.safe_load(yaml.safe_dump(values))
    for path, value in dotted.items():
        *parents, last = path.split("__")
        at = changed
        for name in parents:
            at = at.setdefault(name, {})
        at[last] = value
    return changed


def rendered_text(values: dict[str, Any], namespace: str = "growth") -> dict[str, str]:
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        return chart.render(values, name="headway", namespace=namespace)


def manifests(values: dict[str, Any], namespace: str = "growth") -> list[Manifest]:
    texts = rendered_text(values, namespace).values()
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def find(rendered: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [m for m in rendered if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def of_kind(rendered: list[Manifest], *kinds: str) -> list[Manifest]:
    return [m for m in rendered if m["kind"] in kinds]


def pod_templates(rendered: list[Manifest]) -> dict[str, Manifest]:
    """Pod templates by the name of what makes them."""
    return {m["metadata"]["name"]: m["spec"]["template"] for m in of_kind(rendered, "Deployment", "StatefulSet", "Job")}


def rules(role: Manifest) -> dict[tuple[str, str], tuple[str, ...]]:
    """(API group, resource) -> sorted verbs; a resource may stand in one rule only."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert (group, resource) not in found
                found[group, resource] = tuple(sorted(rule["verbs"]))
    return found


def pod_faults(template: Manifest) -> list[str]:
    """What is wrong with a pod by the table of what every pod of ours keeps to; empty is good."""
    spec = template["spec"]
    outer = spec.get("securityContext", {})
    faults = [f"{name} is set" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    faults += [f"volume {v['name']} is a hostPath" for v in spec.get("volumes", []) if "hostPath" in v]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        inner = {**{k: v for k, v in outer.items() if k in ("runAsNonRoot", "runAsUser", "seccompProfile")}}
        inner |= container.get("securityContext", {})
        wanted = {
            "runs as root": inner.get("runAsNonRoot") is True and inner.get("runAsUser", 0) != 0,
            "writes its root file system": inner.get("readOnlyRootFilesystem") is True,
            "may gain privileges": inner.get("allowPrivilegeEscalation") is False,
            "is privileged": not inner.get("privileged"),
            "keeps capabilities": inner.get("capabilities") == {"drop": ["ALL"]},
            "has no seccomp profile": inner.get("seccompProfile", {}).get("type") == "RuntimeDefault",
            "has no memory limit": "memory" in container.get("resources", {}).get("limits", {}),
            "requests nothing": {"cpu", "memory"} <= set(container.get("resources", {}).get("requests", {})),
        }
        faults += [f"{container['name']} {what}" for what, held in wanted.items() if not held]
    return faults


def references(template: Manifest) -> set[tuple[str, str]]:
    """(kind, name) of every object that a pod names and does not make itself."""
    spec = template["spec"]
    found = {("ServiceAccount", spec["serviceAccountName"]), ("PriorityClass", spec.get("priorityClassName", ""))}
    found |= {("Secret", s["name"]) for s in spec.get("imagePullSecrets", [])}
    for volume in spec.get("volumes", []):
        if "configMap" in volume:
            found.add(("ConfigMap", volume["configMap"]["name"]))
        if "persistentVolumeClaim" in volume:
            found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for source in container.get("envFrom", []):
            found |= {(_KIND_OF_SOURCE[kind], chosen["name"]) for kind, chosen in source.items()}
        for variable in container.get("env", []):
            chosen = variable.get("valueFrom", {}).get("secretKeyRef")
            found |= {("Secret", chosen["name"])} if chosen else set()
    return found - {("PriorityClass", "")}
