"""Computes a finished run once more, from what it pinned, and says how far that comes to the same.

The replay runs in a folder of its own, in fresh processes, and publishes nothing: no row, no artifact, no checkpoint.
Whatever would make its bits another matter (code, versions, threads, kind of CPU) is looked at before anything is
computed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.artifacts.errors import StoreError
from headway.artifacts.manifest import read_manifest
from headway.errors import HeadwayError
from headway.services import Services
from headway.training.attempt import attempt_spec
from headway.training.claims import TOLERANCE, Level, claimed_level
from headway.training.identity import CODE_ROOT, environment
from headway.training.launch import Launcher
from headway.training.local import LocalLauncher
from headway.training.reconcile import nodes_of
from headway.training.stage import StagedCodeDiffers, stage_code
from headway.training.tensors import StoredTensor, differences, read_tensors
from trainer.blobs import InvalidManifest, Json, digest_json
from trainer.events import Event, cpu_model
from trainer.spec import RunSpec, parse_run

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent, TrainingRun

Verdict = Literal["bit_exact", "within_tolerance", "diverged", "environment_mismatch"]

STEP_EVENTS = "TRAINER_STEP_EVENT_EVERY_S"
_POLL_S = 0.2
_PAGE = 1_000
_STRENGTH: Mapping[Verdict, int] = {"bit_exact": 2, "within_tolerance": 1, "diverged": 0}
_NEEDED: Mapping[Level, int] = {"bit": 2, "tolerance": 1, "statistical": 0}


class ReplayImpossible(HeadwayError):
    """A run that did not succeed, whose facts are gone, or whose replay itself failed."""


@dataclass(frozen=True)
class Told:
    """What a run told of one moment: `loss` and `grad_norm` of a step, or an epoch's losses."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Replay:
    """The answer. `step` and `tensor` name a divergence, `what` what of the environment is another.

    `eps` is the largest difference of a loss or gradient norm that was told, or of a tensor. `steps` and `tensors` say
    how much was compared.
    """

    verdict: Verdict
    claimed: Level
    eps: float = 0.0
    step: int | None = None
    tensor: str = ""
    what: str = ""
    steps: int = 0
    tensors: int = 0

    @property
    def as_claimed(self) -> bool:
        """Whether the run came to what it claims."""
        return self.verdict in _STRENGTH and _STRENGTH[self.verdict] >= _NEEDED[self.claimed]

    def in_words(self) -> str:
        """The answer in one line, such as `within_tolerance(3.6e-07)`."""
        inside = {
            "bit_exact": "",
            "within_tolerance": f"({self.eps:.2g})",
            "diverged": f"(step {self.step}, {self.tensor})",
            "environment_mismatch": f"({self.what})",
        }[self.verdict]
        return f"{self.verdict}{inside}"


def replay(
    services: Services, launcher: Launcher, run: TrainingRun, scratch: Path, tell: Callable[[str], None]
) -> Replay:
    """Compute a run again below `scratch`, and compare.

    Args:
        services: where the run's facts and artifacts are; nothing is written there.
        launcher: where the run's own checkpoints lie.
        run: a run that succeeded.
        scratch: an empty folder, for the caller to remove.
        tell: is given a line for people now and then.

    Raises:
        ReplayImpossible: the run did not succeed, or the replay did not.
    """
    if run.status != "succeeded" or run.result is None:
        raise ReplayImpossible(f"run {run.run_id} is {run.status}", "only a run that succeeded can be replayed")
    spec = parse_run(services.store.get_bytes(run.facts.spec_digest))
    claimed = claimed_level(spec, run.attempts)
    told = list(_of_catalog(services, run))
    problem = _environment_problem(services, run, spec, told) or _code_problem(services, spec, scratch)
    if problem:
        return Replay("environment_mismatch", claimed, what=problem)
    tell(f"claimed: {claimed}; code, versions, threads and CPU are those of the run")
    nodes = nodes_of(run.last) if claimed == "bit" else spec.layout.nodes
    again = _compute(services, run, spec, nodes, scratch, tell)
    same_layout = all(nodes_of(a) == nodes for a in run.attempts)
    pairs = list(_tensor_pairs(services, run, launcher.run_dir(run.run_id), scratch, same_layout))
    return compare(_moments(told), _moments(again), pairs, claimed, TOLERANCE[spec.precision])


TensorPair = tuple[int, Mapping[str, StoredTensor], Mapping[str, StoredTensor]]


def compare(
    first: Mapping[str, Told], again: Mapping[str, Told], tensors: list[TensorPair], claimed: Level, tolerance: float
) -> Replay:
    """Compare what two computations of one run told, and the tensors that they kept.

    Args:
        first: what the run told, by a name of the moment that both sides use.
        again: what the replay told.
        tensors: (step, tensors of the run, tensors of the replay), earliest first.
        claimed: the run's claim.
        tolerance: how far losses and gradient norms (these relative to their size above 1) may be apart.
    """
    shared = sorted({*first} & {*again}, key=lambda name: first[name].step)
    counted = Replay("bit_exact", claimed, steps=len(shared), tensors=sum(len({*a, *b}) for _, a, b in tensors))
    eps, where = 0.0, None
    for name in shared:
        both = first[name].values, again[name].values
        distance, value = max(((_apart(*both, key), key) for key in both[0]), default=(0.0, ""))
        eps = max(eps, distance)
        if distance > tolerance and where is None:
            where = (first[name].step, value)
    changed = [(step, found) for step, a, b in tensors if (found := list(differences(a, b)))]
    if where is None and changed and claimed == "bit":
        eps = max(eps, *(d.size for _, found in changed for d in found))
        if eps > tolerance:
            step, found = changed[0]
            where = (step, max(found, key=lambda d: d.size).name)
    elif where is not None and changed:
        after = [(step, found) for step, found in changed if step >= where[0]] or changed
        where = (where[0], max(after[0][1], key=lambda d: d.size).name)
    if where is not None:
        return replace(counted, verdict="diverged", eps=eps, step=where[0], tensor=where[1])
    if eps > 0.0 or changed:
        return replace(counted, verdict="within_tolerance", eps=eps)
    return counted


def _apart(a: Mapping[str, float], b: Mapping[str, float], key: str) -> float:
    left, right = a[key], b.get(key, math.nan)
    if left == right:
        return 0.0
    scale = max(1.0, abs(left)) if key == "grad_norm" else 1.0
    distance = abs(left - right) / scale
    return distance if math.isfinite(distance) else math.inf


def _environment_problem(services: Services, run: TrainingRun, spec: RunSpec, told: list[RunEvent]) -> str:
    """What of this machine is not what the run was computed with; "" when all is."""
    here = environment()
    if digest_json(here) != run.facts.environment_digest:
        return _what_changed(services, run.facts.environment_digest, here)
    recorded = [event.data for event in told if event.kind == "environment"]
    for facts in recorded[-1:]:
        for name, now in (("threads", spec.threads), ("cpu", cpu_model())):
            if facts.get(name) != now:
                return f"{name}: {facts.get(name)} then, {now} now"
    return ""


def _what_changed(services: Services, digest: str, here: Mapping[str, Json]) -> str:
    try:
        then: dict[str, Any] = json.loads(services.store.get_bytes(digest))
    except (StoreError, ValueError):
        return "environment: another digest, and what it named is not kept"
    before, now = dict(_flat(then)), dict(_flat(here))
    changed = [
        f"{n}: {before.get(n)} then, {now.get(n)} now" for n in sorted({*before, *now}) if before.get(n) != now.get(n)
    ]
    return "; ".join(changed)


def _flat(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield name, str(value)


def _code_problem(services: Services, spec: RunSpec, scratch: Path) -> str:
    try:
        stage_code(services.store, spec.model.code_manifest, scratch / "code")
    except (StoreError, InvalidManifest, StagedCodeDiffers) as error:
        return f"code: {error}"
    return ""


def _compute(
    services: Services, run: TrainingRun, spec: RunSpec, nodes: int, scratch: Path, tell: Callable[[str], None]
) -> list[Event]:
    """Run the one attempt of the replay to its end; what its first node told."""
    launcher = LocalLauncher(scratch / "runs", services.store.root, CODE_ROOT)
    run_dir = launcher.run_dir(run.run_id)
    run_dir.mkdir(parents=True)
    (scratch / "code").rename(run_dir / "code")
    where = {"run_dir": run_dir, "store_root": services.store.root}
    plain = attempt_spec(spec, run.run_id, 1, 1, nodes=nodes, accelerator=launcher.accelerator, **where)
    attempt = replace(plain, environment={**plain.environment, STEP_EVENTS: "0"})
    told: list[Event] = []
    try:
        launcher.submit(attempt, spec)
        while True:
            seen = launcher.observe(run.run_id, 1)
            while page := launcher.stream(run.run_id, 1, 0, len(told), _PAGE):
                told += page
                for event in page:
                    if event.kind == "epoch":
                        tell(
                            f"replayed to step {event.data.get('step')}: validation loss {event.data.get('valid_loss')}"
                        )
            if seen.state == "ended":
                break
            time.sleep(_POLL_S)
    finally:
        launcher.kill(run.run_id, 1)
    if seen.code != 0:
        raise ReplayImpossible(
            f"the replay ended with {seen.code}: {seen.cause}",
            "the run itself ended well: look at what this machine lacks",
        )
    return told


def _of_catalog(services: Services, run: TrainingRun) -> Iterator[RunEvent]:
    after = 0
    kinds = ("step", "epoch", "environment")
    while page := services.catalog.run_events(services.principal, run.run_id, after=after, limit=_PAGE, kinds=kinds):
        yield from page
        after = page[-1].seq


def _moments(events: list[RunEvent] | list[Event]) -> dict[str, Told]:
    """What was told, by step and by epoch; what a later attempt computed again counts as it came last."""
    found: dict[str, Told] = {}
    for event in events:
        step, epoch = event.data.get("step"), event.data.get("epoch")
        if event.kind == "step" and isinstance(step, int):
            found[f"step {step}"] = Told(step, _numbers(event.data, ("loss", "grad_norm")))
        elif event.kind == "epoch" and isinstance(step, int):
            found[f"judged {step}"] = Told(step, _numbers(event.data, ("train_loss", "valid_loss")))
        elif event.kind == "epoch" and isinstance(epoch, int):
            found[f"epoch {epoch}"] = Told(epoch, _numbers(event.data, ("train_loss", "valid_loss")))
    return found


def _numbers(data: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    return {name: float(data[name]) for name in names if isinstance(data.get(name), int | float)}


def _tensor_pairs(
    services: Services, run: TrainingRun, run_dir: Path, scratch: Path, same_layout: bool
) -> Iterator[TensorPair]:
    """Tensors of both sides: of checkpoints that both kept (on one layout), and of the exported network."""
    assert run.result is not None
    own = LocalLauncher(scratch / "runs", services.store.root, CODE_ROOT)
    if same_layout:
        mine, theirs = run_dir / "checkpoints", own.run_dir(run.run_id) / "checkpoints"
        for name in sorted(p.name for p in mine.glob("step-????????") if (theirs / p.name).is_dir()):
            yield int(name[5:]), _folder_tensors(mine / name), _folder_tensors(theirs / name)
    if "network" in run.result.artifacts:
        manifest = read_manifest(services.store, run.result.artifacts["network"])
        folder = own.artifact_dir(run.run_id, 1, "network")
        for entry in manifest.entries:
            if entry.name.endswith(".safetensors"):
                stored, again = services.store.get_bytes(entry.sha256), (folder / entry.name).read_bytes()
                yield run.result.best_step or 0, read_tensors(stored), read_tensors(again)


def _folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    return {
        f"{file.stem}:{name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in read_tensors(file.read_bytes()).items()
    }
