"""A catalog whose endpoint answered, and declarations whose target is a number, a flag or a text class."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.catalog_facts import ALICE, Ticker, blob, digest
from support.registry_facts import (
    ENDPOINT,
    MODEL,
    POLICY,
    pass_all,
    prepare_inputs,
    run_facts,
    succeed,
    version_facts,
)

from headway.artifacts.store import LocalStore
from headway.catalog import Principal, open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.registry_facts import PredictionBatch, PredictionFacts
from headway.declaration import LabelMatchSpec, MonitoringSpec, PipelineSpec
from headway.loading import Pipeline
from headway.monitoring.labels import LabelDesk
from headway.services import Services

DAY = 86_400_000_000
NOW = 1_372_636_800_000_000  # 2013-07-01T00:00:00Z
MATCH = {"person": "person", "starts": "starts"}


def spec_of(target: str = "int64", *, match: bool = True) -> PipelineSpec:
    """Visits of a person, asked about an hour before; the target of this type is known when the visit has ended."""
    visits = {
        "files": {"paths": ["visits.csv"]},
        "format": {"type": "csv"},
        "columns": {
            "visit_id": {"type": "string", "required": True},
            "person": {"type": "string", "known_at": "asked"},
            "asked": {"type": "timestamp", "required": True},
            "starts": {"type": "timestamp", "required": True, "known_at": "asked"},
            "ended": {"type": "timestamp"},
            "target": {"type": target},
        },
        "row_id": ["visit_id"],
        "keys": ["person"],
        "event_time": "ended",
        "available_time": "ended",
        "partition": {"column": "asked", "start": "2013-01-01", "before": "1s", "after": "2d"},
        "quality": {"suite": "visits.suite.json"},
    }
    view = {
        "source": "visits",
        "keys": {"person": "person"},
        "boundary": "lt",
        "features": {"n": {"window": "target", "aggregate": "count", "duration": "1d"}},
    }
    declared = PipelineSpec.model_validate(
        {
            "name": MODEL,
            "owner": "team:tests",
            "sources": {"visits": visits},
            "label": {"source": "visits", "observation_time": "asked", "target": "target", "known_at": "ended"},
            "features": {"version": 1, "views": {"recent": view}},
            "serving": {
                "observed": "starts",
                "before": "1h",
                "request": {
                    "person": {"type": "string", "column": "person"},
                    "starts": {"type": "timestamp", "required": True},
                },
            },
        }
    )
    # The declaration asks for training beside monitoring, and training for a target of two classes: labels do not.
    labels = LabelMatchSpec(match=MATCH if match else {})
    return declared.model_copy(update={"monitoring": MonitoringSpec(labels=labels)})


@dataclass
class Answered:
    """An endpoint that answered; `now` is the world's time and can be set."""

    services: Services
    pipeline: Pipeline
    now: int = NOW

    @property
    def catalog(self) -> Catalog:
        """The catalog."""
        return self.services.catalog

    @property
    def desk(self) -> LabelDesk:
        """A desk that knows the one pipeline."""
        return LabelDesk(self.services, {MODEL: self.pipeline}.__getitem__)

    def accept(self, *items: object, who: Principal = ALICE) -> list[dict[str, Any]]:
        """What the desk says about items."""
        return self.desk.accept(who, ENDPOINT, items)

    def answer(self, *predictions: PredictionFacts, who: Principal = ALICE) -> None:
        """Record answers."""
        batch = PredictionBatch(ENDPOINT, 1, 1, predictions, (blob("detail"),))
        self.catalog.record_predictions(who, None, batch)

    def current(self, prediction_id: str) -> object:
        """The value in force."""
        found = self.catalog.current_labels(ALICE, [prediction_id]).get(prediction_id)
        return None if found is None else found.value


def prediction(name: str, asked_at: int = NOW - DAY, **changes: Any) -> PredictionFacts:  # noqa: ANN401
    """An answer asked a day ago."""
    values: dict[str, Any] = {
        "prediction_id": name,
        "feature_as_of": asked_at - 5,
        "feature_status": "fresh",
        "feature_row_digest": digest("row", name),
        "request_digest": digest("request", name),
        "output": {"probability": 0.25},
        "arm": "stable",
        "status": "ok",
        "latency_us": 100,
        "detail_digest": blob("detail").digest,
        "row": 0,
        "asked_at": asked_at,
        "observed_at": asked_at,
        "score": 0.25,
    }
    return PredictionFacts(**values | changes)


@contextmanager
def answered(
    url: str, folder: Path, spec: PipelineSpec, predictions: Sequence[PredictionFacts] = (), *, fresh: bool = True
) -> Iterator[Answered]:
    """An endpoint of the pipeline with these answers; in a catalog that is not `fresh` it is there already."""
    catalog = open_catalog(url, Ticker())
    try:
        if fresh:
            promote_one(catalog)
        services = Services(catalog, LocalStore(folder / "store"), ALICE, lambda: found.now)
        found = Answered(services, Pipeline(spec, folder, "sha256:0"))
        if predictions:
            found.answer(*predictions)
        yield found
    finally:
        catalog.close()


def promote_one(catalog: Catalog, who: Principal = ALICE) -> None:
    """Let a registered version serve."""
    run = succeed(catalog, run_facts(prepare_inputs(catalog, who)), who)
    version = catalog.register_model_version(who, None, version_facts(run))
    catalog.set_gate_policy(who, None, MODEL, POLICY)
    evidence = pass_all(catalog, version, who)
    catalog.promote_immediate(who, None, ENDPOINT, MODEL, version.version, expected_epoch=None, evidence=evidence)
