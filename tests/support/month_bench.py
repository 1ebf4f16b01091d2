"""A month of real flights, answered from snapshots and by a server, with a network of drawn weights.

The two ways share the stored artifact and code, nothing else: snapshots are read from the store and scored by
`trainer.score`; requests get their features from the online store and their scores from a server's own process.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from support.live_bench import ENDPOINT, LiveServer, settings_of, spooled
from support.registry_bench import write_scores
from support.registry_cases import scored
from support.serving_bench import opened, pipeline_of, write_flights_slice
from support.serving_model import GATES, keys_of
from support.workbench import Workbench

from headway.artifacts.manifest import manifest_entry, put_manifest
from headway.artifacts.store import Blob
from headway.catalog import FeatureSnapshot
from headway.catalog.registry_facts import ModelVersion, ModelVersionFacts
from headway.catalog.run_facts import RunFacts, RunResult
from headway.declaration import EvaluationSpec, GateSpec, PromotionSpec
from headway.features import snapshot
from headway.features.online.open import online_store_for
from headway.features.online.sync import sync_online
from headway.features.proof import Proof
from headway.features.reading import read_values
from headway.loading import Pipeline
from headway.registry.judge import judge_version
from headway.registry.promote import promote, stable_version
from headway.registry.provenance import sign_provenance
from headway.registry.verdicts import ArtifactCheck
from headway.services import Services
from headway.serving.live.records import Schemas, table_of
from headway.serving.scoring import score_rows
from headway.training.identity import CODE_ROOT
from headway.training.stage import StoredCode, store_code
from headway.world import move_clock
from trainer.artifact import contract_document, model_document, weight_bytes
from trainer.blobs import Json, Manifest, canonical_json, digest_bytes, digest_json
from trainer.encoders import fit_inputs
from trainer.models.factory import factory_digest, load_factory, make_module
from trainer.spec import DataFile, DataSpec, ModelSpec, RunSpec

_DAY_US = 86_400_000_000
_ALL = 10**6
_BEFORE = ("2013-05-30", "2013-05-31")
_MONTH = tuple(str(date(2013, 6, 1) + timedelta(days=n)) for n in range(30))
# 2013-07-02T00:00:00Z: whoever flew in June has landed.
_WORLD = 1_372_723_200_000_000
_FACTORY = "pipelines/flight_delay/model.py"


def make_month(root: Path) -> tuple[Workbench, pa.Table]:
    """Every flight of June 2013 and of the two days before it, a version promoted and the online store filled.

    Returns the bench and the rows of June's snapshots. The network's encoding is fitted on the day before June.
    """
    bench = write_flights_slice(root, [*_BEFORE, *_MONTH], flights_per_day=_ALL)
    bench.ingest("airports", "airlines", "planes", "weather", "flights")
    move_clock(settings_of(bench).clock_file, _WORLD)
    # The leakage proof is three quarters of a snapshot's time and changes no row; its own tests hold it.
    with mock.patch.object(snapshot, "prove", _unproved):
        built = bench.build(_BEFORE[-1], *_MONTH)
    assert built.exit_code == 0, built.output
    found = {o["partition"]: o["snapshot_id"] for o in json.loads(built.stdout)["snapshots"]}
    pipeline = pipeline_of(bench)
    online = online_store_for(settings_of(bench))
    try:
        with opened(bench) as services:
            snapshots = {day: services.catalog.snapshot(services.principal, one) for day, one in found.items()}
            _promote_network(bench, services, pipeline, snapshots[_BEFORE[-1]])
            sync_online(services, pipeline, online, retain=(len(_MONTH) + 2) * _DAY_US)
            held_out = [read_values(services, snapshots[day]) for day in _MONTH]
    finally:
        online.close()
    return bench, pa.concat_tables(held_out).unify_dictionaries()


def score_snapshots(bench: Workbench, stored: pa.Table) -> NDArray[np.float64]:
    """The probability of each row of the snapshots by the trainer's command, with the version that serves."""
    with opened(bench) as services:
        version = stable_version(services, ENDPOINT)
        assert version is not None
        return score_rows(services, version, stored)


def ask_all(bench: Workbench, requests: pa.Table, sizes: Iterator[int]) -> tuple[NDArray[np.float64], pa.Table]:
    """Let a server answer requests of several rows each: the probability of every row, and the values it logged."""
    scores: dict[str, float] = {}
    with LiveServer(bench) as server:
        place = 0
        while place < requests.num_rows:
            some = requests.slice(place, next(sizes))
            place += some.num_rows
            scores |= {one.prediction_id: one.probability for one in server.ask(some)}
    folder = settings_of(bench).serving_folder / "default" / "spool"
    logged = {one.prediction_id: one for one in spooled(folder)}
    assert logged.keys() == scores.keys()
    (schema,) = {one.schema for one in logged.values()}
    _, columns = Schemas(folder).read(schema)
    values = table_of(columns, [logged[name].values for name in scores])
    return np.array(list(scores.values()), np.float64), values


def _unproved(spec: object, plan: object, labels: pa.Table, sources: object, cells: object) -> Proof:
    return Proof(len(labels), 0, 0, (), ())


def _promote_network(bench: Workbench, services: Services, pipeline: Pipeline, seen: FeatureSnapshot) -> None:
    """Register, judge and promote a network that counts as trained on one snapshot."""
    catalog, who = services.catalog, services.principal
    code = store_code(services.store, CODE_ROOT, pipeline.folder, pipeline.name)
    manifest, contract, blobs = _network(services, pipeline, read_values(services, seen))
    facts = _run_facts(services, pipeline, seen, code)
    asked = catalog.submit_run(who, None, facts, asker="person", retry=False, reserve_seconds=1, launcher="local")
    attempt = asked.attempt
    assert attempt is not None
    result = RunResult({"network": manifest}, {"valid_auc": 0.7}, None, blobs)
    run = catalog.finish_attempt(
        who,
        None,
        attempt.run_id,
        attempt.attempt,
        attempt.token,
        state="succeeded",
        reason=None,
        code=0,
        worker_seconds=1.0,
        result=result,
    )
    version = catalog.register_model_version(
        who,
        None,
        ModelVersionFacts(
            model_id=pipeline.name,
            pipeline=pipeline.name,
            kind="network",
            run_id=run.run_id,
            manifest_digest=manifest,
            contract=contract,
            contract_hash=digest_json(contract),
            feature_set=seen.feature_set,
            feature_set_version=seen.feature_set_version,
            as_of=facts.partition,
            metadata={},
            blobs=blobs,
        ),
    )
    _judge(bench, services, pipeline, version)
    promote(services, keys_of(bench), ENDPOINT, version.model_id, version.version)


def _network(
    services: Services, pipeline: Pipeline, values: pa.Table
) -> tuple[str, Mapping[str, Json], tuple[Blob, ...]]:
    """Manifest digest, contract and blobs of the pipeline's network as its factory draws it."""
    declared = pipeline.spec.training
    assert declared is not None
    inputs = fit_inputs(values, declared.categorical, pipeline.spec.model_inputs())
    function = declared.factory.rpartition(".")[2]
    torch.manual_seed(0)
    module = make_module(load_factory(CODE_ROOT, _FACTORY), function, inputs, declared.options)
    factory: dict[str, Json] = {
        "file": _FACTORY,
        "function": function,
        "code_digest": factory_digest(CODE_ROOT, _FACTORY),
        "options": dict(declared.options),
    }
    contract = contract_document(inputs)
    files = {
        "weights.safetensors": weight_bytes(module),
        "model.json": canonical_json(model_document("network", factory, inputs)),
        "contract.json": canonical_json(contract),
        "reference.json": canonical_json({}),
        "metrics.json": canonical_json({}),
    }
    blobs = {name: services.store.put_bytes(content) for name, content in files.items()}
    entries = tuple(manifest_entry(name, blob) for name, blob in blobs.items())
    manifest = put_manifest(services.store, Manifest(entries, {"kind": "network"}))
    return manifest.digest, contract, (*blobs.values(), manifest)


def _judge(bench: Workbench, services: Services, pipeline: Pipeline, version: ModelVersion) -> None:
    """Sign provenance and the verdicts of three gates, on scores that are drawn: its quality is beside the point."""
    keys, spec = keys_of(bench), pipeline.spec
    sign_provenance(services, keys, version, services.catalog.run(services.principal, version.run_id))
    gates = tuple(GateSpec(gate=g) for g in GATES)
    evaluation = EvaluationSpec(historical_rate=("origin",), resamples=100)
    lenient = {"evaluation": evaluation, "promotion": PromotionSpec(gates=gates, allow_immediate=True)}
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_scores(folder, scored(rows=60, days=3))
        table = pq.read_table(folder / "scores.parquet")
        pq.write_table(table.rename_columns({"t": spec.label.observation_time}), folder / "scores.parquet")
        judge_version(
            services,
            keys,
            spec.model_copy(update=lenient),
            version,
            folder,
            snapshots=(),
            champion=None,
            try_artifact=lambda _: ArtifactCheck(weights_only=True, finite_outputs=True),
        )


def _run_facts(services: Services, pipeline: Pipeline, seen: FeatureSnapshot, code: StoredCode) -> RunFacts:
    spec, declared = pipeline.spec, pipeline.spec.training
    assert declared is not None
    data = DataSpec(
        files=(DataFile(seen.partition, seen.content_digest, 1, seen.rows),),
        identity=spec.sources[spec.label.source].row_id,
        target=spec.label.target,
        observed_at=spec.label.observation_time,
        known_at=spec.label.known_at,
        cut=2,
        validation_from=1,
        categorical=declared.categorical,
        numeric=spec.model_inputs(),
    )
    model = ModelSpec(_FACTORY, "build", code.digest, code.manifest_digest, dict(declared.options))
    stored = services.store.put_bytes(canonical_json(RunSpec(spec.name, data, model, declared.seed).to_json()))
    return RunFacts(
        pipeline=spec.name,
        partition="2013-06-01",
        inputs=(seen.snapshot_id,),
        datasets=tuple({(i.dataset, i.version, i.content_digest) for i in seen.inputs}),
        code_digest=code.digest,
        code_dirty=False,
        environment_digest=digest_bytes(b"environment"),
        config_digest=digest_bytes(b"configuration"),
        spec_digest=stored.digest,
        seed=declared.seed,
        repeat=0,
        layout={},
        nodes=1,
        budget_id=None,
        max_attempts=1,
        note=None,
        dagster_run_id=None,
        blobs=(stored, *code.blobs),
    )
