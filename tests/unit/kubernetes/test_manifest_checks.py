"""Names, labels, quantities and sizes are refused before anything is sent, each by its field."""

import re
from decimal import Decimal
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity
from support.golden_manifests import golden

from headway.training.kubernetes.validate import (
    ManifestInvalid,
    check,
    label_key_problem,
    label_value_problem,
    name_problem,
    problems_of,
    quantity,
)


@given(st.one_of(st.text("abZ09-.é", max_size=8), st.from_regex(r"\A[a-z]([-a-z0-9]{0,70}[a-z0-9])?\Z")))
def test_a_name_is_a_dns_label_of_at_most_63(name: str) -> None:
    legal = len(name) <= 63 and re.match(r"\A[a-z]([-a-z0-9]*[a-z0-9])?\Z", name) is not None
    assert (name_problem(name) == "") is legal


@pytest.mark.parametrize("length", [55, 60, 63, 64, 80])
def test_e07_lengths_around_the_limit(length: int) -> None:
    assert (name_problem("a" * length) == "") is (length <= 63)
    assert (label_value_problem("a" * length) == "") is (length <= 63)
    assert (label_key_problem(f"headway.dev/{'a' * length}") == "") is (length <= 63)


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a b", "-a", "a.", "Ünder", "UPPER.example/a", "a/b/c", f"{'a' * 254}/b"]
)
def test_illegal_label_names_are_refused(key: str) -> None:
    assert label_key_problem(key)


@pytest.mark.parametrize("value", ["-a", "a-", "a b", "ä", "a/b", "a\n"])
def test_illegal_label_values_are_refused(value: str) -> None:
    assert label_value_problem(value)
    assert not label_value_problem("")


NUMBERS = st.one_of(st.integers(0, 10**9).map(str), st.decimals(0, 10**6, places=3, allow_nan=False).map(str))
SUFFIXES = st.sampled_from(["", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "u", "n"])


@given(NUMBERS, SUFFIXES)
def test_a_quantity_is_what_the_official_client_reads(number: str, suffix: str) -> None:
    assert quantity(number + suffix) == parse_quantity(number + suffix)


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("2E-1", Decimal("0.2")), (".5", Decimal("0.5")), (7, 7)])
def test_quantities_with_exponents(text: str | int, value: Decimal) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "1 Gi", "1GB", "-1", "1gi", "Gi", "1Gi\n", "1e", "٣", "0x1", "1,5", True])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)


def job() -> dict[str, Any]:
    return next(yaml.safe_load_all(golden("job", "large").read_text()))


def pod(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["template"]["spec"]


def container(document: dict[str, Any]) -> dict[str, Any]:
    return pod(document)["containers"][0]


def memory_volume(document: dict[str, Any]) -> dict[str, Any]:
    return next(v["emptyDir"] for v in pod(document)["volumes"] if v.get("emptyDir", {}).get("medium"))


AT = "spec.template.spec"
FAULTS = [
    (lambda d: d["metadata"].update(name="1a"), "metadata.name: '1a' is no DNS label"),
    (lambda d: d["metadata"].update(name="a" * 62), "metadata.name: pod 1 would be called"),
    (lambda d: d["metadata"].update(namespace="Team"), "metadata.namespace: 'Team' is no DNS label"),
    (lambda d: d["metadata"]["labels"].update({"a b": "x"}), "metadata.labels[a b]: 'a b' is no label name"),
    (lambda d: d["metadata"]["labels"].update(run="x/y"), "metadata.labels[run]: 'x/y' is no label value"),
    (lambda d: d["metadata"]["labels"].update(run=1), "metadata.labels[run]: 1 is no text"),
    (lambda d: d["metadata"]["annotations"].update(a="x" * (1 << 18)), "metadata.annotations: "),
    (lambda d: d["spec"].update(completions=0), "spec.completions: 0 is less than 1"),
    (lambda d: pod(d).update(subdomain="A"), f"{AT}.subdomain: 'A' is no DNS label"),
    (lambda d: pod(d).update(serviceAccountName="A_b"), f"{AT}.serviceAccountName: 'A_b' is no name"),
    (lambda d: pod(d)["nodeSelector"].update(zone="a b"), f"{AT}.nodeSelector[zone]: 'a b' is no label value"),
    (lambda d: memory_volume(d).update(sizeLimit="64GB"), f"{AT}.volumes[1].emptyDir.sizeLimit: '64GB' is no quantity"),
    (lambda d: memory_volume(d).update(sizeLimit="864Gi"), f"{AT}.volumes[1].emptyDir.sizeLimit: 884736 MiB of shared"),
    (
        lambda d: container(d)["resources"]["limits"].update(memory="8G"),
        "resources.requests[memory]: '884736Mi' is more",
    ),
    (lambda d: container(d)["resources"]["limits"].update({"nvidia.com/gpu": "0.5"}), "comes in whole pieces"),
    (lambda d: container(d)["resources"]["limits"].update({"a b": 1}), f"{AT}.containers[0].resources.limits[a b]"),
    (lambda d: container(d)["env"].append({"name": "HOME", "value": "/"}), "'HOME' stands twice"),
    (lambda d: container(d)["env"].append({"name": "1A", "value": "x"}), "'1A' is no name of a variable"),
    (lambda d: container(d)["env"].append({"name": "N", "value": 1}), "1 is no text"),
    (lambda d: container(d)["volumeMounts"].append({"name": "x", "mountPath": "/x"}), "'x' is none of the volumes"),
    (lambda d: container(d)["volumeMounts"].append({"name": "shm", "mountPath": "/tmp"}), "'/tmp' stands twice"),
    (lambda d: container(d)["volumeMounts"].append({"name": "shm", "mountPath": "x"}), "'x' is no absolute path"),
    (lambda d: container(d).update(image=""), f"{AT}.containers[0].image: missing"),
    (lambda d: pod(d)["volumes"].append({"name": "shm", "emptyDir": {}}), f"{AT}.volumes[3].name: 'shm' stands twice"),
]


@pytest.mark.parametrize(("spoil", "problem"), FAULTS)
def test_a_fault_is_named_by_its_field(spoil: Any, problem: str) -> None:  # noqa: ANN401
    document = job()
    check(document)
    spoil(document)
    with pytest.raises(ManifestInvalid) as refused:
        check(document)
    assert problem in str(refused.value)


def test_every_fault_is_named_at_once() -> None:
    document = job()
    document["metadata"]["name"] = "A"
    container(document)["image"] = ""
    assert len(problems_of(document)) == 2


@pytest.mark.parametrize(("backend", "path"), [("jobset", "spec"), ("trainjob", "spec.template.spec")])
def test_names_that_a_controller_makes_are_held_to_the_limit(backend: str, path: str) -> None:
    document = next(yaml.safe_load_all(golden(backend, "small").read_text()))
    document["metadata"]["name"] = "a" * 55
    assert "would be called" in str(problems_of(document)[0])
    document["metadata"]["name"] = "a" * 54
    assert problems_of(document) == []
    part = document["spec"] if backend == "jobset" else document["spec"]["template"]["spec"]
    part["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["image"] = ""
    assert problems_of(document)[0].field == f"{path}.replicatedJobs[0].template.spec.template.spec.containers[0].image"
