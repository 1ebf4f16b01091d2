"""Runs of toy ranks on a cluster: a catalog, a home that pods see, the launcher and the reconciler over them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from support.catalog_facts import payload
from support.registry_facts import prepare_inputs, run_facts
from support.toy_attempts import toy_spec

from headway.catalog.budgets import period_of
from headway.catalog.run_facts import RunEvent, TrainingRun
from headway.home import load_settings
from headway.services import Services, open_services
from headway.training.identity import CODE_ROOT
from headway.training.kubernetes.launcher import KubernetesLauncher
from headway.training.launch import Launcher
from headway.training.launchers import launcher_for
from headway.training.reconcile import Action, Reconciler
from headway.training.stage import store_code
from tests.cluster.cluster_env import Cluster, wait_until
from trainer.blobs import canonical_json
from trainer.events import Event, node_folder, read_events

BUDGET, BUDGET_LIMIT, RESERVED = "toys", 1_000_000, 600
KINDS = {
    "jobs": "/apis/batch/v1/namespaces/{}/jobs",
    "services": "/api/v1/namespaces/{}/services",
    "pods": "/api/v1/namespaces/{}/pods",
}


def toy_code_root(target: Path) -> Path:
    """A code tree whose ranks are `support.cluster_rank` instead of torch."""
    if not target.exists():
        shutil.copytree(CODE_ROOT / "trainer", target / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(Path(__file__).with_name("cluster_rank.py"), target / "trainer" / "worker.py")
        (target / "toy").mkdir()
        (target / "toy" / "model.py").write_text("")
    return target


@dataclass
class ClusterBench:
    """One home and one namespace of a cluster."""

    cluster: Cluster
    home: Path
    namespace: str
    database_url: str = ""
    tenant: str = "default"
    kind: type[KubernetesLauncher] = KubernetesLauncher
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    kubeconfig: Path | None = None
    opened: list[Launcher] = field(default_factory=list[Launcher])
    patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)

    @property
    def environment(self) -> dict[str, str]:
        """The settings of this bench as variables."""
        database = {"HEADWAY_DATABASE_URL": self.database_url} if self.database_url else {}
        return {
            "HEADWAY_HOME": str(self.home),
            "HEADWAY_PROFILE": "cluster",
            "HEADWAY_PLATFORM": str(self.write_platform()),
            "HEADWAY_TENANT": self.tenant,
            **database,
        }

    def write_platform(self) -> Path:
        """Write the platform profile; `changes` on top of what every test wants."""
        document: dict[str, Any] = {
            "namespace": self.namespace,
            "image": self.cluster.image,
            "volume": {"host_path": str(self.home), "mount_path": str(self.home)},
            "cpu": "100m",
            "memory": "256Mi",
            "shared_memory": "64Mi",
            "grace_s": 15,
            "node_lost_after_s": 10,
            "run_as_user": os.getuid() or 65532,
        }
        self.home.mkdir(parents=True, exist_ok=True)
        file, text = self.home / "platform.yaml", yaml.safe_dump({**document, **self.changes})
        if not file.exists() or file.read_text() != text:
            # Other processes read it at any moment.
            temporary = self.home / f".platform.{os.getpid()}.{threading.get_ident()}"
            temporary.write_text(text)
            temporary.replace(file)
        return file

    @contextmanager
    def services(self) -> Iterator[Services]:
        """Catalog, store and principal of this home."""
        with open_services(load_settings(self.environment)) as services:
            yield services

    def launcher(self) -> KubernetesLauncher:
        """A launcher over this home and namespace, as a process that has just started makes one."""
        self.patch.setenv("KUBECONFIG", str(self.kubeconfig or self.cluster.kubeconfig))
        launcher = cast("KubernetesLauncher", launcher_for(load_settings(self.environment)))
        # A mutant has the fields of the real one.
        launcher.__class__ = self.kind
        self.opened.append(launcher)
        return launcher

    def ask(self, seed: int = 1, **more: Any) -> str:  # noqa: ANN401 - arguments of `commit_run`
        """Commit the row of a run, with nothing started yet; its id."""
        with self.services() as services:
            return commit_run(services, self.home, seed, **more)

    def start(self, seed: int = 1, **more: Any) -> str:  # noqa: ANN401
        """Commit a run and reconcile it once, as whoever asks for one does."""
        run_id = self.ask(seed, **more)
        self.reconcile(run_id)
        return run_id

    def reconcile(self, run_id: str | None = None, launcher: Launcher | None = None) -> list[Action]:
        """Reconcile once: one run, or everything."""
        with self.services() as services:
            reconciler = Reconciler(services, launcher or self.shared)
            return reconciler.all() if run_id is None else reconciler.run(run_id)

    @property
    def shared(self) -> KubernetesLauncher:
        """The one launcher of a test that does not care for more."""
        for launcher in self.opened:
            if type(launcher) is self.kind:
                return cast("KubernetesLauncher", launcher)
        return self.launcher()

    def until(self, run_id: str, true_of: Callable[[TrainingRun], Any], what: str) -> TrainingRun:
        """Reconcile a run until something is true of it."""

        def look() -> TrainingRun | None:
            self.reconcile(run_id)
            run = self.run(run_id)
            return run if true_of(run) else None

        return wait_until(look, f"{what} of {run_id}")

    def finished(self, run_id: str) -> TrainingRun:
        """Reconcile a run to its end."""
        return self.until(run_id, lambda run: run.status != "open", "the end")

    def succeeded(self, run_id: str) -> TrainingRun:
        """Reconcile a run to its end, which has to be a good one."""
        run = self.finished(run_id)
        assert run.status == "succeeded", [(a.attempt, a.state, a.reason_code, a.reason) for a in run.attempts]
        return run

    def stepping(self, run_id: str, attempt: int = 1, steps: int = 1) -> None:
        """Reconcile until rank 0 of an attempt has made `steps` steps."""

        def stepped(_: TrainingRun) -> bool:
            return len([e for e in self.events(run_id, attempt) if e.kind == "step"]) >= steps

        self.until(run_id, stepped, f"step {steps} of attempt {attempt}")

    def run(self, run_id: str) -> TrainingRun:
        """The run as the catalog has it."""
        with self.services() as services:
            return services.catalog.run(services.principal, run_id)

    def recorded(self, run_id: str, *kinds: str) -> list[RunEvent]:
        """Events of a run as the catalog has them."""
        with self.services() as services:
            events = services.catalog.run_events(services.principal, run_id, limit=100_000)
        return [event for event in events if not kinds or event.kind in kinds]

    def run_dir(self, run_id: str) -> Path:
        """The folder of a run, where pods and tests see it."""
        return self.home / "runs" / "default" / run_id

    def attempt_file(self, run_id: str, attempt: int = 1) -> Path:
        """The description of an attempt."""
        return self.run_dir(run_id) / "attempts" / str(attempt) / "attempt.json"

    def events(self, run_id: str, attempt: int = 1, node: int = 0) -> list[Event]:
        """What a node has written to its stream."""
        return read_events(node_folder(self.attempt_file(run_id, attempt), node) / "events.jsonl", limit=1_000_000)

    def order(self, run_id: str, **orders: Any) -> None:  # noqa: ANN401
        """Tell the ranks of a run what to do from now on."""
        write_orders(self.run_dir(run_id), orders)

    def things(self, kind: str) -> list[dict[str, Any]]:
        """Objects of this namespace: jobs, services or pods."""
        return self.cluster.admin.items(KINDS[kind].format(self.namespace))

    def job(self) -> dict[str, Any]:
        """The one Job of this namespace."""
        (job,) = self.things("jobs")
        return job

    def pods(self, attempt: int = 1) -> dict[int, dict[str, Any]]:
        """The pods of an attempt by their index."""
        found = [p for p in self.things("pods") if p["metadata"]["labels"].get("headway.dev/attempt") == str(attempt)]
        return {int(p["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]): p for p in found}

    def names(self) -> dict[str, list[str]]:
        """Names of everything that stands in this namespace and that Headway could have made."""
        return {
            kind: sorted(t["metadata"]["name"] for t in self.things(kind) if t["metadata"]["name"].startswith("hw-"))
            for kind in KINDS
        }

    def empty(self) -> bool:
        """Whether nothing of Headway stands in this namespace."""
        return not any(self.names().values())

    def path(self, kind: str, name: str = "") -> str:
        """The path of a collection of this namespace, or of one object in it."""
        return KINDS[kind].format(self.namespace) + (f"/{name}" if name else "")

    def close(self) -> None:
        """End whatever a test left, threads and objects."""
        for launcher in self.opened:
            launcher.close()
        self.patch.undo()
        admin = self.cluster.admin
        for kind in ("jobs", "services", "pods"):
            for thing in self.things(kind):
                admin.delete(self.path(kind, thing["metadata"]["name"]), gracePeriodSeconds=0)
        admin.delete(f"/api/v1/namespaces/{self.namespace}")


def make_bench(cluster: Cluster, catalog: Path | str, **more: Any) -> ClusterBench:  # noqa: ANN401
    """A home and a namespace of their own; `catalog` is a migrated SQLite file to copy, or the URL of a database."""
    home = cluster.store / f"t{secrets.token_hex(4)}"
    home.mkdir()
    url = catalog if isinstance(catalog, str) else ""
    if isinstance(catalog, Path):
        shutil.copy(catalog, home / "catalog.db")
    bench = make_namespace(cluster, home, database_url=url, **more)
    with bench.services() as services:
        store_inputs(services)
    return bench


def make_namespace(cluster: Cluster, home: Path, **more: Any) -> ClusterBench:  # noqa: ANN401
    """A bench over a home that is there, in a namespace of its own."""
    namespace = f"hwt-{secrets.token_hex(4)}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    cluster.admin.send("POST", "/api/v1/namespaces", body)
    return ClusterBench(cluster, home, namespace, **more)


def store_inputs(services: Services) -> None:
    """A released delivery, its snapshot and a budget: what every toy run pins."""
    who = services.principal
    day = "2013-06-01"
    for name in (("manifest", "flights", day, 1), ("report", "suite", "good"), ("snapshot manifest", day, 1)):
        services.store.put_bytes(payload(*name))
    prepare_inputs(services.catalog, who)
    services.catalog.set_budget(who, None, BUDGET, period_of(services.catalog.clock()), "worker_seconds", BUDGET_LIMIT)


def commit_run(
    services: Services,
    home: Path,
    seed: int,
    *,
    nodes: int = 2,
    ranks: int = 1,
    pipeline: str = "toy",
    orders: Mapping[str, Any] | None = None,
    **restart: Any,  # noqa: ANN401 - fields of RestartSpec
) -> str:
    """Store code and spec of a toy run and ask for it; its id. Asked for again it is the same run."""
    code_root = toy_code_root(home / "toy-code")
    code = store_code(services.store, code_root, code_root / "toy", "toy")
    policy = {"grace_s": 5.0, "hang_floor_s": 30.0, "max_attempts": 4, **restart}
    spec = json.loads(canonical_json(toy_spec(nodes, ranks).to_json()))
    spec["pipeline"], spec["seed"], spec["restart"] = pipeline, seed, {**spec["restart"], **policy}
    spec["model"].update(code_digest=code.digest, code_manifest=code.manifest_digest)
    stored = services.store.put_bytes(canonical_json(spec), "application/json")
    who = services.principal
    pinned = services.catalog.current_snapshots(who, "flight_delay", ("2013-06-01",))["2013-06-01"].snapshot
    assert pinned is not None
    facts = run_facts(
        pinned.snapshot_id,
        seed,
        pipeline=pipeline,
        code_digest=code.digest,
        spec_digest=stored.digest,
        layout=spec["layout"],
        nodes=nodes,
        budget_id=BUDGET,
        max_attempts=policy["max_attempts"],
        blobs=(stored, *code.blobs),
    )
    run_id = facts.run_id(who.tenant)
    if orders is not None:
        write_orders(home / "runs" / "default" / run_id, orders)
    services.catalog.submit_run(
        who, None, facts, asker="person", retry=False, reserve_seconds=RESERVED, launcher="kubernetes"
    )
    return run_id


def write_orders(run_dir: Path, orders: Mapping[str, Any]) -> None:
    """Replace the orders of a run's ranks in one step."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / ".orders.new"
    temporary.write_text(json.dumps(dict(orders)))
    temporary.replace(run_dir / "orders.json")
