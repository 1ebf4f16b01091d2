"""The double against exchanges recorded from a real Kubernetes 1.36 in which no pod runs: statuses, bodies, watches.

`HEADWAY_TEST_GOLDEN` names another recording of the same form; its scenarios run with the settings of `settings`.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from tests.cluster.golden import Client, Exchange, Replay, RunningDouble, Values, read, running_double
from tests.cluster.test_conformance_pods import GROUPS


@dataclass(frozen=True)
class Settings:
    """How the double is started for a scenario.

    Attributes:
        nodes: Number of nodes; 0 = the API server and the controllers alone, as recorded before kubelets joined.
        kueue: Whether Kueue is installed.
        scale: How many times faster the cluster's own delays pass.
        exact: Whether every single write of a watch must agree.
        after: Scenario that must run before in the same cluster.
    """

    nodes: int = 0
    kueue: bool = False
    scale: float = 1.0
    exact: bool = False
    after: str = ""


SCENARIOS: dict[str, Settings] = {
    "discovery": Settings(),
    "job_create": Settings(),
    "job_validation": Settings(),
    "job_update": Settings(),
    "job_delete_pending": Settings(),
    "service_gc": Settings(),
    "watch": Settings(exact=True),
    "paging": Settings(exact=True),
    "expired": Settings(exact=True, after="paging"),
    "rbac": Settings(),
}

# (scenario, number) -> why the exchange is sent, but not compared.
LEFT_OUT: dict[tuple[str, int], str] = {
    ("job_update", 23): "the recorded body has lost the stale resourceVersion that its note speaks of",
}

# What the notes of BED entries do to the double, as content of its fault file; the first word that occurs decides.
BED: tuple[tuple[str, dict[str, object]], ...] = (("compacted", {"compact": 1}),)


def started(settings: Settings) -> AbstractContextManager[RunningDouble]:
    """A double of its own."""
    arguments = ["--nodes", str(settings.nodes), "--time-scale", str(settings.scale)]
    return running_double(BED, *arguments, *(["--kueue"] if settings.kueue else []))


@pytest.fixture(scope="module")
def api_server() -> Iterator[RunningDouble]:
    """The double that scenarios without nodes share."""
    with started(Settings()) as bed:
        yield bed


RECORDED = read()


def _renamed(scenario: str, seq: int, before: int, name: str) -> Exchange:
    """The creation of a twin of what exchange `seq` creates, sent before exchange `before`."""
    recorded = RECORDED[scenario][seq - 1]
    old = recorded.request_body["metadata"]["name"]
    text = (
        json.dumps(recorded.request_body).replace(f'"{old}"', f'"{name}"').replace(f"{old}-0.{old}", f"{name}-0.{name}")
    )
    return Exchange(scenario, before, "POST", path=recorded.path, request_body=json.loads(text))


def _configmap(scenario: str, before: int, name: str, labels: dict[str, str]) -> Exchange:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}}
    path = "/api/v1/namespaces/golden-paging/configmaps"
    return Exchange(scenario, before, "POST", path=path, request_body=body)


def _gone(scenario: str, before: int, name: str) -> Exchange:
    return Exchange(scenario, before, "DELETE", path=f"/api/v1/namespaces/golden-paging/configmaps/{name}")


# Requests that the answers prove, but that were not recorded.
UNRECORDED: dict[str, list[Exchange]] = {
    "job_update": [_renamed("job_update", 2, before, name) for before, name in ((5, "b"), (6, "c"), (39, "d"))],
    "paging": [_configmap("paging", 2, f"p{i}", {"set": "p"}) for i in range(5)],
    "expired": [
        *(_configmap("expired", 1, f"q{i}", {}) for i in range(3)),
        *(_gone("expired", 1, f"p{i}") for i in range(3)),
    ],
}


def replayed(bed: RunningDouble, scenario: str) -> list[str]:
    """What differs in a scenario, after the one that it continues."""
    settings, values = SCENARIOS[scenario], Values()
    replay = Replay(Client(bed.kubeconfig), values, LEFT_OUT, UNRECORDED)
    found = []
    for name in filter(None, (settings.after, scenario)):
        found += list(replay.run(RECORDED[name], bed.do, SCENARIOS[name].exact))
    return found


@pytest.mark.parametrize("scenario", [name for name, s in SCENARIOS.items() if not s.nodes and not s.after])
def test_the_api_server_answers_as_recorded(api_server: RunningDouble, scenario: str) -> None:
    """Scenarios that need no running pod."""
    assert not replayed(api_server, scenario)


@pytest.mark.parametrize("scenario", [name for name, s in SCENARIOS.items() if s.nodes or s.after])
def test_a_cluster_of_its_own_behaves_as_recorded(scenario: str) -> None:
    """Scenarios that need nodes, or leave a cluster behind that no other scenario can use."""
    with started(SCENARIOS[scenario]) as bed:
        found = replayed(bed, scenario)
    assert not found


def test_every_recorded_scenario_is_replayed_or_named() -> None:
    """No scenario of the recording is forgotten, and nothing is left out that does not exist."""
    with_pods = {name for group in GROUPS.values() for name in group.scenarios}
    assert set(RECORDED) <= set(SCENARIOS) | with_pods
    known = {(name, exchange.seq) for name, exchanges in RECORDED.items() for exchange in exchanges}
    assert set(LEFT_OUT) <= known
