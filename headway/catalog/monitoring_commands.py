"""The catalog's face for answers in time, labels, reports and retraining."""

import math
from collections.abc import Sequence
from typing import Literal

from headway.artifacts.digests import Json
from headway.catalog import labels as label_rows
from headway.catalog import predictions, reports, retraining
from headway.catalog.base import CatalogBase
from headway.catalog.commands import Command
from headway.catalog.encoding import encode
from headway.catalog.errors import InvalidFact
from headway.catalog.facts import Principal, check_count, check_name, check_text
from headway.catalog.monitoring_documents import outcomes_of, report_of, retrain_request_of
from headway.catalog.monitoring_facts import (
    CLOSED_STATES,
    RETRAIN_MOVES,
    DecisionFacts,
    Label,
    LabelFacts,
    LabelOutcome,
    Report,
    ReportFacts,
    ReportKind,
    RetrainDecision,
    RetrainEvent,
    RetrainFacts,
    RetrainRequest,
    RetrainState,
    SegmentProgress,
    Shipment,
)
from headway.catalog.registry_facts import Prediction, check_one_of


class MonitoringCommands(CatalogBase):
    """Answers shipped from logs and read by the time they were asked, labels, reports, requests to train again."""

    def record_shipment(self, principal: Principal, key: str | None, shipment: Shipment) -> int:
        """Keep the answers in a range of a log segment and that it is recorded, in one commit; return their number.

        The detail documents must be durable before. The same shipment again is answered as the first time.
        Labels that waited for these answers are attached in the same commit.

        Raises:
            SegmentMoved: the segment is not recorded exactly up to where the range begins.
            UnknownEndpoint, ImpossiblePrediction, Nondeterminism: as `record_predictions`.
        """
        progress = shipment.segment
        aggregate = predictions.segment_aggregate(progress.server, progress.segment)
        command = Command("predictions.ship", aggregate, encode(shipment))
        self._runner.run(principal, key, command, lambda step: predictions.ship(step, shipment), lambda connection: 1)
        return progress.records

    def segment_cursor(self, principal: Principal, server: str, segment: str) -> int:
        """Return up to which byte a server's log segment is recorded; 0 for one that nothing was recorded of."""
        with self.reading(principal) as connection:
            return predictions.read_cursor(connection, principal.tenant, server, segment)

    def shipments(self, principal: Principal) -> list[SegmentProgress]:
        """Return each log segment from byte 0 to its cursor with its totals, in order of server and segment."""
        with self.reading(principal) as connection:
            return predictions.read_shipments(connection, principal.tenant)

    def predictions(
        self, principal: Principal, endpoint_id: str, start: int, end: int, *, after: str = "", limit: int = 10_000
    ) -> list[Prediction]:
        """Return predictions of an endpoint asked in [start, end), in order of id; the next page is `after` the last.

        Args:
            principal: who asks.
            endpoint_id: the endpoint.
            start: microseconds UTC, world time.
            end: microseconds UTC, world time, excluded.
            after: only ids that follow this one.
            limit: how many at most.
        """
        with self.reading(principal) as connection:
            return predictions.read_asked(connection, principal.tenant, endpoint_id, start, end, after, limit)

    def prediction_count(self, principal: Principal, endpoint_id: str, start: int, end: int) -> int:
        """Return how many predictions of an endpoint were asked in [start, end)."""
        with self.reading(principal) as connection:
            return predictions.count_asked(connection, principal.tenant, endpoint_id, start, end)

    def predictions_by_id(self, principal: Principal, prediction_ids: Sequence[str]) -> dict[str, Prediction]:
        """Return the predictions that there are among those asked for, by id."""
        with self.reading(principal) as connection:
            return predictions.read_many(connection, principal.tenant, prediction_ids)

    def predictions_addressed(
        self, principal: Principal, endpoint_id: str, kind: Literal["caller_id", "event_key"], addresses: Sequence[str]
    ) -> list[Prediction]:
        """Return the endpoint's predictions with one of these ids of callers, or about these events, in order of id."""
        with self.reading(principal) as connection:
            return predictions.read_addressed(connection, principal.tenant, endpoint_id, kind, addresses)

    def add_labels(
        self, principal: Principal, key: str | None, labels: tuple[LabelFacts, ...]
    ) -> tuple[LabelOutcome, ...]:
        """Keep labels of one endpoint, each once, and say what became of each, in the order given.

        A label attaches to the one prediction that has its address, or waits in the inbox until one has. The current
        label of a prediction is the greatest by (rank of the source, observed_at, label_id), so neither order nor
        duplication of labels matters. One label's fate never stops the others.

        Raises:
            UnknownEndpoint: nothing was promoted there.
            InvalidFact: they name more than one endpoint.
        """
        if not labels:
            return ()
        endpoint_ids = sorted({item.endpoint_id for item in labels})
        if len(endpoint_ids) > 1:
            raise InvalidFact("endpoint_id", endpoint_ids, "labels of one endpoint per command")
        [endpoint_id] = endpoint_ids
        arguments: dict[str, Json] = {"labels": [encode(item) for item in labels]}
        command = Command("labels.add", predictions.aggregate(endpoint_id), arguments)
        answer = self._runner.run(
            principal, key, command, lambda step: label_rows.add(step, endpoint_id, labels), lambda connection: 1
        )
        return outcomes_of(answer)

    def current_labels(self, principal: Principal, prediction_ids: Sequence[str]) -> dict[str, Label]:
        """Return the current label of each prediction that has one, by prediction id."""
        with self.reading(principal) as connection:
            found = label_rows.read_attached(connection, principal.tenant, prediction_ids)
        return {prediction_id: own[0] for prediction_id, own in found.items()}

    def labels(self, principal: Principal, prediction_id: str) -> list[Label]:
        """Return every label of a prediction, the current one first, then by falling order."""
        with self.reading(principal) as connection:
            return label_rows.read_attached(connection, principal.tenant, [prediction_id]).get(prediction_id, [])

    def labels_by_id(self, principal: Principal, label_ids: Sequence[str]) -> dict[str, Label]:
        """Return the labels that there are among those asked for, attached or waiting, by id; none is told current."""
        with self.reading(principal) as connection:
            return label_rows.read_stored(connection, principal.tenant, label_ids)

    def labels_between(self, principal: Principal, endpoint_id: str, start: int, end: int) -> list[tuple[str, Label]]:
        """Return (prediction id, label) of every label of predictions asked in [start, end).

        In order of prediction id; of each prediction the current label first, then by falling order.
        """
        with self.reading(principal) as connection:
            return label_rows.read_between(connection, principal.tenant, endpoint_id, start, end)

    def label_inbox(self, principal: Principal, endpoint_id: str) -> list[Label]:
        """Return the endpoint's labels that wait for a prediction, in order of arrival."""
        with self.reading(principal) as connection:
            return label_rows.read_inbox(connection, principal.tenant, endpoint_id)

    def record_report(self, principal: Principal, key: str | None, facts: ReportFacts) -> Report:
        """Keep a report, in force from now on for its kind, version and week; the same report again changes nothing.

        The document and its plots must be durable in the store.

        Raises:
            UnknownEndpoint: nothing was promoted there.
        """
        command = Command("report.record", reports.aggregate(facts.endpoint_id), encode(facts))
        answer = self._runner.run(
            principal, key, command, lambda step: reports.record(step, facts), lambda connection: 1
        )
        return report_of(answer)

    def report(self, principal: Principal, report_id: str) -> Report:
        """Return a report.

        Raises:
            UnknownReport: there is no such report.
        """
        with self.reading(principal) as connection:
            return reports.read(connection, principal.tenant, report_id)

    def reports(
        self,
        principal: Principal,
        endpoint_id: str,
        kind: ReportKind | None = None,
        model_version: int | None = None,
    ) -> list[Report]:
        """Return the reports in force of an endpoint (of one kind or version when named), in order of week."""
        with self.reading(principal) as connection:
            return reports.read_in_force(connection, principal.tenant, endpoint_id, kind, model_version)

    def open_retrain_request(self, principal: Principal, key: str | None, facts: RetrainFacts) -> RetrainRequest:
        """Open a request to train again and reserve its cost, in one commit.

        One cause is one request: a cause that was here before is answered with its request as it stands, also when it
        is closed. A pipeline has one open request at a time.

        Raises:
            RetrainOpen: the pipeline has another open request.
            BudgetMissing, BudgetExhausted: the budget cannot carry the cost in this period; nothing was changed.
            UnknownEndpoint, UnknownReport: what the request is about was never recorded.
        """
        command = Command("retrain.open", retraining.aggregate(facts.pipeline), encode(facts))
        answer = self._runner.run(
            principal,
            key,
            command,
            lambda step: retraining.open_request(step, facts),
            lambda connection: retraining.opened_at(connection, principal.tenant, facts),
        )
        return retrain_request_of(answer)

    def move_retrain(
        self,
        principal: Principal,
        key: str | None,
        request_id: str,
        *,
        expected_epoch: int,
        state: RetrainState,
        reason: str,
        as_of: str | None = None,
        run_id: str | None = None,
        dagster_run_id: str | None = None,
        candidate_version: int | None = None,
        cost_seconds: float | None = None,
    ) -> RetrainRequest:
        """Move a request to another state. Closing it gives its reservation back and commits what it used.

        Args:
            principal: who acts.
            key: the idempotency key, None to derive one.
            request_id: the request.
            expected_epoch: the epoch at which the caller read it.
            state: where it goes.
            reason: why.
            as_of: the partition that it trains; a request without one cannot run.
            run_id: the training run.
            dagster_run_id: the orchestrator's run.
            candidate_version: the model version that came of it.
            cost_seconds: worker-seconds that it used so far in all; None leaves what is known (nothing at first).

        Raises:
            UnknownRetrainRequest, UnknownRun: there is no such request or training run.
            RetrainMoved: the request is not at `expected_epoch`.
            RetrainRefused: this state does not follow from the one it is in.
        """
        check_one_of("state", state, tuple(sorted(RETRAIN_MOVES.keys() | CLOSED_STATES)))
        check_count("expected_epoch", expected_epoch)
        check_text("reason", reason)
        for name, value in (("as_of", as_of), ("run_id", run_id), ("dagster_run_id", dagster_run_id)):
            if value is not None:
                check_name(name, value)
        if candidate_version is not None:
            check_count("candidate_version", candidate_version)
        if cost_seconds is not None and not (math.isfinite(cost_seconds) and cost_seconds >= 0):
            raise InvalidFact("cost_seconds", cost_seconds, "seconds from 0")
        change = retraining.Move(state, reason, as_of, run_id, dagster_run_id, candidate_version, cost_seconds)
        pipeline = self.retrain_request(principal, request_id).pipeline
        arguments: dict[str, Json] = {"request": request_id, "expected_epoch": expected_epoch, "move": encode(change)}
        answer = self._runner.run(
            principal,
            key,
            Command("retrain.move", retraining.aggregate(pipeline), arguments),
            lambda step: retraining.move(step, request_id, expected_epoch, change),
            lambda connection: expected_epoch,
        )
        return retrain_request_of(answer)

    def retrain_request(self, principal: Principal, request_id: str) -> RetrainRequest:
        """Return a request.

        Raises:
            UnknownRetrainRequest: there is no such request.
        """
        with self.reading(principal) as connection:
            return retraining.read(connection, principal.tenant, request_id)

    def retrain_requests(self, principal: Principal, pipeline: str | None = None) -> list[RetrainRequest]:
        """Return the requests of a pipeline, or of all, the newest first."""
        with self.reading(principal) as connection:
            return retraining.read_all(connection, principal.tenant, pipeline)

    def retrain_events(self, principal: Principal, request_id: str) -> list[RetrainEvent]:
        """Return the moves of a request in order, the opening first."""
        with self.reading(principal) as connection:
            return retraining.read_events(connection, principal.tenant, request_id)

    def note_decision(self, principal: Principal, key: str | None, facts: DecisionFacts) -> bool:
        """Record what was decided about retraining unless the pipeline's newest decision says the same.

        Returns:
            Whether it is new. A key that was answered before gives its answer again.
        """
        if key is None and self._decided(principal, facts):
            return False
        # When it was decided is no part of the command: a repeat after a crash says the same at another time.
        arguments = {name: value for name, value in encode(facts).items() if name != "made_at"}
        answer = self._runner.run(
            principal,
            key,
            Command("retrain.decide", retraining.decision_aggregate(facts.pipeline), arguments),
            lambda step: retraining.note(step, facts),
            lambda connection: retraining.noted_at(connection, principal.tenant, facts),
        )
        return answer["written"] is True

    def decisions(self, principal: Principal, pipeline: str, limit: int = 100) -> list[RetrainDecision]:
        """Return at most `limit` decisions about a pipeline, the newest first."""
        with self.reading(principal) as connection:
            return retraining.read_decisions(connection, principal.tenant, pipeline, limit)

    def _decided(self, principal: Principal, facts: DecisionFacts) -> bool:
        with self.reading(principal) as connection:
            newest = retraining.read_newest(connection, principal.tenant, facts.pipeline)
        return newest is not None and retraining.same_decision(newest, facts)
