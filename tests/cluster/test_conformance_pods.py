"""The double with its kubelets against recorded exchanges in which pods run: endings, evictions, lost nodes, Kueue.

`HEADWAY_TEST_GOLDEN` names another recording of the same form.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.cluster.golden import Values, read, running_double
from tests.cluster.paced import LooseClient, PacedReplay


@dataclass(frozen=True)
class Group:
    """Scenarios that share a double.

    Attributes:
        scenarios: Their names.
        scale: How many times faster the cluster's own delays pass.
        arguments: Further arguments of the double.
        together: Whether they run side by side; else one after another, and what a recorded value stands for is kept.
        paces: Parts of commands and what is run in their place, see `PacedReplay`.
    """

    scenarios: tuple[str, ...]
    scale: float
    arguments: tuple[str, ...] = ()
    together: bool = False
    paces: Mapping[str, str] = field(default_factory=dict)


_ENDINGS = ("run_success", "run_failjob_exit42", "run_backofflimit0", "run_backofflimit", "run_successpolicy")
_ENDINGS += ("run_suspend_resume", "run_suspend_exit75_failjob", "run_suspend_exit75_excepted", "run_suspend_no_policy")
_ENDINGS += ("run_sigterm_grace", "job_delete_running", "run_deadline", "run_ttl", "run_unschedulable", "run_oom")
_ENDINGS += ("run_image_missing", "run_start_errors", "run_eviction")
GROUPS = {
    "endings": Group(_ENDINGS, 4.0, together=True, paces={"-lt 4 ]": "-lt 15 ]"}),
    "real time": Group(
        ("pod_logs", "run_restart_onfailure"),
        1.0,
        together=True,
        paces={"try; sleep 1": "try; sleep 0", "run; sleep 1": "run; sleep 3"},
    ),
    "preemption": Group(("run_priority_preemption",), 4.0),
    "lost nodes": Group(("run_node_loss", "run_node_loss_give_up", "run_partition_heal"), 10.0),
    "kueue": Group(
        ("kueue_lifecycle", "kueue_preemption", "kueue_webhook_down"), 4.0, ("--kueue",), paces={"-lt 6 ]": "-lt 20 ]"}
    ),
}

# (scenario, number) -> why the exchange is sent, but not compared.
LEFT_OUT: dict[tuple[str, int], str] = {
    ("run_start_errors", 3): "whether a container that ends at once is seen running is chance; the recording has both",
    ("kueue_lifecycle", 4): "events: how often Kueue says what a Workload waits for, and which of two pods that are "
    "deleted while they start is said to be killed, depends on where its rounds fall",
    ("kueue_preemption", 4): "events: how often Kueue says what a Workload waits for depends on where its rounds fall; "
    "two pods of one index are told apart by their suffix alone, which the replay does not know of events",
    ("pod_logs", 39): "the recorded runtime had removed the log of the previous run already; the double keeps it",
}

# What the notes of BED entries do, as content of the fault file; the first word that occurs decides.
BED: tuple[tuple[str, dict[str, object]], ...] = (
    ("kubelet of n2 killed", {"nodes": {"n2": "killed"}}),
    ("network of n2 cut", {"nodes": {"n2": "cut"}}),
    ("Kueue stopped", {"kueue_webhook": "down"}),
    ("started again", {}),
    ("restored", {}),
)
RECORDED = read()


def _replayed(group: Group) -> dict[str, list[str]]:
    """What differs, by scenario."""
    shared = Values()
    with running_double(BED, "--time-scale", str(group.scale), *group.arguments) as bed:
        client = LooseClient(bed.kubeconfig)

        def one(scenario: str) -> list[str]:
            values = Values() if group.together else shared
            return list(PacedReplay(client, values, LEFT_OUT, group.paces).run(RECORDED[scenario], bed.do))

        with ThreadPoolExecutor(len(group.scenarios) if group.together else 1) as pool:
            found = dict(zip(group.scenarios, pool.map(one, group.scenarios), strict=True))
    return {scenario: differences for scenario, differences in found.items() if differences}


@pytest.mark.parametrize("name", GROUPS)
def test_pods_behave_as_recorded(name: str) -> None:
    """Statuses, bodies, and the order of conditions and phases of every object."""
    assert not _replayed(GROUPS[name])


def test_what_is_left_out_exists() -> None:
    """Nothing is left out that the recording does not have."""
    known = {(name, exchange.seq) for name, exchanges in RECORDED.items() for exchange in exchanges}
    assert set(LEFT_OUT) <= known
