"""Start and stop of everything that acts in the double: controllers, scheduler, kubelets, Kueue."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.cluster.double import gc, jobs, kueue, nodes, scheduler
from tests.cluster.double.kubelet import Kubelet
from tests.cluster.double.logs import PodLogs
from tests.cluster.double.network import Network
from tests.cluster.double.store import Object, Store


class FaultSource(Protocol):
    """What the fault file says, as the controllers ask it."""

    def node(self, name: str) -> str:
        """`ready`, `killed`, `partitioned` or `cut`."""
        ...

    def oom(self, pod: str) -> bool:
        """Whether the containers of a pod die as if out of memory."""
        ...

    def kueue_webhook(self) -> str:
        """`up` or `down`."""
        ...


@dataclass
class Options:
    """What the controllers need from the server's half.

    Attributes:
        state: Folder for logs and for the files of pods.
        network: The bridges that pods are connected to.
        faults: The fault file.
        issue_token: (namespace, service account) -> bearer token.
        admit_pod: Defaulting and admission of a new pod; raises ApiError.
        ca_certificate: PEM of the API server's authority.
        api_port: Port of the API server at the network's gateway.
        nodes: Number of nodes, named n1, n2, ...
        kueue: Whether Kueue runs.
        logs: The logs of all pods.
    """

    state: Path
    network: Network
    faults: FaultSource
    issue_token: Callable[[str, str], str]
    admit_pod: Callable[[Object], Object]
    ca_certificate: str
    api_port: int
    nodes: int = 2
    kueue: bool = False
    logs: PodLogs = field(init=False)
    kubelets: dict[str, Kubelet] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the folder of the logs."""
        self.logs = PodLogs(self.state / "logs")


def start_all(store: Store, options: Options) -> list[asyncio.Task[None]]:
    """Start every controller; the tasks run until `stop_all`."""
    names = [f"n{number + 1}" for number in range(options.nodes)]
    options.kubelets = {name: Kubelet(name, store, options) for name in names}
    options.logs.unreachable = lambda node: node in options.kubelets and not options.kubelets[node].answers
    running = [
        gc.run(store, options.ca_certificate),
        jobs.run(store, options.admit_pod),
        scheduler.run(store),
        nodes.run(store, options.kubelets, options.faults, options.network),
        *(kubelet.run() for kubelet in options.kubelets.values()),
    ]
    if options.kueue:
        running.append(kueue.run(store, options.faults))
    return [asyncio.create_task(one, name=one.__qualname__) for one in running]


async def stop_all(tasks: list[asyncio.Task[None]], options: Options) -> None:
    """End every controller, every process of every pod, and the network."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for kubelet in options.kubelets.values():
        await kubelet.close()
    await options.network.close()
