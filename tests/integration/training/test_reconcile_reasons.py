"""What the reconciler makes of reasons: waiting is kept, ends count as the table says, an absent launcher ends nothing.

The launcher is a double at the outer boundary: what a cluster answers here is tested with the launcher itself.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.training_bench import AS_OF, TrainingBench

from headway.catalog.errors import AttemptsSpent, RunRefused
from headway.catalog.run_facts import TrainingRun
from headway.loading import load_pipeline
from headway.services import Services
from headway.training.attempt import Accelerator
from headway.training.follow import Follower, follow
from headway.training.kubernetes.client import ManifestRefused
from headway.training.launch import KillFailed, LaunchError, LauncherUnavailable, Observation, Stray, Waiting
from headway.training.plan import Overrides, plan_run
from headway.training.reconcile import Action, Reconciler
from headway.training.submit import submit
from trainer.events import Event
from trainer.spec import AttemptSpec, RunSpec


@dataclass
class Scripted:
    """Answers each look with the next observation, the last one for ever; an exception is raised."""

    root: Path
    looks: list[Observation | LauncherUnavailable] = field(default_factory=list[Observation | LauncherUnavailable])
    asked: list[str] = field(default_factory=list[str])
    name: str = "scripted"
    accelerator: Accelerator = "cpu"
    refuses: LaunchError | None = None
    left: list[Stray] = field(default_factory=list[Stray])
    immortal: int = 0

    def submit(self, attempt: AttemptSpec, spec: RunSpec) -> None:
        self.asked.append(f"submit {attempt.attempt}")
        if self.refuses is not None:
            raise self.refuses

    def observe(self, run_id: str, attempt: int) -> Observation:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, LauncherUnavailable):
            raise look
        return look

    def stream(self, run_id: str, attempt: int, node: int, after: int, limit: int) -> list[Event]:
        return []

    def cancel(self, run_id: str, attempt: int, reason: str) -> None:
        self.asked.append(f"cancel {attempt}")

    def kill(self, run_id: str, attempt: int) -> None:
        self.asked.append(f"kill {attempt}")
        if attempt == self.immortal:
            raise KillFailed("pods/x is still there", "look at its finalizers")

    def capacity(self) -> int | None:
        return None

    def release(self, run_id: str, attempt: int) -> None:
        self.asked.append(f"release {attempt}")

    def strays(self) -> list[Stray]:
        if isinstance(self.looks[0], LauncherUnavailable):
            raise self.looks[0]
        return self.left

    def run_dir(self, run_id: str) -> Path:
        return self.root / run_id

    def artifact_dir(self, run_id: str, attempt: int, name: str) -> Path:
        return self.root / run_id / name

    def close(self) -> None:
        self.asked.append("close")


AWAY = LauncherUnavailable("the API server does not answer", "wait, or look at the cluster")
ABSENT = Observation("absent")


@pytest.fixture
def services(bench: TrainingBench) -> Iterator[Services]:
    with bench.services() as opened:
        yield opened


@pytest.fixture
def launcher(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path / "runs", [ABSENT])


@pytest.fixture
def run_id(bench: TrainingBench, services: Services, launcher: Scripted) -> str:
    plan = plan_run(services, load_pipeline(bench.folder), AS_OF, Overrides())
    return submit(services, launcher, plan, asker="person").run.run_id


def look(services: Services, launcher: Scripted, run_id: str, *looks: Observation) -> TrainingRun:
    for observation in looks:
        launcher.looks = [observation]
        Reconciler(services, launcher).run(run_id)
    return services.catalog.run(services.principal, run_id)


def waits(code: str, message: str) -> Observation:
    return Observation("starting", waiting=Waiting(code, message))


def ends(code: int | None, reason_code: str) -> Observation:
    return Observation("ended", code, f"it was {reason_code}", reason_code=reason_code)


def test_why_a_run_waits_is_told_once_and_shown(
    bench: TrainingBench, services: Services, launcher: Scripted, run_id: str
) -> None:
    reconciler = Reconciler(services, launcher)
    launcher.looks = [waits("waiting_for_quota", "0 of 2 GPUs are free")]
    told = [a for _ in range(3) for a in reconciler.run(run_id)]
    assert [(a.kind, a.detail) for a in told] == [("waiting", "waiting_for_quota: 0 of 2 GPUs are free")]
    run = services.catalog.run(services.principal, run_id)
    assert (run.last.state, run.last.waiting) == ("admitted", "waiting_for_quota: 0 of 2 GPUs are free")
    assert bench.json("runs", "show", run_id)["waiting"] == run.last.waiting
    assert "0 of 2 GPUs are free" in bench.run("runs", "list").output
    assert "waiting: waiting_for_quota: 0 of 2 GPUs are free" in bench.run("runs", "logs", run_id).output
    run = look(services, launcher, run_id, Observation("running"))
    assert (run.last.state, run.last.waiting) == ("running", None)


def test_a_launcher_that_is_away_ends_nothing_and_is_told_of(
    bench: TrainingBench, services: Services, launcher: Scripted, run_id: str
) -> None:
    look(services, launcher, run_id, Observation("running"))
    launcher.looks = [AWAY]
    actions = Reconciler(services, launcher).all()
    assert [(a.kind, a.detail) for a in actions] == [("unavailable", str(AWAY))] * 2
    assert services.catalog.run(services.principal, run_id).last.state == "running"


def test_a_follower_waits_out_a_launcher_that_is_away_and_is_told_once(
    services: Services, launcher: Scripted, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.training.follow._POLL_S", 0.01)
    launcher.looks = [AWAY, AWAY, AWAY, Observation("running"), AWAY, AWAY, ends(65, "code_failed")]
    told: list[Action] = []
    run = follow(services, launcher, run_id, Follower(lambda _: None, told.append))
    assert run.status == "failed"
    assert [action.kind for action in told] == ["unavailable", "running", "unavailable", "finish"]


def test_what_infrastructure_took_is_free_and_what_may_come_again_is_counted(
    bench: TrainingBench, services: Services, launcher: Scripted, run_id: str
) -> None:
    """The bench allows three attempts; the free ends before them cost nothing."""
    free = [(None, "node_lost"), (77, "evicted"), (75, "preempted_by_queue"), (75, "preempted")]
    counted = [(None, "out_of_memory"), (76, "hung"), (77, "peer_lost")]
    run = look(services, launcher, run_id, *(ends(*end) for end in free + counted))
    assert [a.reason_code for a in run.attempts] == [reason for _, reason in free + counted]
    assert [a.counts for a in run.attempts] == [False] * 4 + [True] * 3
    assert run.status == "failed"
    assert [asked for asked in launcher.asked if "submit" in asked] == [f"submit {n}" for n in range(1, 8)]
    assert [asked for asked in launcher.asked if "release" in asked] == [f"release {n}" for n in range(1, 8)]
    shown = bench.json("runs", "show", run_id)["attempt"][4]
    assert (shown["reason_code"], shown["retry"], shown["reason"]) == (
        "out_of_memory",
        "counted",
        "it was out_of_memory",
    )
    plan = plan_run(services, load_pipeline(bench.folder), AS_OF, Overrides())
    with pytest.raises(AttemptsSpent):
        submit(services, launcher, plan, asker="machine")


def test_what_can_never_fit_is_not_tried_again(
    bench: TrainingBench, services: Services, launcher: Scripted, run_id: str
) -> None:
    run = look(services, launcher, run_id, ends(None, "exceeds_quota"))
    assert (len(run.attempts), run.last.retry) == (1, "never")
    plan = plan_run(services, load_pipeline(bench.folder), AS_OF, Overrides())
    with pytest.raises(RunRefused, match="exceeds_quota"):
        submit(services, launcher, plan, asker="person")


REFUSED = ManifestRefused("spec.template.spec.priorityClassName: no such class\nspec.parallelism: too many", "mend it")


@pytest.mark.parametrize("attempts", [1, 2])
def test_what_the_cluster_refuses_ends_the_run_with_its_field_paths_and_is_never_sent_again(
    bench: TrainingBench, services: Services, launcher: Scripted, run_id: str, attempts: int
) -> None:
    """As the first attempt, found missing, or as one that follows another."""
    launcher.refuses = REFUSED
    look(services, launcher, run_id, *([ABSENT] if attempts == 1 else [ends(77, "evicted")]))
    run = look(services, launcher, run_id, ABSENT, ABSENT)
    assert (run.status, len(run.attempts)) == ("failed", attempts)
    assert (run.last.reason_code, run.last.retry, run.last.worker_seconds) == ("refused_manifest", "never", 0.0)
    assert run.last.reason is not None
    for words in ("spec.template.spec.priorityClassName: no such class", "spec.parallelism: too many"):
        assert words in run.last.reason
    # What was made of it before it was refused goes; nothing is asked for again.
    assert launcher.asked[-3:] == [f"submit {attempts}", f"kill {attempts}", f"release {attempts}"]
    assert bench.json("runs", "show", run_id)["attempt"][-1]["reason_code"] == "refused_manifest"
    plan = plan_run(services, load_pipeline(bench.folder), AS_OF, Overrides())
    with pytest.raises(RunRefused, match="priorityClassName"):
        submit(services, launcher, plan, asker="machine")
    launcher.refuses = None
    assert submit(services, launcher, plan, asker="person", retry=True).decision == "started"


def test_an_unfinished_submission_of_a_running_attempt_is_finished_and_not_ended(
    services: Services, launcher: Scripted, run_id: str
) -> None:
    look(services, launcher, run_id, Observation("running"))
    run = look(services, launcher, run_id, Observation("absent", supervisor_alive=True))
    assert (run.last.state, launcher.asked[-1]) == ("running", "submit 1")
    assert look(services, launcher, run_id, ABSENT).attempts[0].reason_code == "lost"


def test_a_home_that_is_not_mounted_ends_no_attempt(services: Services, launcher: Scripted, run_id: str) -> None:
    look(services, launcher, run_id, Observation("running"))
    shutil.rmtree(launcher.root)
    launcher.looks = [ABSENT]
    (action,) = Reconciler(services, launcher).run(run_id)
    assert (action.kind, "is not there" in action.detail) == ("unavailable", True)
    assert services.catalog.run(services.principal, run_id).last.state == "running"
    assert [asked for asked in launcher.asked if "kill" in asked] == []


def test_a_stray_that_cannot_be_ended_keeps_no_other_alive(services: Services, launcher: Scripted, run_id: str) -> None:
    launcher.looks = [Observation("running")]
    launcher.left, launcher.immortal = [(run_id, 7, "Pod x"), (run_id, 8, "Pod y")], 7
    actions = Reconciler(services, launcher).all()
    assert [(a.attempt, a.kind) for a in actions if a.kind != "running"] == [(7, "kill"), (7, "error"), (8, "kill")]


def test_a_look_that_takes_too_long_leaves_the_rest_for_the_next(
    services: Services, launcher: Scripted, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.looks, launcher.left = [Observation("running")], [(run_id, 8, "Pod y")]
    now = iter(range(0, 1_000, 30))
    monkeypatch.setattr("headway.training.reconcile.time.monotonic", lambda: float(next(now)))
    (action,) = Reconciler(services, launcher).all(within_s=20.0)
    assert (action.kind, "1 attempts were not looked at" in action.detail) == ("unavailable", True)
    assert [asked for asked in launcher.asked if "kill" in asked] == []


def test_looking_again_and_again_keeps_one_launcher_that_follows_meanwhile(
    bench: TrainingBench, launcher: Scripted, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods print and vanish between two looks: a launcher that was closed after each would see none of it."""
    launcher.looks = [Observation("running")]
    made: list[Scripted] = []
    looks: list[list[str]] = []

    def strays() -> list[Stray]:
        looks.append(list(launcher.asked))
        if len(looks) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return []

    monkeypatch.setattr(launcher, "strays", strays)
    monkeypatch.setattr("headway.training.launchers.launcher_for", lambda _: made.append(launcher) or launcher)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert bench.run("reconcile", "--watch", "1", "--alive", str(launcher.root / "alive")).exit_code == 0
        assert (launcher.root / "alive").exists()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (len(looks), len(made)) == (3, 1)
    assert not any("close" in asked for asked in looks)
    assert launcher.asked[-1] == "close"


def test_what_does_not_die_at_once_stops_no_follower(
    services: Services, launcher: Scripted, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.training.follow._POLL_S", 0.01)
    launcher.immortal = 1
    launcher.looks = [Observation("running", supervisor_stuck=True), ends(65, "code_failed")]
    told: list[Action] = []
    assert follow(services, launcher, run_id, Follower(lambda _: None, told.append)).status == "failed"
    assert [action.kind for action in told] == ["kill", "error", "finish"]


def test_what_does_not_run_yet_shows_that_the_cluster_does_not_answer(
    bench: TrainingBench, services: Services, launcher: Scripted, run_id: str
) -> None:
    other = LauncherUnavailable("another call did not answer", "")
    launcher.looks = [AWAY, other, waits("waiting_for_quota", "0 of 2"), other]
    told: list[str | None] = []
    for _ in range(4):
        Reconciler(services, launcher).run(run_id)
        told.append(bench.json("runs", "show", run_id)["waiting"])
    away = f"cluster_unreachable: {AWAY.message}"
    assert told == [away, away, "waiting_for_quota: 0 of 2", "cluster_unreachable: another call did not answer"]
    run = look(services, launcher, run_id, Observation("running"))
    assert (run.last.state, run.last.waiting) == ("running", None)
    assert bench.run("fsck").exit_code == 0
