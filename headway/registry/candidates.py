"""From a succeeded run to judged model versions: evaluate on the month after `as_of`, register, judge.

The network is judged first. When a gate refuses it, the logistic regression that the same run packed under the same
contract is registered and judged in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from headway.artifacts.manifest import put_manifest, read_manifest
from headway.artifacts.store import Blob
from headway.catalog import FeatureSnapshot
from headway.catalog.registry_facts import ModelVersion, ModelVersionFacts, artifact_name
from headway.declaration import PipelineSpec
from headway.errors import HeadwayError
from headway.features.reading import read_values
from headway.loading import Pipeline
from headway.registry.contract import contract_hash, registered_contract
from headway.registry.dossier import check_dossier, collect_dossier
from headway.registry.evaluation import PARTITION, SCORES_FILE, kept_columns, rate_columns
from headway.registry.judge import Judgement, champion_of, judge_version, named_left_out, set_policy
from headway.registry.provenance import sign_provenance
from headway.registry.statements import signed_at
from headway.registry.text_candidates import TextEvaluationRun
from headway.registry.trial import copy_artifact
from headway.registry.verdicts import ArtifactCheck
from headway.registry.workbench import DEADLINE_S, Workbench
from headway.services import Services
from headway.training.plan import VALUES_ENTRY, SnapshotsMissing
from headway.training.trainer_process import run_trainer
from headway.training.window import declared_training, window_of
from trainer.blobs import Json, Manifest, ManifestEntry

if TYPE_CHECKING:
    from headway.catalog.registry_facts import ModelKind
    from headway.catalog.run_facts import TrainingRun
    from headway.registry.keys import KeyRing

_THREADS = 2
_TEXT_SEMANTICS = 1
REFERENCE_MODELS = ("historical_rate", "logistic", "gradient_boosting")


class NoSucceededRun(HeadwayError):
    """There is no trained model of this `as_of` to judge."""


@dataclass(frozen=True)
class EvaluatedMonth:
    """The snapshots that a model is judged on, and the refused partitions left out of them, each with its reason."""

    snapshots: tuple[FeatureSnapshot, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class Candidate:
    """A registered version and what the gates said of it now; `judgement` None: its signed verdicts still stand."""

    version: ModelVersion
    judgement: Judgement | None
    passed: bool


class CaseEvaluation(Protocol):
    """What a version is judged on; scores are made when they are first asked for."""

    pipeline: Pipeline
    snapshot_ids: list[str]
    left_out: Mapping[str, str]

    def try_artifact(self, folder: Path) -> ArtifactCheck:
        """See `Workbench.try_artifact`."""
        ...

    def scores(self, version: ModelVersion, champion: ModelVersion | None) -> Path:
        """A folder with the scores of `version`, of its references, and of the champion if there is one."""
        ...


def newest_run(services: Services, pipeline: str, as_of: str) -> TrainingRun:
    """The newest succeeded run of an `as_of`.

    Raises:
        NoSucceededRun: there is none.
    """
    found = [r for r in services.catalog.runs(services.principal, pipeline, as_of) if r.status == "succeeded"]
    if not found:
        raise NoSucceededRun(
            f"no training run of {pipeline!r}{f' for as_of {as_of}' if as_of else ''} has succeeded",
            "materialize its training_run first",
        )
    return max(found, key=lambda run: (run.last.ended_at or 0, run.run_id))


def judge_run(
    services: Services,
    keyring: KeyRing,
    pipeline: Pipeline,
    run: TrainingRun,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """Register and judge what a run made; the last candidate is the one to promote, if it passed.

    Asked for again, with the same months, champion and conditions, it finds the signed verdicts and evaluates nothing.

    Raises:
        NoSucceededRun: the run has not succeeded.
        SnapshotsMissing: a partition of the evaluated month has no snapshot, or too many were refused.
        TrainerFailed: the evaluation ended badly.
    """
    if run.status != "succeeded" or run.result is None:
        raise NoSucceededRun(f"run {run.run_id} is {run.status}", "materialize its training_run first")
    candidates: list[Candidate] = []
    with Workbench(services, run) as bench:
        evaluation = _evaluation(services, pipeline, run, bench, progress)
        kinds: tuple[ModelKind, ...] = ("network", "logistic") if pipeline.spec.text is None else ("language",)
        for kind in kinds:
            if artifact_name(kind) not in run.result.artifacts:
                continue
            version = register(services, keyring, pipeline, run, kind)
            set_policy(services, pipeline.spec, pipeline.name)
            candidates.append(_judge(services, keyring, evaluation, version))
            if candidates[-1].passed:
                break
            progress(f"{kind} (version {version.version}) is refused by its gates")
    return candidates


def _evaluation(
    services: Services, pipeline: Pipeline, run: TrainingRun, bench: Workbench, progress: Callable[[str], None]
) -> CaseEvaluation:
    if pipeline.spec.text is not None:
        return TextEvaluationRun(services, pipeline, run, bench, progress)
    month = evaluated_month(services, pipeline.spec, run.facts.partition)
    for partition, reason in month.left_out.items():
        progress(f"left out of the evaluation: {partition} ({reason})")
    return _MonthEvaluation(services, pipeline, run, bench, month, progress)


def register(
    services: Services, keyring: KeyRing, pipeline: Pipeline, run: TrainingRun, kind: ModelKind
) -> ModelVersion:
    """Register one artifact of a run, with its contract completed and its provenance signed; a repeat finds it."""
    assert run.result is not None
    digest = run.result.artifacts[artifact_name(kind)]
    manifest = read_manifest(services.store, digest)
    snapshot = services.catalog.snapshot(services.principal, run.facts.inputs[0])
    features = services.catalog.feature_set(services.principal, snapshot.feature_set, snapshot.feature_set_version)
    artifact: Json = json.loads(services.store.get_bytes(manifest.entry("contract.json").sha256))
    contract = registered_contract(artifact, features, _semantics(pipeline.spec), pipeline.spec.serving)
    version = services.catalog.register_model_version(
        services.principal,
        None,
        ModelVersionFacts(
            model_id=pipeline.name,
            pipeline=pipeline.name,
            kind=kind,
            run_id=run.run_id,
            manifest_digest=digest,
            contract=contract,
            contract_hash=contract_hash(contract),
            feature_set=features.feature_set,
            feature_set_version=features.version,
            as_of=run.facts.partition,
            metadata={"code_digest": run.facts.code_digest, "worker_seconds": run.worker_seconds},
            blobs=_blobs(services, manifest),
        ),
    )
    sign_provenance(services, keyring, version, run)
    return version


def _semantics(spec: PipelineSpec) -> int:
    """The declared version of what the inputs mean; text means itself."""
    return spec.features.version if spec.text is None else _TEXT_SEMANTICS


def _blobs(services: Services, manifest: Manifest) -> tuple[Blob, ...]:
    whole = put_manifest(services.store, manifest)
    return (*(Blob(e.sha256, e.size, e.media_type) for e in manifest.entries), whole)


def evaluated_month(services: Services, spec: PipelineSpec, as_of: str) -> EvaluatedMonth:
    """The month after `as_of`, later than everything that was learned from, and what of it was refused.

    Raises:
        SnapshotsMissing: a partition was never built, or more were refused than `training.max_missing_share` allows.
    """
    partitions = window_of(spec, as_of).evaluate
    states = services.catalog.current_snapshots(services.principal, spec.name, partitions)
    absent = [p for p in partitions if p not in states]
    if absent:
        raise SnapshotsMissing(
            f"{len(absent)} of the {len(partitions)} partitions of the month after as_of {as_of} have no snapshot: "
            f"{_some(absent)}",
            f"materialize feature_snapshot for {absent[0]} to {absent[-1]}: a model is judged on later rows",
        )
    refused = {p: states[p].reason for p in partitions if states[p].snapshot is None}
    found = tuple(s for p in partitions if (s := states[p].snapshot) is not None)
    if not found or len(refused) > declared_training(spec).max_missing_share * len(partitions):
        raise SnapshotsMissing(
            f"{len(refused)} of the {len(partitions)} snapshots of the month after as_of {as_of} were refused: "
            + _some([f"{p} ({reason})" for p, reason in refused.items()]),
            "mend them, or raise training.max_missing_share to evaluate without them",
        )
    return EvaluatedMonth(found, refused)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"


def _judge(services: Services, keyring: KeyRing, evaluation: CaseEvaluation, version: ModelVersion) -> Candidate:
    champion = champion_of(services, version)
    standing = _standing(services, keyring, evaluation, version, champion)
    if standing is not None:
        return Candidate(version, None, standing)
    judgement = judge_version(
        services,
        keyring,
        evaluation.pipeline.spec,
        version,
        evaluation.scores(version, champion),
        snapshots=evaluation.snapshot_ids,
        left_out=evaluation.left_out,
        champion=champion,
        try_artifact=evaluation.try_artifact,
    )
    return Candidate(version, judgement, judgement.passed)


def _standing(
    services: Services,
    keyring: KeyRing,
    evaluation: CaseEvaluation,
    version: ModelVersion,
    champion: ModelVersion | None,
) -> bool | None:
    """Whether every gate passed by signed verdicts on this very case that are young enough; None: judge again."""
    checked = check_dossier(collect_dossier(services, version), keyring.trust())
    if checked.policy is None:
        return None
    against = None if champion is None else f"{champion.model_id}@{champion.version}"
    for gate in checked.policy.applicable(version.kind):
        found = checked.statements.get(gate.name)
        if found is None:
            return None
        metrics = found.predicate.get("metrics")
        month = {} if not isinstance(metrics, dict) else {n: metrics.get(n) for n in ("snapshots", "left_out")}
        wanted = {"snapshots": sorted(evaluation.snapshot_ids), "left_out": named_left_out(evaluation.left_out)}
        same_case = month == wanted and found.predicate.get("champion") == against
        if not same_case or keyring.clock() - signed_at(found) > checked.policy.evidence_max_age // 2:
            return None
    return not checked.unpassed


class _MonthEvaluation:
    """Scores of the evaluated month, made when first asked for and kept until the judgement is over."""

    def __init__(
        self,
        services: Services,
        pipeline: Pipeline,
        run: TrainingRun,
        bench: Workbench,
        month: EvaluatedMonth,
        progress: Callable[[str], None],
    ) -> None:
        self.pipeline = pipeline
        self.snapshot_ids = [s.snapshot_id for s in month.snapshots]
        self.left_out = month.left_out
        self._services = services
        self._run = run
        self._snapshots = month.snapshots
        self._bench = bench
        self._progress = progress
        self._table: pa.Table | None = None

    def try_artifact(self, folder: Path) -> ArtifactCheck:
        """See `Workbench.try_artifact`."""
        return self._bench.try_artifact(folder)

    def scores(self, version: ModelVersion, champion: ModelVersion | None) -> Path:
        """A folder with the scores of `version` as the candidate, and of the champion if there is one."""
        table = self._table = self._evaluate() if self._table is None else self._table
        if version.kind == "logistic":
            place = table.column_names.index("score_candidate")
            table = table.set_column(place, "score_candidate", table.column("score_logistic"))
        if champion is not None:
            self._progress(f"scoring {table.num_rows:,} rows with the champion, version {champion.version}")
            table = table.append_column("score_champion", self._champion_scores(champion))
        target = self._bench.folder / f"scores-{version.version}"
        target.mkdir()
        pq.write_table(table, target / SCORES_FILE)
        return target

    def _champion_scores(self, champion: ModelVersion) -> pa.Array:
        from headway.serving.scoring import score_rows

        rows = pa.concat_tables([read_values(self._services, s) for s in self._snapshots], promote_options="permissive")
        return pa.array(score_rows(self._services, champion, rows))

    def _evaluate(self) -> pa.Table:
        assert self._run.result is not None
        artifacts: dict[str, Json] = {}
        for name, role in (("network", "candidate"), ("logistic", "logistic")):
            if name in self._run.result.artifacts:
                folder = self._bench.folder / name
                copy_artifact(self._services.store, self._run.result.artifacts[name], folder)
                artifacts[role] = str(folder)
        artifacts.setdefault("candidate", artifacts.get("logistic"))
        self._progress(
            f"evaluating on {sum(s.rows for s in self._snapshots):,} rows of {self._snapshots[0].partition} to "
            f"{self._snapshots[-1].partition}, beside {', '.join(REFERENCE_MODELS)}"
        )
        plan: dict[str, Json] = {
            "train": {
                "spec": self._bench.spec.to_json(),
                "store_root": str(self._services.store.root),
                "code_root": str(self._bench.code()),
            },
            "rows": [str(self._values_path(s)) for s in self._snapshots],
            "keep": list(kept_columns(self.pipeline.spec)),
            "artifacts": artifacts,
            "historical_rate": rate_columns(self.pipeline.spec),
            "reference_models": list(REFERENCE_MODELS),
        }
        (self._bench.folder / "plan.json").write_text(json.dumps(plan))
        output = self._bench.folder / "evaluation"
        arguments = ["--plan", str(self._bench.folder / "plan.json"), "--output", str(output)]
        run_trainer("trainer.evaluate", arguments, self._bench.code(), DEADLINE_S, _THREADS)
        report = json.loads((output / "report.json").read_text())
        self._progress(
            f"evaluated: {report['labelled_rows']:,} labelled rows; seconds "
            + ", ".join(f"{part} {seconds:.1f}" for part, seconds in report["seconds"].items())
        )
        table = pq.read_table(output / SCORES_FILE)
        # One file of rows per snapshot, in this order: each row's own partition, which is its block when it is a day.
        keys = [s.partition for s in self._snapshots for _ in range(s.rows)]
        return table.append_column(PARTITION, pa.array(keys, pa.string()))

    def _values_path(self, snapshot: FeatureSnapshot) -> Path:
        entry: ManifestEntry = read_manifest(self._services.store, snapshot.manifest_digest).entry(VALUES_ENTRY)
        return self._services.store.read_path(entry.sha256)
