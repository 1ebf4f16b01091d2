"""A logistic regression written by hand, registered and promoted: something that serves, without training it."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
from support.registry_bench import write_scores
from support.registry_cases import scored
from support.serving_bench import DAYS, opened, pipeline_of, requests_for, write_serving_bench
from support.workbench import Workbench

from headway.artifacts.manifest import manifest_entry, put_manifest
from headway.artifacts.store import Blob
from headway.catalog import FeatureSnapshot
from headway.catalog.registry_facts import Endpoint, ModelVersion, ModelVersionFacts
from headway.catalog.run_facts import RunFacts, RunResult
from headway.declaration import EvaluationSpec, GateSpec, PromotionSpec
from headway.loading import Pipeline
from headway.registry.judge import champion_of, judge_version
from headway.registry.keys import KeyRing
from headway.registry.promote import promote
from headway.registry.provenance import sign_provenance
from headway.registry.verdicts import ArtifactCheck
from headway.services import Services
from headway.training.identity import CODE_ROOT
from headway.training.stage import store_code
from trainer.blobs import Json, Manifest, canonical_json, digest_bytes, digest_json
from trainer.spec import DataFile, DataSpec, ModelSpec, RunSpec

CATEGORICAL = {"k": ("a", "b", "c")}
NUMERIC = {"size": "int64", "doubled": "int64", "recent__mean_2h": "float64", "newest__value": "float64"}
GATES = ("contract", "finite_outputs", "leakage_proof")


def serve(bench: Workbench, days: Sequence[str], seed: int = 0, reference: bytes = b"{}") -> Endpoint:
    """Promote a version to the endpoint that bears the pipeline's name; snapshots of `days` count as its training.

    `reference` is its artifact's `reference.json`; the empty one holds no histograms.
    """
    snapshots = [snapshot_of(bench, day) for day in days]
    pipeline = pipeline_of(bench)
    with opened(bench) as services:
        version = register(services, pipeline, snapshots, seed, reference)
        judge(bench, services, version)
        return promote(services, keys_of(bench), version.model_id, version.model_id, version.version)


@dataclass(frozen=True)
class Served:
    """A bench whose version answered the requests of three days: answers by the command line, in their order."""

    bench: Workbench
    stored: pa.Table
    answers: list[dict[str, Any]]

    def copied(self, to: Path) -> Workbench:
        """The bench with a home of its own."""
        shutil.copytree(self.bench.folder.parent, to, dirs_exist_ok=True)
        return Workbench(to / "pipeline", to / "home")

    def explained(self, row: int, *more: str) -> dict[str, Any]:
        """What `explain --json` says of the answer to a row of the snapshots."""
        return explained(self.bench, self.answers[row]["prediction_id"], *more)


def explained(bench: Workbench, prediction_id: str, *more: str) -> dict[str, Any]:
    """What `explain --json` says."""
    told = bench.run("explain", prediction_id, "--pipeline", str(bench.folder), "--json", *more)
    assert told.exit_code == 0, told.output
    return json.loads(told.stdout)


def asked(bench: Workbench, file: Path, *more: str) -> Any:  # noqa: ANN401
    """`headway predict` of a file."""
    return bench.run("predict", "--file", str(file), "--pipeline", str(bench.folder), *more)


def make_served(root: Path) -> Served:
    """Ingest, build, promote, and ask for every row of the bench's days in a mixed order."""
    bench = write_serving_bench(root)
    bench.ingest("data", "register", "labels")
    stored = pa.concat_tables([bench.table(day) for day in DAYS]).unify_dictionaries()
    assert serve(bench, DAYS).stable == 1
    file = bench.folder.parent / "requests.parquet"
    mixed = np.random.default_rng(3).permutation(stored.num_rows)
    pq.write_table(requests_for(pipeline_of(bench), stored).take(pa.array(mixed)), file)
    output = bench.folder.parent / "answers.json"
    result = asked(bench, file, "--output", str(output))
    assert result.exit_code == 0, result.output
    answers = json.loads(output.read_text())["predictions"]
    return Served(bench, stored, [answers[i] for i in np.argsort(mixed)])


def register(
    services: Services,
    pipeline: Pipeline,
    snapshots: Sequence[FeatureSnapshot],
    seed: int = 0,
    reference: bytes = b"{}",
) -> ModelVersion:
    """A registered version of a run that is recorded as succeeded."""
    manifest, contract, blobs = _artifact(services, seed, reference)
    catalog, who = services.catalog, services.principal
    facts = _run_facts(services, pipeline, snapshots, seed)
    attempt = catalog.submit_run(
        who, None, facts, asker="person", retry=False, reserve_seconds=1, launcher="local"
    ).attempt
    assert attempt is not None
    run = catalog.finish_attempt(
        who,
        None,
        attempt.run_id,
        attempt.attempt,
        attempt.token,
        state="succeeded",
        reason=None,
        code=0,
        worker_seconds=12.5,
        result=RunResult({"logistic": manifest}, {"valid_auc": 0.7}, None, blobs),
    )
    return catalog.register_model_version(
        who,
        None,
        ModelVersionFacts(
            model_id=pipeline.name,
            pipeline=pipeline.name,
            kind="logistic",
            run_id=run.run_id,
            manifest_digest=manifest,
            contract=contract,
            contract_hash=digest_json(contract),
            feature_set=snapshots[0].feature_set,
            feature_set_version=snapshots[0].feature_set_version,
            as_of=facts.partition,
            metadata={},
            blobs=blobs,
        ),
    )


def judge(bench: Workbench, services: Services, version: ModelVersion) -> None:
    """Sign the version's provenance and the verdicts of three gates with the bench's keys, on scores that are drawn."""
    keys = keys_of(bench)
    sign_provenance(services, keys, version, services.catalog.run(services.principal, version.run_id))
    spec = pipeline_of(bench).spec.model_copy(
        update={
            "evaluation": EvaluationSpec(historical_rate=("k",), resamples=100),
            "promotion": PromotionSpec(gates=tuple(GateSpec(gate=g) for g in GATES), allow_immediate=True),
        }
    )
    champion = champion_of(services, version)
    with TemporaryDirectory() as folder:
        write_scores(Path(folder), scored(rows=60, days=3, skill={} if champion is None else {"champion": 2.0}))
        judge_version(
            services,
            keys,
            spec,
            version,
            Path(folder),
            snapshots=(),
            champion=champion,
            try_artifact=lambda _: ArtifactCheck(weights_only=True, finite_outputs=True),
        )


def keys_of(bench: Workbench) -> KeyRing:
    """The keys of a bench's home."""
    return KeyRing(bench.home / "keys")


def snapshot_of(bench: Workbench, day: str) -> FeatureSnapshot:
    """The snapshot of a day, built first."""
    snapshot_id = bench.outcome(day)["snapshot_id"]
    with opened(bench) as services:
        return services.catalog.snapshot(services.principal, snapshot_id)


def _run_facts(services: Services, pipeline: Pipeline, snapshots: Sequence[FeatureSnapshot], seed: int) -> RunFacts:
    code = store_code(services.store, CODE_ROOT, pipeline.folder, pipeline.name)
    files = tuple(DataFile(s.partition, s.content_digest, 1, s.rows) for s in snapshots)
    data = DataSpec(files, ("label_id",), "target", "t", "t", 2, 1, tuple(CATEGORICAL), tuple(NUMERIC))
    model = ModelSpec("trainer/models/logistic.py", "none", code.digest, code.manifest_digest)
    spec = services.store.put_bytes(canonical_json(RunSpec(pipeline.name, data, model, seed).to_json()))
    return RunFacts(
        pipeline=pipeline.name,
        partition="2026-03-06",
        inputs=tuple(s.snapshot_id for s in snapshots),
        datasets=tuple({(i.dataset, i.version, i.content_digest) for s in snapshots for i in s.inputs}),
        code_digest=code.digest,
        code_dirty=False,
        environment_digest=digest_bytes(b"environment"),
        config_digest=digest_bytes(b"configuration"),
        spec_digest=spec.digest,
        seed=seed,
        repeat=0,
        layout={},
        nodes=1,
        budget_id=None,
        max_attempts=1,
        note=None,
        dagster_run_id=None,
        blobs=(spec, *code.blobs),
    )


def _artifact(services: Services, seed: int, reference: bytes) -> tuple[str, dict[str, Json], tuple[Blob, ...]]:
    """Manifest digest, contract and blobs of a logistic regression with drawn weights."""
    rng = np.random.default_rng(seed)
    categorical: list[Json] = [
        {"name": n, "type": "string", "required": True, "nullable": True, "values": list(v)}
        for n, v in CATEGORICAL.items()
    ]
    numeric: list[Json] = [{"name": n, "type": t, "required": True, "nullable": True} for n, t in NUMERIC.items()]
    contract: dict[str, Json] = {
        "format": "headway.contract/1",
        "inputs": [*categorical, *numeric],
        "output": {"name": "probability", "type": "float64", "range": [0, 1]},
        "feature_set": None,
        "semantics_version": 1,
    }
    encoding: dict[str, Json] = {
        "categorical": [{"name": n, "type": "string", "values": list(v)} for n, v in CATEGORICAL.items()],
        "numeric": [{"name": n, "type": t, "mean": 60.0, "std": 40.0, "missing": True} for n, t in NUMERIC.items()],
    }
    model: dict[str, Json] = {
        "format": "headway.model/1",
        "kind": "logistic",
        "factory": None,
        "inputs": encoding,
        "output": {"name": "probability"},
    }
    weights = {
        "linear.weight": rng.normal(0, 0.1, (1, 2 * len(NUMERIC))).astype(np.float32),
        "linear.bias": np.zeros(1, np.float32),
        "categories.0.weight": rng.normal(0, 1, (2 + len(CATEGORICAL["k"]), 1)).astype(np.float32),
    }
    files = {
        "weights.safetensors": safetensors.numpy.save(weights),
        "model.json": canonical_json(model),
        "contract.json": canonical_json(contract),
        "reference.json": reference,
        "metrics.json": json.dumps({}).encode(),
    }
    blobs = {name: services.store.put_bytes(content) for name, content in files.items()}
    entries = tuple(manifest_entry(name, blob) for name, blob in blobs.items())
    manifest = put_manifest(services.store, Manifest(entries, {"kind": "logistic"}))
    return manifest.digest, contract, (*blobs.values(), manifest)
