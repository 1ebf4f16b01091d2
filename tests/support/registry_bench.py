"""A catalog, a store and a key ring with versions whose artifacts, snapshots and evaluations really exist."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from support.catalog_facts import ALICE, delivery, evidence, feature_set, snapshot
from support.registry_cases import START, Hand, contract, policy_json, scored

from headway.artifacts.digests import canonical_json, digest_json
from headway.artifacts.manifest import Manifest, manifest_entry, put_manifest
from headway.artifacts.store import Blob, LocalStore
from headway.catalog import open_catalog
from headway.catalog.registry_facts import ModelVersion, ModelVersionFacts
from headway.catalog.run_facts import RunFacts, RunResult, TrainingRun
from headway.declaration import TEXT_GATES, PipelineSpec
from headway.registry.judge import Judgement, champion_of, judge_version
from headway.registry.keys import KeyRing
from headway.registry.policy import GATES as policy_gates
from headway.registry.provenance import sign_provenance
from headway.registry.verdicts import ArtifactCheck
from headway.services import Services

MODEL = "delay"
# Those that a model of rows is judged by.
GATES = tuple(gate for gate in policy_gates if gate not in TEXT_GATES)
AS_OF = "2013-11-01"
DAY_US = 86_400_000_000
GOOD = ArtifactCheck(weights_only=True, finite_outputs=True)


def spec(**promotion: Any) -> PipelineSpec:  # noqa: ANN401
    """A pipeline that declares all gates with margin 0 and segments by carrier."""
    policy = policy_json()
    flights = {
        "files": {"paths": ["f.csv"]},
        "format": {"type": "csv"},
        "columns": {
            "id": {"type": "string", "required": True},
            "carrier": {"type": "string", "known_at": "t"},
            "t": {"type": "timestamp", "required": True},
            "late": {"type": "int64"},
            "landed": {"type": "timestamp"},
        },
        "row_id": ["id"],
        "keys": ["carrier"],
        "event_time": "landed",
        "available_time": "landed",
        "partition": {"column": "t", "cadence": "monthly", "start": "2013-01-01", "before": "1h", "after": "2d"},
        "quality": {"suite": "f.suite.json"},
    }
    view = {
        "source": "flights",
        "keys": {"carrier": "carrier"},
        "boundary": "lt",
        "features": {"n": {"window": "late", "aggregate": "count", "duration": "1d"}},
    }
    declared = {"gates": policy["gates"], "allow_immediate": True, "evidence_max_age": "30d"} | promotion
    return PipelineSpec.model_validate(
        {
            "name": MODEL,
            "owner": "team:tests",
            "sources": {"flights": flights},
            "label": {
                "source": "flights",
                "observation_time": "t",
                "target": "late",
                "known_at": "landed",
                "carry": ["carrier"],
            },
            "features": {"version": 1, "views": {"recent": view}},
            "training": {"factory": "model.build", "as_of": {"start": "2013-02-01"}, "categorical": ["carrier"]},
            "evaluation": {
                "historical_rate": ["carrier"],
                "segments": {"carrier": {"minimum": 50, "allowance": 0.02}},
                "resamples": 200,
            },
            "promotion": declared,
        }
    )


@dataclass
class Bench:
    """One home; everything is dated by `clock`, which moves by a microsecond at each look."""

    home: Path
    services: Services
    clock: Hand
    keyring: KeyRing
    spec: PipelineSpec = field(default_factory=spec)
    snapshots: list[str] = field(default_factory=list[str])

    def version(self, seed: int = 1, kind: str = "network", **changes: Any) -> ModelVersion:  # noqa: ANN401
        """Train, register and sign the provenance of a version of its own run; its files are in the store."""
        run = self._run(seed, kind, changes.pop("partition", AS_OF))
        assert run.result is not None
        document = changes.pop("contract", contract())
        facts = ModelVersionFacts(
            **{
                "model_id": MODEL,
                "pipeline": MODEL,
                "kind": kind,
                "run_id": run.run_id,
                "manifest_digest": run.result.artifacts[kind],
                "contract": document,
                "contract_hash": digest_json(document),
                "feature_set": "delay",
                "feature_set_version": 1,
                "as_of": run.facts.partition,
                "metadata": {},
                "blobs": run.result.blobs,
            }
            | changes
        )
        found = self.services.catalog.register_model_version(ALICE, None, facts)
        sign_provenance(self.services, self.keyring, found, run)
        return found

    def scores(self, version: ModelVersion, skill: Mapping[str, float] | None = None, **changes: Any) -> Path:  # noqa: ANN401
        """The folder of an evaluation of the version, with a champion's scores when there is a champion."""
        against = {} if champion_of(self.services, version) is None else {"champion": 2.0}
        rows = scored(skill={**against, **(skill or {})}, seed=version.version, **changes)
        folder = self.home / "evaluations" / f"{version.version}-{len(list((self.home / 'evaluations').glob('*')))}"
        folder.mkdir(parents=True)
        write_scores(folder, rows)
        return folder

    def judge(
        self,
        version: ModelVersion,
        skill: Mapping[str, float] | None = None,
        *,
        folder: Path | None = None,
        check: ArtifactCheck = GOOD,
        declared: PipelineSpec | None = None,
        left_out: Mapping[str, str] | None = None,
    ) -> Judgement:
        """Evaluate and judge a version against the present champion."""
        return judge_version(
            self.services,
            self.keyring,
            declared or self.spec,
            version,
            folder or self.scores(version, skill),
            snapshots=self.snapshots,
            champion=champion_of(self.services, version),
            left_out=left_out,
            try_artifact=lambda path: check if (path / "manifest.json").exists() else ArtifactCheck(None, None),
        )

    def snapshot(self, partition: str, recorded: Blob | None = None) -> str:
        """A published snapshot with its proof in the store; the catalog may be told of another proof."""
        proof = self.services.store.put_bytes(
            canonical_json({"passed": True, "findings": [], "partition": partition}), "application/json"
        )
        manifest = Manifest((manifest_entry("proof.json", proof),), {"partition": partition})
        stored = put_manifest(self.services.store, manifest)
        released = self.services.catalog.version(ALICE, "flights", 1)
        facts = snapshot(
            (released,),
            partition,
            partition,
            MODEL,
            manifest_digest=stored.digest,
            proof_digest=(recorded or proof).digest,
            blobs=(stored, proof),
        )
        return self.services.catalog.publish_snapshot(ALICE, None, facts).snapshot_id

    def close(self) -> None:
        """Close the catalog."""
        self.services.close()

    def _run(self, seed: int, kind: str, partition: str) -> TrainingRun:
        catalog, store = self.services.catalog, self.services.store
        run_spec = store.put_bytes(f"run spec {seed}".encode())
        facts = RunFacts(
            pipeline=MODEL,
            partition=partition,
            inputs=(self.snapshots[0],),
            datasets=(("flights", 1, delivery().content_digest),),
            code_digest=digest_json("code"),
            code_dirty=False,
            environment_digest=digest_json("environment"),
            config_digest=digest_json("config"),
            spec_digest=run_spec.digest,
            seed=seed,
            repeat=0,
            layout={"engine": "ddp"},
            nodes=2,
            budget_id=None,
            max_attempts=2,
            note=None,
            dagster_run_id=None,
            blobs=(run_spec,),
        )
        asked = catalog.submit_run(
            ALICE, None, facts, asker="person", retry=False, reserve_seconds=10, launcher="local"
        )
        attempt = asked.attempt
        assert attempt is not None
        manifest, blobs = self._artifact(seed, kind, asked.run.run_id)
        result = RunResult({kind: manifest.digest}, {"valid_auc": 0.7}, 10, blobs)
        return catalog.finish_attempt(
            ALICE,
            None,
            attempt.run_id,
            attempt.attempt,
            attempt.token,
            state="succeeded",
            reason="done",
            code=0,
            worker_seconds=12.5,
            result=result,
        )

    def _artifact(self, seed: int, kind: str, run_id: str) -> tuple[Manifest, tuple[Blob, ...]]:
        store = self.services.store
        weights = store.put_bytes(f"weights of {kind} {seed}".encode())
        model = store.put_bytes(f"model of {kind} {seed}".encode(), "application/json")
        entries = (manifest_entry("weights.safetensors", weights), manifest_entry("documents/model.json", model))
        manifest = Manifest(entries, {"kind": kind, "run_id": run_id})
        return manifest, (weights, model, put_manifest(store, manifest))


def write_scores(folder: Path, rows: Any) -> None:  # noqa: ANN401
    """Write scored rows as `trainer.evaluate` does."""
    columns: dict[str, Any] = {
        "t": pa.array(rows.day * DAY_US + np.arange(len(rows.labels)) % 1_000, pa.timestamp("us", tz="UTC")),
        "carrier": pa.array(rows.segments["carrier"].tolist(), pa.string()),
        "label": pa.array(rows.labels, pa.float64()),
        "__partition": pa.array([(date(1970, 1, 1) + timedelta(int(d))).isoformat() for d in rows.day], pa.string()),
    }
    columns |= {f"score_{name}": pa.array(values, pa.float64()) for name, values in rows.scores.items()}
    pq.write_table(pa.table(columns), folder / "scores.parquet")


def open_bench(home: Path, template: Path, start: int = START) -> Bench:
    """A bench on a copy of a migrated SQLite catalog, with two snapshots: one to train on, one to evaluate on."""
    home.mkdir(parents=True)
    shutil.copy(template, home / "catalog.db")
    clock = Hand(start, step=1)
    catalog = open_catalog(f"sqlite:///{home / 'catalog.db'}", clock)
    catalog.ensure_tenant(ALICE)
    catalog.register_feature_set(ALICE, None, feature_set())
    version = catalog.register_version(ALICE, None, delivery()).version
    catalog.start_validation(ALICE, None, "flights", version, evidence().suite_digest)
    catalog.release_version(ALICE, None, "flights", version, evidence())
    services = Services(catalog, LocalStore(home / "store"), ALICE)
    bench = Bench(home, services, clock, KeyRing(home / "keys", clock))
    bench.snapshots = [bench.snapshot("2013-10-01"), bench.snapshot("2013-11-01")]
    return bench
