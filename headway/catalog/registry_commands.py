"""The catalog's face for model versions, evidence, endpoints and predictions."""

from collections.abc import Callable, Mapping

import sqlalchemy as sa

from headway.artifacts.digests import Json
from headway.catalog import endpoints, predictions, registry
from headway.catalog.base import CatalogBase
from headway.catalog.commands import Command, Document, Step
from headway.catalog.encoding import encode
from headway.catalog.facts import Principal, check_name, check_text
from headway.catalog.registry_documents import (
    attestation_of,
    endpoint_of,
    gate_result_of,
    model_version_of,
    policy_of,
)
from headway.catalog.registry_facts import (
    Attestation,
    AttestationFacts,
    Endpoint,
    EndpointEvent,
    GatePolicy,
    GateResult,
    GateResultFacts,
    Model,
    ModelVersion,
    ModelVersionFacts,
    Prediction,
    PredictionBatch,
    PromotionEvidence,
    check_policy,
)


class RegistryCommands(CatalogBase):
    """Model versions with their evidence, endpoints that serve them, and the answers that were given."""

    def register_model_version(self, principal: Principal, key: str | None, facts: ModelVersionFacts) -> ModelVersion:
        """Return the version of this run and manifest, made as the model's next one when there is none.

        Registration is no deployment: nothing serves it before it is promoted.

        Raises:
            UnknownRun, UnknownFeatureSet: there is no such run or feature set version.
            VersionRefused: the run did not succeed, its result names another manifest for this kind, or the model
                belongs to another pipeline.
            Nondeterminism: the same run and manifest was registered with another model, kind or contract.
        """
        return model_version_of(
            self._model_command(
                principal,
                key,
                "model.register",
                facts.model_id,
                encode(facts),
                lambda step: registry.register(step, facts),
                lambda connection: registry.registered_at(connection, principal.tenant, facts),
            )
        )

    def retire_model_version(
        self, principal: Principal, key: str | None, model_id: str, version: int, reason: str
    ) -> ModelVersion:
        """Take a version out of use for ever; its blobs stay. A retired version stays as it is.

        Raises:
            UnknownModel: there is no such version.
            VersionRefused: an endpoint names it as stable, previous or candidate.
        """
        check_text("reason", reason)
        return model_version_of(
            self._model_command(
                principal,
                key,
                "model.retire",
                model_id,
                {"version": version, "reason": reason},
                lambda step: registry.retire(step, model_id, version, reason),
                lambda connection: version,
            )
        )

    def model_version(self, principal: Principal, model_id: str, version: int) -> ModelVersion:
        """Return one version of a model.

        Raises:
            UnknownModel: there is no such version.
        """
        with self.reading(principal) as connection:
            return registry.read_version(connection, principal.tenant, model_id, version)

    def model_versions(self, principal: Principal, model_id: str | None = None) -> list[ModelVersion]:
        """Return the versions of a model, or of all, in order of model and number."""
        with self.reading(principal) as connection:
            return registry.read_versions(connection, principal.tenant, model_id)

    def models(self, principal: Principal) -> list[Model]:
        """Return the models in order of their name."""
        with self.reading(principal) as connection:
            return registry.read_models(connection, principal.tenant)

    def add_attestation(self, principal: Principal, key: str | None, facts: AttestationFacts) -> Attestation:
        """Keep a signed statement whose signature the caller verified; the envelope must be durable in the store.

        Raises:
            Nondeterminism: the statement was attested with another subject, key, role or envelope.
        """
        command = Command("attestation.add", registry.statement_aggregate(facts.statement_digest), encode(facts))
        effect: Callable[[Step], Document] = lambda step: registry.attest(step, facts)  # noqa: E731
        return attestation_of(self._runner.run(principal, key, command, effect, lambda connection: 1))

    def attestations(self, principal: Principal, subject_digest: str) -> list[Attestation]:
        """Return the attested statements about a digest, the oldest first."""
        with self.reading(principal) as connection:
            return registry.read_attestations(connection, principal.tenant, subject_digest)

    def set_gate_policy(
        self, principal: Principal, key: str | None, model_id: str, policy: Mapping[str, Json]
    ) -> GatePolicy:
        """Put a policy in force as the model's next version; nothing when it is in force already.

        Args:
            principal: who acts.
            key: the idempotency key, None to derive one.
            model_id: a model that has a version.
            policy: {"gates": [{"gate": name, "unless": kind or "", ...}, ...], "allow_immediate": bool, ...}

        Raises:
            UnknownModel: nothing was registered under this name.
            InvalidFact: the policy has another form.
        """
        check_policy(policy)
        return policy_of(
            self._model_command(
                principal,
                key,
                "policy.set",
                model_id,
                {"policy": policy},
                lambda step: registry.set_policy(step, model_id, policy),
                lambda connection: registry.policy_at(connection, principal.tenant, model_id, policy),
            )
        )

    def gate_policy(self, principal: Principal, model_id: str) -> GatePolicy | None:
        """Return the policy in force (the newest); None when there is none."""
        with self.reading(principal) as connection:
            return registry.find_policy(connection, principal.tenant, model_id)

    def record_gate_result(self, principal: Principal, key: str | None, facts: GateResultFacts) -> GateResult:
        """Keep what a gate found about a version; its newest result is the one in force.

        Raises:
            UnknownModel, UnknownPolicy: there is no such version, or no such version of its model's policy.
            StatementRefused: the statement was never attested, is by another role than gate, is about another digest
                than the version's manifest, or said something else already.
        """
        return gate_result_of(
            self._model_command(
                principal,
                key,
                "gate.record",
                facts.model_id,
                encode(facts),
                lambda step: registry.record_result(step, facts),
                lambda connection: registry.recorded_at(connection, principal.tenant, facts),
            )
        )

    def gate_results(self, principal: Principal, model_id: str, version: int) -> list[GateResult]:
        """Return every gate result of a version in order of gate and attempt."""
        with self.reading(principal) as connection:
            return registry.read_results(connection, principal.tenant, model_id, version)

    def promote_immediate(
        self,
        principal: Principal,
        key: str | None,
        endpoint_id: str,
        model_id: str,
        version: int,
        *,
        expected_epoch: int | None,
        evidence: PromotionEvidence,
    ) -> Endpoint:
        """Make a version the endpoint's stable one at once; the old stable becomes previous, the epoch moves by one.

        The policy in force and the newest result of each of its gates that applies to the version's kind are read
        again in the same transaction; each must pass under that policy, about the version's manifest, by the very
        statement that the evidence names. Signatures were verified before (`headway.registry`). An endpoint is made by
        its first promotion. A version that is stable already stays so, whatever the evidence, unless `expected_epoch`
        is the present epoch: then it is promoted anew, at the next one, and previous stays.

        Raises:
            UnknownModel: there is no such version.
            PromotionRefused: what is missing, by gate.
            EndpointMoved: the endpoint is not at `expected_epoch` (0: it does not exist yet).
            EndpointRefused: it serves another model, or a rollout is open.
        """
        check_name("endpoint_id", endpoint_id)
        arguments: dict[str, Json] = {
            "model_id": model_id,
            "version": version,
            "expected_epoch": expected_epoch,
            "evidence": encode(evidence),
        }
        command = Command("endpoint.promote", endpoints.aggregate(endpoint_id), arguments)
        answer = self._runner.run(
            principal,
            key,
            command,
            lambda step: endpoints.promote(step, endpoint_id, model_id, version, expected_epoch, evidence),
            lambda connection: endpoints.promoted_at(
                connection, principal.tenant, endpoint_id, version, expected_epoch
            ),
        )
        return endpoint_of(answer)

    def rollback(
        self, principal: Principal, key: str | None, endpoint_id: str, *, expected_epoch: int | None = None, reason: str
    ) -> Endpoint:
        """Swap stable and previous. Without a key, the same rollback right after itself is answered, not undone.

        Raises:
            UnknownEndpoint: there is no such endpoint.
            NothingToRollBack: it has no previous version; stable stays.
            EndpointMoved: the endpoint is not at `expected_epoch`.
            EndpointRefused: a rollout is open.
        """
        check_text("reason", reason)
        arguments: dict[str, Json] = {"expected_epoch": expected_epoch, "reason": reason}
        command = Command("endpoint.rollback", endpoints.aggregate(endpoint_id), arguments)
        answer = self._runner.run(
            principal,
            key,
            command,
            lambda step: endpoints.rollback(step, endpoint_id, expected_epoch, reason),
            lambda connection: endpoints.rolled_back_at(
                connection, principal.tenant, endpoint_id, expected_epoch, reason
            ),
        )
        return endpoint_of(answer)

    def endpoint(self, principal: Principal, endpoint_id: str) -> Endpoint | None:
        """Return an endpoint; None when there is none."""
        with self.reading(principal) as connection:
            return endpoints.find(connection, principal.tenant, endpoint_id)

    def endpoints(self, principal: Principal) -> list[Endpoint]:
        """Return the endpoints in order of their name."""
        with self.reading(principal) as connection:
            return endpoints.read_all(connection, principal.tenant)

    def endpoint_events(self, principal: Principal, endpoint_id: str) -> list[EndpointEvent]:
        """Return the moves of an endpoint in order of their epoch."""
        with self.reading(principal) as connection:
            return endpoints.read_events(connection, principal.tenant, endpoint_id)

    def record_predictions(self, principal: Principal, key: str | None, batch: PredictionBatch) -> int:
        """Keep answers, each once; return how many the batch holds. The detail documents must be durable before.

        Labels that waited for these answers are attached in the same commit.

        Raises:
            UnknownEndpoint: the endpoint never was at this epoch.
            ImpossiblePrediction: at this epoch the arm was another version.
            Nondeterminism: a prediction id came before with other content.
        """
        command = Command("predictions.record", predictions.aggregate(batch.endpoint_id), encode(batch))
        effect: Callable[[Step], Document] = lambda step: predictions.record(step, batch)  # noqa: E731
        self._runner.run(principal, key, command, effect, lambda connection: 1)
        return len(batch.records)

    def prediction(self, principal: Principal, prediction_id: str) -> Prediction:
        """Return one prediction.

        Raises:
            UnknownPrediction: there is no such prediction.
        """
        with self.reading(principal) as connection:
            return predictions.read(connection, principal.tenant, prediction_id)

    def prediction_ids(self, principal: Principal, prefix: str) -> list[str]:
        """Return the prediction ids that begin with a text, in order."""
        with self.reading(principal) as connection:
            return predictions.read_ids(connection, principal.tenant, prefix)

    def _model_command(
        self,
        principal: Principal,
        key: str | None,
        operation: str,
        model_id: str,
        arguments: Mapping[str, Json],
        effect: Callable[[Step], Document],
        position: Callable[[sa.Connection], int],
    ) -> Document:
        check_name("model_id", model_id)
        command = Command(operation, registry.aggregate(model_id), arguments)
        return self._runner.run(principal, key, command, effect, position)
