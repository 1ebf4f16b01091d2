"""Processes that work on a cluster bench, for tests that kill or stop them at any moment.

Children are forked from a small server process that has imported everything, so each costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.cluster_bench import ClusterBench, commit_run

from headway.errors import HeadwayError
from headway.training.follow import Follower, follow
from headway.training.reconcile import Reconciler
from tests.cluster.cluster_env import Admin, Cluster

_PRELOAD = [__name__, "headway.catalog.catalog", "headway.catalog.migrate", "headway.artifacts.store", "psycopg"]
_PRELOAD += ["headway.training.kubernetes.launcher", "kubernetes.client", "kubernetes.config"]


def place_of(bench: ClusterBench) -> dict[str, Any]:
    """What another process needs to work on the same bench."""
    return {
        "kubeconfig": str(bench.kubeconfig or bench.cluster.kubeconfig),
        "image": bench.cluster.image,
        "store": str(bench.cluster.store),
        "home": str(bench.home),
        "namespace": bench.namespace,
        "database_url": bench.database_url,
        "changes": bench.changes,
    }


def start(role: str, bench: ClusterBench, *arguments: Any) -> BaseProcess:  # noqa: ANN401
    """Start a process with a role: `ask`, `follow` or `reconcile`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    child = context.Process(target=main, args=(role, place_of(bench), arguments), daemon=True)
    child.start()
    return child


def main(role: str, place: dict[str, Any], arguments: tuple[Any, ...]) -> None:
    """Do what the role says, again and again; what is not there now may be there later."""
    kubeconfig = Path(place["kubeconfig"])
    cluster = Cluster(kubeconfig, place["image"], Path(place["store"]), None, Admin(kubeconfig))
    bench = ClusterBench(
        cluster, Path(place["home"]), place["namespace"], place["database_url"], changes=place["changes"]
    )
    while True:
        try:
            _work(role, bench, *arguments)
        except HeadwayError as error:
            print(f"{role}: {error}", flush=True)
        else:
            if role != "reconcile":
                return
        time.sleep(0.1)


def _work(role: str, bench: ClusterBench, *arguments: Any) -> None:  # noqa: ANN401
    launcher = bench.shared
    with bench.services() as services:
        match role:
            case "ask":
                seed, more = arguments
                run_id = commit_run(services, bench.home, seed, **more)
                Reconciler(services, launcher).run(run_id)
            case "follow":
                follow(services, launcher, arguments[0], Follower(lambda _: None, lambda _: None))
            case "reconcile":
                Reconciler(services, launcher).all()
            case _:
                raise ValueError(role)
