"""The chart as data: what Helm renders from the values, and what the values may not say."""

import re
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from support.charts import (
    CHART,
    EXAMPLE,
    Manifest,
    example_values,
    find,
    manifests,
    merged,
    of_kind,
    pod_faults,
    pod_templates,
    references,
    rendered_text,
    rules,
)
from support.network_walls import Place, allowed
from support.toy_attempts import toy_attempt, toy_spec

from headway.training.kubernetes import client
from headway.training.kubernetes.manifest import render
from headway.training.kubernetes.names import RUN, names_of
from headway.training.kubernetes.platform import Platform, load_platform

KUBERNETES = "1.36"
BARE = {
    "images": {
        "codeLocation": {"repository": "r/code", "digest": "sha256:" + "1" * 64},
        "trainer": {"repository": "r/trainer", "digest": "sha256:" + "2" * 64},
    },
    "home": {"claim": "home"},
    "keys": {"claim": "keys"},
    "network": {"enabled": False},
    "rbac": {"readNodes": False},
    "priorityClasses": {"create": False},
}
# What an installation finds there, made by somebody else (docs/operate.md, step 2).
BY_REFERENCE = {
    ("PersistentVolumeClaim", "headway-home"),
    ("PersistentVolumeClaim", "headway-keys"),
    ("Secret", "headway-database"),
    ("Secret", "registry"),
    ("ConfigMap", "headway-public-keys"),
}


@pytest.fixture(scope="module")
def full() -> list[Manifest]:
    return manifests(example_values())


@pytest.fixture(scope="module")
def bare() -> list[Manifest]:
    return manifests(BARE)


def test_helm_lints_the_chart_with_nothing_to_say() -> None:
    report = helm_python.lint(CHART, example_values(), strict=True)
    assert report["errors"] == []
    assert [m["error"] for m in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("values", [example_values(), BARE], ids=["example", "bare"])
def test_every_manifest_is_what_kubernetes_takes(values: dict[str, Any]) -> None:
    rendered = manifests(values)
    known = [m for m in rendered if not m["apiVersion"].startswith("kueue.")]
    for manifest in known:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    names = [(m["kind"], m["metadata"]["name"]) for m in rendered]
    assert len(set(names)) == len(names)


def test_what_is_off_is_not_there(bare: list[Manifest]) -> None:
    kinds = {m["kind"] for m in bare}
    assert kinds == {"ConfigMap", "Deployment", "Role", "RoleBinding", "ServiceAccount"}
    assert "queue" not in profile(bare)


def test_every_object_carries_the_standard_labels(full: list[Manifest]) -> None:
    wanted = {"name", "instance", "version", "component", "part-of", "managed-by"}
    for manifest in full:
        labels = manifest["metadata"]["labels"]
        assert {f"app.kubernetes.io/{name}" for name in wanted} <= set(labels), manifest["metadata"]["name"]
    for maker in of_kind(full, "Deployment", "StatefulSet"):
        chosen, labels = maker["spec"]["selector"]["matchLabels"], maker["spec"]["template"]["metadata"]["labels"]
        assert chosen.items() <= labels.items()


def test_pods_are_hardened(full: list[Manifest]) -> None:
    templates = pod_templates(full)
    assert set(templates) == {"headway-reconciler", "headway-serving"}
    assert {name: pod_faults(template) for name, template in templates.items()} == {name: [] for name in templates}


def test_the_judge_of_pods_sees_what_is_loosened(full: list[Manifest]) -> None:
    template = yaml.safe_load(yaml.safe_dump(pod_templates(full)["headway-reconciler"]))
    container = template["spec"]["containers"][0]
    container["securityContext"]["readOnlyRootFilesystem"] = False
    del container["resources"]["limits"]
    template["spec"]["hostNetwork"] = True
    assert pod_faults(template) == [
        "hostNetwork is set",
        "reconciler writes its root file system",
        "reconciler has no memory limit",
    ]


def test_images_are_named_by_digest(full: list[Manifest]) -> None:
    for template in pod_templates(full).values():
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            assert re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", container["image"])
    assert re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", profile(full)["image"])


# --- rights


def test_the_launcher_may_do_what_it_does_and_nothing_else(full: list[Manifest]) -> None:
    used = {**client.PERMISSIONS, **client.QUEUE_PERMISSIONS}
    assert rules(find(full, "Role", "headway-launcher")) == {k: tuple(sorted(v)) for k, v in used.items()}
    nodes = find(full, "ClusterRole", "headway-nodes-growth")
    assert rules(nodes) == {k: tuple(sorted(v)) for k, v in client.NODE_PERMISSIONS.items()}


def test_without_a_queue_the_launcher_reads_no_workloads(bare: list[Manifest]) -> None:
    assert rules(find(bare, "Role", "headway-launcher")) == {k: tuple(sorted(v)) for k, v in client.PERMISSIONS.items()}


# The table of reference rights; `pods: delete` is ours, for pods that a lost node keeps.
MAY_AT_MOST = {
    ("batch", "jobs"): {"create", "get", "list", "watch", "patch", "delete"},
    ("", "services"): {"create", "get", "list", "delete"},
    ("", "configmaps"): {"create", "get", "list", "delete"},
    ("", "pods"): {"get", "list", "watch", "delete"},
    ("", "pods/log"): {"get", "list", "watch"},
    ("", "events"): {"get", "list", "watch"},
    ("kueue.x-k8s.io", "workloads"): {"get", "list", "watch"},
    ("kueue.x-k8s.io", "localqueues"): {"get", "list", "watch"},
}


def test_no_right_goes_beyond_the_table(full: list[Manifest]) -> None:
    for (group, resource), verbs in rules(find(full, "Role", "headway-launcher")).items():
        assert set(verbs) <= MAY_AT_MOST[group, resource]
    for role in of_kind(full, "Role", "ClusterRole"):
        for (group, resource), verbs in rules(role).items():
            assert "*" not in (group, resource, *verbs)
            assert resource not in ("secrets", "serviceaccounts", "serviceaccounts/token", "pods/exec", "roles")


def test_dagster_may_do_what_dagster_k8s_calls() -> None:
    """Read off the installed package: an upgrade that asks for more fails here and not on a cluster."""
    import dagster_k8s

    source = (Path(dagster_k8s.__file__).parent / "client.py").read_text(encoding="utf-8")
    calls = set(re.findall(r"(?:batch|core)_api\.([a-z]+_namespaced_[a-z_]+)\(", source))
    calls |= set(re.findall(r"self\.(?:batch|core)_api\.([a-z]+_namespaced_[a-z_]+)\b", source))
    verbs = {"list": "list", "read": "get", "delete": "delete", "create": "create"}
    objects = {
        "job": ("batch", "jobs"),
        "job_status": ("batch", "jobs/status"),
        "pod": ("", "pods"),
        "pod_log": ("", "pods/log"),
        "event": ("", "events"),
    }
    used: dict[tuple[str, str], set[str]] = {}
    for call in calls:
        verb, _, thing = call.partition("_namespaced_")
        used.setdefault(objects[thing], set()).add(verbs[verb])
    role = rules(find(manifests(BARE), "Role", "headway-dagster"))
    assert role == {key: tuple(sorted(found)) for key, found in used.items()}


def test_only_those_who_start_training_may(full: list[Manifest]) -> None:
    bound = {
        (b["metadata"]["name"], s["name"])
        for b in of_kind(full, "RoleBinding", "ClusterRoleBinding")
        for s in b["subjects"]
    }
    assert bound == {
        ("headway-launcher", "headway-runs"),
        ("headway-launcher", "headway-reconciler"),
        ("headway-dagster", "headway-dagster"),
        ("headway-dagster", "headway-runs"),
        ("headway-nodes-growth", "headway-runs"),
        ("headway-nodes-growth", "headway-reconciler"),
    }
    tokens = {a["metadata"]["name"]: a["automountServiceAccountToken"] for a in of_kind(full, "ServiceAccount")}
    assert tokens == {
        "headway-dagster": True,
        "headway-runs": True,
        "headway-reconciler": False,
        "headway-trainer": False,
        "headway-serving": False,
    }
    mounted = {n: t["spec"]["automountServiceAccountToken"] for n, t in pod_templates(full).items()}
    assert mounted == {"headway-reconciler": True, "headway-serving": False}


# --- secrets and references


def test_secrets_are_named_and_never_written(full: list[Manifest]) -> None:
    assert of_kind(full, "Secret") == []
    text = "\n".join(rendered_text(example_values()).values())
    assert re.search(r"://[^\s/@]+:[^\s/@]+@", text) is None
    for template in pod_templates(full).values():
        for container in template["spec"]["containers"]:
            for variable in container.get("env", []):
                if re.search(r"URL|PASSWORD|SECRET|TOKEN|KEY", variable["name"]):
                    assert "value" not in variable, variable["name"]


def test_what_pods_name_is_made_here_or_told_in_advance(full: list[Manifest]) -> None:
    made = {(m["kind"], m["metadata"]["name"]) for m in full}
    named = set[tuple[str, str]]().union(*map(references, pod_templates(full).values()))
    assert named - made == BY_REFERENCE


def test_private_keys_are_mounted_only_where_something_signs(full: list[Manifest]) -> None:
    claims = {
        name: {v["persistentVolumeClaim"]["claimName"] for v in t["spec"]["volumes"] if "persistentVolumeClaim" in v}
        for name, t in pod_templates(full).items()
    }
    assert claims == {"headway-reconciler": {"headway-home", "headway-keys"}, "headway-serving": {"headway-home"}}
    serving = pod_templates(full)["headway-serving"]["spec"]["containers"][0]
    mounts = {m["mountPath"]: m.get("subPath", m["name"]) for m in serving["volumeMounts"]}
    # No whole home: run directories with their checkpoints are nothing to a server.
    assert mounts["/headway/keys"] == "public-keys"
    assert {p for p in mounts if p.startswith("/headway")} == {"/headway/store", "/headway/serving", "/headway/keys"}


# --- settings and profile


def profile(rendered: list[Manifest]) -> dict[str, Any]:
    return yaml.safe_load(find(rendered, "ConfigMap", "headway-platform")["data"]["platform.yaml"])


def load(rendered: list[Manifest], folder: Path) -> Platform:
    file = folder / "platform.yaml"
    file.write_text(find(rendered, "ConfigMap", "headway-platform")["data"]["platform.yaml"], encoding="utf-8")
    return load_platform(file)


def test_the_launcher_takes_the_profile(full: list[Manifest], tmp_path: Path) -> None:
    platform = load(full, tmp_path)
    assert platform.namespace == "growth"
    assert (platform.gpu.resource, platform.gpu.count) == ("nvidia.com/gpu", 8)
    assert (platform.volume.claim, platform.volume.mount_path) == ("headway-home", "/headway")
    assert platform.service_account == "headway-trainer"
    assert platform.queue is not None
    assert platform.queue.local_queue == "training"
    assert platform.environment == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN"}
    # What attempts name is there.
    made = {(m["kind"], m["metadata"]["name"]) for m in full}
    assert {
        ("ServiceAccount", platform.service_account),
        ("PriorityClass", platform.priority_class),
        ("LocalQueue", platform.queue.local_queue),
        ("WorkloadPriorityClass", platform.queue.priority_class),
    } <= made


def test_the_bare_profile_is_taken_and_times_reach_it(tmp_path: Path) -> None:
    values = merged(
        BARE, training__maxPendingSeconds=600, training__activeDeadlineSeconds=7200, training__graceSeconds=60
    )
    platform = load(manifests(values), tmp_path)
    assert (platform.max_pending_s, platform.active_deadline_s, platform.grace_s) == (600, 7200, 60)
    assert platform.queue is None


def test_an_attempt_under_this_profile_is_hardened_and_behind_the_wall_of_trainers(
    full: list[Manifest], tmp_path: Path
) -> None:
    platform, spec = load(full, tmp_path), toy_spec(nodes=2)
    attempt = toy_attempt(Path("/headway/runs"), {}, nodes=2)
    job = render(attempt, spec, platform, names_of("home", "growth", attempt, spec)).job
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    template = job["spec"]["template"]
    assert pod_faults(template) == []
    assert template["spec"]["automountServiceAccountToken"] is False
    assert RUN in template["metadata"]["labels"]
    # Neither Dagster's nor our own other walls open anything to it.
    assert not {"component", "app.kubernetes.io/component"} & set(template["metadata"]["labels"])
    named = references(template) - {(m["kind"], m["metadata"]["name"]) for m in full}
    assert named == {("PersistentVolumeClaim", "headway-home"), ("Secret", "registry")}


def test_settings_are_ones_that_headway_knows(full: list[Manifest]) -> None:
    from headway.home import load_settings

    settings = load_settings(dict(find(full, "ConfigMap", "headway-settings")["data"]))
    assert settings.unknown == ()
    assert (settings.profile, str(settings.home), settings.tenant) == ("cluster", "/headway", "growth")


def test_commands_are_ones_that_headway_has(full: list[Manifest]) -> None:
    from click.testing import CliRunner

    from headway.cli.main import main

    for template in pod_templates(full).values():
        container = template["spec"]["containers"][0]
        program, *words = [*container["command"], *container.get("args", [])]
        assert program == "headway"
        # Parsed up to --help, which ends it before anything is done.
        result = CliRunner().invoke(main, [*words, "--help"])
        assert result.exit_code == 0, result.output


# --- queues


def test_queues_have_the_shape_that_kueue_takes(full: list[Manifest]) -> None:
    """The fields of recorded exchanges with Kueue's v1beta2 API."""
    made = [m for m in full if m["apiVersion"] == "kueue.x-k8s.io/v1beta2"]
    assert {m["kind"] for m in made} == {"ResourceFlavor", "ClusterQueue", "LocalQueue", "WorkloadPriorityClass"}
    (queue,) = of_kind(full, "ClusterQueue")
    (group,) = queue["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert group["coveredResources"] == [r["name"] for r in flavor["resources"]] == ["cpu", "memory", "nvidia.com/gpu"]
    assert flavor["name"] == of_kind(full, "ResourceFlavor")[0]["metadata"]["name"]
    assert of_kind(full, "LocalQueue")[0]["spec"]["clusterQueue"] == queue["metadata"]["name"]
    # One tenant's namespace: nobody else's LocalQueue may draw on it.
    assert queue["spec"]["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "growth"}}
    values = {m["metadata"]["name"]: m["value"] for m in of_kind(full, "WorkloadPriorityClass")}
    assert values["prod"] > values["research"]
    assert "value" in of_kind(full, "WorkloadPriorityClass")[0]


def test_serving_goes_before_training(full: list[Manifest]) -> None:
    classes = {c["metadata"]["name"]: (c["value"], c["preemptionPolicy"]) for c in of_kind(full, "PriorityClass")}
    assert classes["headway-serving"][0] > classes["headway-control"][0] > classes["headway-training"][0] > 0
    assert {name: policy for name, (_, policy) in classes.items()} == {
        "headway-serving": "PreemptLowerPriority",
        "headway-control": "PreemptLowerPriority",
        "headway-training": "Never",
    }


# --- walls

PORTS = (22, 53, 80, 443, 3000, 4000, 5432, 6443, 8080, 29500, 41234)
DAGSTER = {"app.kubernetes.io/name": "dagster"}
PLACES = {
    "webserver": Place("growth", {**DAGSTER, "component": "dagster-webserver"}),
    "daemon": Place("growth", {**DAGSTER, "component": "dagster-daemon"}),
    "code": Place("growth", {"component": "user-deployments"}),
    "run": Place("growth", {**DAGSTER, "app.kubernetes.io/component": "run_worker"}),
    "step": Place("growth", {**DAGSTER, "app.kubernetes.io/component": "step_worker"}),
    "reconciler": Place(
        "growth", {"app.kubernetes.io/instance": "headway", "app.kubernetes.io/component": "reconciler"}
    ),
    "serving": Place("growth", {"app.kubernetes.io/instance": "headway", "app.kubernetes.io/component": "serving"}),
    "trainer": Place("growth", {RUN: "0123456789ab"}),
    "other": Place("growth", {"app": "something"}),
    "elsewhere": Place("default", {"app": "something"}),
    "proxy": Place("ingress", {"app": "login-proxy"}),
    "app": Place("shop", {"app": "shop"}, namespace_labels={"headway.dev/may-predict": "true"}),
    "prometheus": Place("monitoring", {"app.kubernetes.io/name": "prometheus"}),
    "postgres": Place("databases", {"app": "postgres"}),
    "dns": Place("kube-system", {"k8s-app": "kube-dns"}),
    "api": Place(address="10.0.0.1"),
    "s3": Place(address="10.20.0.10"),
    "metadata": Place(address="169.254.169.254"),
    "internet": Place(address="93.184.216.34"),
}
# Everything that may be opened; whatever is not written here may not.
OPEN = {
    *(("trainer", "trainer", port) for port in PORTS),
    *((who, "postgres", 5432) for who in ("webserver", "daemon", "code", "run", "step", "reconciler", "serving")),
    *((who, "api", 6443) for who in ("webserver", "daemon", "code", "run", "step", "reconciler")),
    *((who, "s3", 443) for who in ("code", "run", "step")),
    ("webserver", "code", 4000),
    ("daemon", "code", 4000),
    ("proxy", "webserver", 3000),
    ("app", "serving", 8080),
    ("prometheus", "serving", 8080),
}


def test_walls_let_through_what_the_table_says_and_nothing_else(full: list[Manifest]) -> None:
    policies = of_kind(full, "NetworkPolicy")
    ours = [name for name, place in PLACES.items() if place.namespace == "growth"]
    found = {
        (a, b, port)
        for a, source in PLACES.items()
        for b, target in PLACES.items()
        for port in PORTS
        if (a in ours or b in ours) and source.namespace and not (b == "dns" and port == 53)
        if allowed(policies, "growth", source, target, port)
    }
    assert found == OPEN


def test_everybody_finds_names_and_nobody_the_metadata_of_the_cloud(full: list[Manifest]) -> None:
    policies = of_kind(full, "NetworkPolicy")
    ours = [place for place in PLACES.values() if place.namespace == "growth"]
    assert all(allowed(policies, "growth", place, PLACES["dns"], 53, "UDP") for place in ours)
    assert not any(allowed(policies, "growth", p, PLACES["metadata"], port) for p in ours for port in PORTS)


def test_a_server_that_nobody_was_allowed_to_ask_is_closed() -> None:
    values = merged(example_values(), network__servingFrom=[], network__webserverFrom=[])
    policies = of_kind(manifests(values), "NetworkPolicy")
    for who in ("app", "prometheus", "proxy", "other", "elsewhere"):
        assert not allowed(policies, "growth", PLACES[who], PLACES["serving"], 8080)
        assert not allowed(policies, "growth", PLACES[who], PLACES["webserver"], 3000)


# --- what the schema refuses


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"images__trainer__digest": "latest"}, "/images/trainer/digest"),
        ({"images__trainer__tag": "1"}, "'tag' not allowed"),
        ({"home__claim": ""}, "/home/claim"),
        ({"home__mountPath": "headway"}, "/home/mountPath"),
        ({"training__gpus": 8}, "'gpus' not allowed"),
        ({"training__memory": "lots"}, "/training/memory"),
        ({"training__environment": {"HF_TOKEN": "x"}}, "HF_TOKEN"),
        ({"objectStore__endpoint": "https://key:secret@s3"}, "/objectStore/endpoint"),
        ({"network__apiServer__cidrs": ["0.0.0.0/0"]}, "/network/apiServer/cidrs"),
        ({"network__postgres__peers": []}, "/network/postgres/peers"),
        ({"serving__port": 80}, "/serving/port"),
        ({"images__serving": {"repository": "", "digest": ""}}, "/images/serving"),
        ({"servng": {}}, "'servng' not allowed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_that_cannot_work_are_refused_by_name(change: dict[str, Any], told: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        manifests(merged(example_values(), **change))
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"training__gpu": {"resource": "amd.com/gpu", "count": 8}}, "kueue.quota has no amd.com/gpu"),
        ({"kueue__priority": "urgent"}, "kueue.priorities has prod, research"),
    ],
    ids=["a GPU without quota", "a priority that nobody makes"],
)
def test_values_that_contradict_each_other_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=told):
        manifests(merged(example_values(), **change))


def test_the_defaults_alone_are_refused_with_everything_that_is_missing() -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        manifests({})
    for field in ("/home/claim", "/keys/claim", "/images/codeLocation", "/images/trainer", "/network/apiServer/cidrs"):
        assert field in str(refusal.value)


def test_the_example_is_the_one_of_the_docs() -> None:
    text = (CHART.parents[2] / "docs" / "operate.md").read_text(encoding="utf-8")
    assert str(EXAMPLE.relative_to(CHART.parents[2])) in text
