"""Registry, endpoints, predictions: what may be registered, what promotes, what rolls back, what was answered."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from support.catalog_facts import ALICE, Ticker, blob, digest
from support.registry_facts import (
    ENDPOINT,
    GATES,
    MODEL,
    POLICY,
    ask,
    end,
    judge,
    pass_all,
    prepare_inputs,
    registered,
    run_facts,
    statement,
    succeed,
    version_facts,
)

from headway.artifacts.digests import digest_json
from headway.catalog import LineageEdge, open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import (
    EndpointMoved,
    EndpointRefused,
    ImpossiblePrediction,
    InvalidFact,
    Nondeterminism,
    NothingToRollBack,
    PromotionRefused,
    StatementRefused,
    UnknownEndpoint,
    UnknownFeatureSet,
    UnknownModel,
    UnknownPolicy,
    UnknownPrediction,
    VersionRefused,
)
from headway.catalog.registry_facts import Endpoint, ModelVersion, PredictionBatch, PredictionFacts, PromotionEvidence


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Catalog]:
    opened = open_catalog(catalog_url, Ticker())
    yield opened
    opened.close()


@pytest.fixture
def snapshot_id(catalog: Catalog) -> str:
    return prepare_inputs(catalog)


def _promote(
    catalog: Catalog,
    version: ModelVersion,
    evidence: PromotionEvidence,
    *,
    key: str | None = None,
    expected_epoch: int | None = None,
    endpoint_id: str = ENDPOINT,
) -> Endpoint:
    return catalog.promote_immediate(
        ALICE,
        key,
        endpoint_id,
        version.model_id,
        version.version,
        expected_epoch=expected_epoch,
        evidence=evidence,
    )


def test_a_version_keeps_every_fact_and_its_lineage(catalog: Catalog, snapshot_id: str) -> None:
    run = succeed(catalog, run_facts(snapshot_id))
    facts = version_facts(run)
    first = catalog.register_model_version(ALICE, None, facts)
    second = catalog.register_model_version(ALICE, None, version_facts(run, "logistic"))
    assert (first.facts, first.version, first.retired) == (facts, 1, False)
    assert catalog.register_model_version(ALICE, "again", facts) == first
    assert catalog.model_versions(ALICE, MODEL) == catalog.model_versions(ALICE) == [first, second]
    assert [(m.model_id, m.pipeline) for m in catalog.models(ALICE)] == [(MODEL, "flight_delay")]
    edges = catalog.lineage(ALICE, first.node, "upstream")
    assert LineageEdge(first.node, run.node, "training") in edges
    assert (
        LineageEdge("dataset_version:flights@1", f"delivery:{digest('raw', 'flights', '2013-06-01', 1)}", "source")
        in edges
    )
    with pytest.raises(UnknownModel):
        catalog.model_version(ALICE, MODEL, 3)


def test_what_may_not_be_registered(catalog: Catalog, snapshot_id: str) -> None:
    run = succeed(catalog, run_facts(snapshot_id))
    facts = version_facts(run)
    opened = ask(catalog, run_facts(snapshot_id, seed=8)).run
    for error, changes in (
        (VersionRefused, {"run_id": opened.run_id}),
        # A network under the name of the kind to which a gate does not apply.
        (VersionRefused, {"kind": "logistic"}),
        (VersionRefused, {"pipeline": "other"}),
        (VersionRefused, {"manifest_digest": blob("other").digest, "blobs": (blob("other"),)}),
        (UnknownFeatureSet, {"feature_set_version": 9}),
    ):
        with pytest.raises(error):
            catalog.register_model_version(ALICE, None, replace(facts, **changes))
    for changes in (
        {"contract": {}, "contract_hash": digest_json({})},
        {"contract_hash": digest("x")},
        {"kind": "tree"},
    ):
        with pytest.raises(InvalidFact):
            replace(facts, **changes)
    assert catalog.models(ALICE) == []
    catalog.register_model_version(ALICE, None, facts)
    with pytest.raises(Nondeterminism, match="model_id"):
        catalog.register_model_version(ALICE, None, replace(facts, model_id="other"))


def test_a_statement_is_kept_once_as_it_was(catalog: Catalog, snapshot_id: str) -> None:
    del snapshot_id
    facts = statement(digest("subject"), "gate")
    kept = catalog.add_attestation(ALICE, None, facts)
    assert catalog.add_attestation(ALICE, "other key", facts) == kept
    assert catalog.attestations(ALICE, digest("subject")) == [kept]
    for changes in ({"key_id": "other"}, {"role": "promoter"}, {"subject_digest": digest("other")}):
        with pytest.raises(Nondeterminism):
            catalog.add_attestation(ALICE, None, replace(facts, **changes))


def test_policies_are_numbered_and_the_newest_is_in_force(catalog: Catalog, snapshot_id: str) -> None:
    with pytest.raises(UnknownModel):
        catalog.set_gate_policy(ALICE, None, MODEL, POLICY)
    registered(catalog, snapshot_id)
    other = POLICY | {"allow_immediate": False}
    versions = [
        catalog.set_gate_policy(ALICE, None, MODEL, policy).version for policy in (POLICY, other, other, POLICY)
    ]
    assert versions == [1, 2, 2, 3]
    found = catalog.gate_policy(ALICE, MODEL)
    assert found is not None
    assert (found.version, found.policy, found.digest) == (3, POLICY, digest_json(POLICY))
    assert (found.gates("network"), found.gates("logistic")) == (GATES, ("auc_over_historical_rate", "contract"))
    assert catalog.gate_policy(ALICE, "nothing") is None


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"gates": []},
        {"gates": ["contract"]},
        {"gates": [{"name": "contract"}]},
        {"gates": [{"gate": "contract"}, {"gate": "contract"}]},
        {"gates": [{"gate": "contract", "unless": None}]},
        {"gates": [{"gate": "contract"}], "allow_immediate": "yes"},
    ],
)
def test_a_policy_of_another_form_is_refused(catalog: Catalog, snapshot_id: str, policy: dict[str, object]) -> None:
    registered(catalog, snapshot_id)
    with pytest.raises(InvalidFact):
        catalog.set_gate_policy(ALICE, None, MODEL, policy)  # pyright: ignore[reportArgumentType]


def test_a_gate_result_needs_a_gate_statement_about_this_very_artifact(catalog: Catalog, snapshot_id: str) -> None:
    version = registered(catalog, snapshot_id)
    other = digest("other artifact")
    by_promoter = catalog.add_attestation(ALICE, None, statement(version.manifest_digest, "x", "promoter"))
    elsewhere = catalog.add_attestation(ALICE, None, statement(other, "x"))
    for changes in (
        {"statement_digest": digest("never attested")},
        {"statement_digest": by_promoter.statement_digest},
        {"statement_digest": elsewhere.statement_digest},
        {"statement_digest": elsewhere.statement_digest, "artifact_digest": other},
        {"artifact_digest": other},
    ):
        with pytest.raises(StatementRefused):
            judge(catalog, version, "contract", **changes)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownPolicy):
        judge(catalog, version, "contract", policy_version=2)
    with pytest.raises(UnknownModel):
        judge(catalog, replace(version, version=2), "contract")
    said = judge(catalog, version, "contract")
    for changes in ({"gate": "leakage_proof"}, {"verdict": "fail"}):
        with pytest.raises(StatementRefused, match="said pass for gate 'contract' already"):
            judge(catalog, version, **{"gate": "contract", "statement_digest": said, **changes})  # pyright: ignore[reportArgumentType]
    assert [r.gate for r in catalog.gate_results(ALICE, MODEL, 1)] == ["contract"]


def test_gate_results_are_numbered_and_the_newest_counts(catalog: Catalog, snapshot_id: str) -> None:
    version = registered(catalog, snapshot_id)
    for verdict, look in (("pass", 1), ("pass", 1), ("fail", 2), ("pass", 3)):
        judge(catalog, version, "contract", verdict, look=look)
    results = catalog.gate_results(ALICE, MODEL, 1)
    assert [(r.attempt, r.verdict) for r in results] == [(1, "pass"), (2, "fail"), (3, "pass")]


def test_promotion_moves_the_endpoint_by_one_and_rollback_swaps(catalog: Catalog, snapshot_id: str) -> None:
    first, second = registered(catalog, snapshot_id), registered(catalog, snapshot_id, seed=8)
    assert catalog.endpoint(ALICE, ENDPOINT) is None
    one = _promote(catalog, first, pass_all(catalog, first), expected_epoch=0)
    assert (one.epoch, one.stable, one.previous, one.candidate, one.phase) == (1, 1, None, None, "steady")
    with pytest.raises(NothingToRollBack):
        catalog.rollback(ALICE, None, ENDPOINT, reason="slow")
    assert catalog.endpoint(ALICE, ENDPOINT) == one
    two = _promote(catalog, second, pass_all(catalog, second), expected_epoch=1)
    assert (two.epoch, two.stable, two.previous) == (2, 2, 1)
    back = catalog.rollback(ALICE, "key", ENDPOINT, reason="slow")
    assert (back.epoch, back.stable, back.previous) == (3, 1, 2)
    assert catalog.rollback(ALICE, "key", ENDPOINT, reason="slow") == back
    forth = catalog.rollback(ALICE, None, ENDPOINT, reason="it was the network", expected_epoch=3)
    assert (forth.epoch, forth.stable, forth.previous) == (4, 2, 1)
    # A repeat after a crash, without a key, must not undo what it did.
    assert catalog.rollback(ALICE, None, ENDPOINT, reason="it was the network", expected_epoch=3) == forth
    events = catalog.endpoint_events(ALICE, ENDPOINT)
    assert [(e.epoch, e.operation, e.row.stable, e.reason) for e in events] == [
        (1, "promote", 1, None),
        (2, "promote", 2, None),
        (3, "rollback", 1, "slow"),
        (4, "rollback", 2, "it was the network"),
    ]
    assert events[1].evidence is not None
    assert set(events[1].evidence.statements) == set(GATES)
    assert catalog.endpoints(ALICE) == [forth]
    with pytest.raises(UnknownEndpoint):
        catalog.rollback(ALICE, None, "nothing", reason="slow")


def test_a_version_that_is_stable_stays_so_whatever_the_evidence(catalog: Catalog, snapshot_id: str) -> None:
    version = registered(catalog, snapshot_id)
    evidence = pass_all(catalog, version)
    one = _promote(catalog, version, evidence)
    assert _promote(catalog, version, evidence) == one
    assert _promote(catalog, version, evidence, key="other", expected_epoch=7) == one
    judge(catalog, version, "contract", "fail", look=2)
    assert _promote(catalog, version, replace(evidence, statements={}), key="third") == one
    assert len(catalog.endpoint_events(ALICE, ENDPOINT)) == 1


def test_an_endpoint_that_moved_is_not_moved_again(catalog: Catalog, snapshot_id: str) -> None:
    first, second = registered(catalog, snapshot_id), registered(catalog, snapshot_id, seed=8)
    evidence = pass_all(catalog, second)
    with pytest.raises(EndpointMoved, match="at epoch 0, the caller expected 1"):
        _promote(catalog, second, evidence, expected_epoch=1)
    _promote(catalog, first, pass_all(catalog, first))
    with pytest.raises(EndpointMoved):
        _promote(catalog, second, evidence, expected_epoch=0)
    with pytest.raises(EndpointMoved):
        catalog.rollback(ALICE, None, ENDPOINT, expected_epoch=2, reason="slow")
    run = catalog.run(ALICE, second.run_id)
    foreign = catalog.register_model_version(ALICE, None, version_facts(run, "logistic", model_id="other"))
    catalog.set_gate_policy(ALICE, None, "other", POLICY)
    with pytest.raises(EndpointRefused, match="serves model 'flight_delay'"):
        _promote(catalog, foreign, pass_all(catalog, foreign))


Spoil = Callable[[Catalog, ModelVersion, PromotionEvidence], PromotionEvidence]


def _same(change: Callable[[Catalog, ModelVersion], object]) -> Spoil:
    def spoil(catalog: Catalog, version: ModelVersion, evidence: PromotionEvidence) -> PromotionEvidence:
        change(catalog, version)
        return evidence

    return spoil


def _forged(catalog: Catalog, version: ModelVersion, evidence: PromotionEvidence) -> PromotionEvidence:
    other = catalog.add_attestation(ALICE, None, statement(version.manifest_digest, "forged"))
    return replace(evidence, statements=dict(evidence.statements) | {"contract": other.statement_digest})


def _signed(role: str, subject: str | None = None) -> Spoil:
    def spoil(catalog: Catalog, version: ModelVersion, evidence: PromotionEvidence) -> PromotionEvidence:
        facts = statement(subject or version.manifest_digest, "promotion again", role)  # pyright: ignore[reportArgumentType]
        return replace(evidence, promotion_statement=catalog.add_attestation(ALICE, None, facts).statement_digest)

    return spoil


SPOILS: dict[str, tuple[str, str, Spoil]] = {
    "a newer failing result": (
        "contract",
        "fail: it is a fail",
        _same(lambda c, v: judge(c, v, "contract", "fail", look=2)),
    ),
    "a newer undecided result": (
        "contract",
        "undecided",
        _same(lambda c, v: judge(c, v, "contract", "undecided", look=2)),
    ),
    "a newer passing result that the evidence does not name": (
        "contract",
        "the evidence names",
        _same(lambda c, v: judge(c, v, "contract", look=2)),
    ),
    "a statement of another content": ("contract", "the evidence names", _forged),
    "a gate that the evidence leaves out": (
        "contract",
        "the evidence names no statement",
        lambda c, v, e: replace(e, statements={k: s for k, s in e.statements.items() if k != "contract"}),
    ),
    "a policy changed meanwhile": (
        "policy",
        "version 2 is in force, the evidence is for 1",
        _same(lambda c, v: c.set_gate_policy(ALICE, None, MODEL, POLICY | {"note": "new"})),
    ),
    "results under an older policy": (
        "contract",
        "judged under policy version 1, 2 is in force",
        lambda c, v, e: replace(
            e, policy_version=c.set_gate_policy(ALICE, None, MODEL, POLICY | {"note": "new"}).version
        ),
    ),
    "a policy with one gate more": (
        "weights_only",
        "never judged",
        _same(
            lambda c, v: c.set_gate_policy(
                ALICE,
                None,
                MODEL,
                POLICY | {"gates": [*POLICY["gates"], {"gate": "weights_only"}]},
            )
        ),
    ),
    "a policy that allows no immediate rollout": (
        "policy",
        "does not allow an immediate rollout",
        _same(lambda c, v: c.set_gate_policy(ALICE, None, MODEL, POLICY | {"allow_immediate": False})),
    ),
    "a retired version": (
        "version",
        "retired",
        _same(lambda c, v: c.retire_model_version(ALICE, None, MODEL, 2, "bad")),
    ),
    "a promotion statement that nobody attested": (
        "promotion",
        "never attested",
        lambda c, v, e: replace(e, promotion_statement=digest("nobody")),
    ),
    "a promotion signed by the gate's role": ("promotion", "signed by role gate", _signed("gate")),
    "a promotion of another artifact": ("promotion", "is about", _signed("promoter", digest("other artifact"))),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_promotion_without_complete_evidence_is_refused(catalog: Catalog, snapshot_id: str, name: str) -> None:
    gate, why, spoil = SPOILS[name]
    first, second = registered(catalog, snapshot_id), registered(catalog, snapshot_id, seed=8)
    one = _promote(catalog, first, pass_all(catalog, first))
    evidence = spoil(catalog, second, pass_all(catalog, second))
    with pytest.raises(PromotionRefused) as refusal:
        _promote(catalog, second, evidence)
    assert why in refusal.value.reasons[gate]
    assert catalog.endpoint(ALICE, ENDPOINT) == one
    assert len(catalog.endpoint_events(ALICE, ENDPOINT)) == 1


def test_the_gate_that_does_not_apply_to_a_kind_is_not_asked_of_it(catalog: Catalog, snapshot_id: str) -> None:
    network, logistic = registered(catalog, snapshot_id), registered(catalog, snapshot_id, kind="logistic")
    evidence = pass_all(catalog, logistic)
    assert "auc_over_logistic" not in evidence.statements
    assert _promote(catalog, logistic, evidence).stable == logistic.version
    partial = pass_all(catalog, network)
    judge(catalog, network, "auc_over_logistic", "fail", look=2)
    with pytest.raises(PromotionRefused, match="auc_over_logistic: fail"):
        _promote(catalog, network, partial)


def test_evidence_of_one_version_promotes_no_other(catalog: Catalog, snapshot_id: str) -> None:
    first, second = registered(catalog, snapshot_id), registered(catalog, snapshot_id, seed=8)
    evidence = pass_all(catalog, first)
    with pytest.raises(PromotionRefused) as refusal:
        _promote(catalog, second, evidence)
    assert set(refusal.value.reasons) == {*GATES, "promotion"}


def test_a_promotion_statement_moves_an_endpoint_once(catalog: Catalog, snapshot_id: str) -> None:
    first, second = registered(catalog, snapshot_id), registered(catalog, snapshot_id, seed=8)
    evidence = pass_all(catalog, first)
    _promote(catalog, first, evidence)
    with pytest.raises(PromotionRefused, match="moved endpoint 'flight_delay' to epoch 1 already"):
        _promote(catalog, first, evidence, endpoint_id="other")
    _promote(catalog, second, pass_all(catalog, second))
    with pytest.raises(PromotionRefused, match="to epoch 1 already"):
        _promote(catalog, first, evidence)


def test_a_version_in_use_is_not_retired_and_a_retired_one_stays_so(catalog: Catalog, snapshot_id: str) -> None:
    versions = [registered(catalog, snapshot_id, seed) for seed in (7, 8, 9)]
    for version in versions[:2]:
        _promote(catalog, version, pass_all(catalog, version))
    for number in (1, 2):
        with pytest.raises(VersionRefused, match="names it"):
            catalog.retire_model_version(ALICE, None, MODEL, number, "old")
    retired = catalog.retire_model_version(ALICE, None, MODEL, 3, "old")
    assert retired.retired
    assert catalog.retire_model_version(ALICE, None, MODEL, 3, "again") == retired
    assert catalog.model_versions(ALICE)[2] == retired
    assert catalog.register_model_version(ALICE, None, versions[2].facts).version == 3


def _answers(*names: str, **changes: object) -> tuple[PredictionFacts, ...]:
    detail = blob("detail").digest
    answer = PredictionFacts(
        "p", 5, "fresh", digest("row"), digest("request"), {"probability": 0.25}, "stable", "ok", 900, detail, 0
    )
    return tuple(replace(answer, prediction_id=name, row=row, **changes) for row, name in enumerate(names))


def test_predictions_are_kept_once_under_the_epoch_that_answered(catalog: Catalog, snapshot_id: str) -> None:
    first, second = registered(catalog, snapshot_id), registered(catalog, snapshot_id, seed=8)
    _promote(catalog, first, pass_all(catalog, first))
    _promote(catalog, second, pass_all(catalog, second))
    batch = PredictionBatch(ENDPOINT, 1, 1, _answers("a1", "a2"), (blob("detail"),))
    assert catalog.record_predictions(ALICE, None, batch) == 2
    assert catalog.record_predictions(ALICE, None, batch) == 2
    more = replace(batch, records=_answers("a1", "a2", "b1"))
    assert catalog.record_predictions(ALICE, "more", more) == 3
    assert catalog.prediction_ids(ALICE, "a") == ["a1", "a2"]
    found = catalog.prediction(ALICE, "b1")
    assert (found.endpoint_epoch, found.model_id, found.model_version, found.output, found.row) == (
        1,
        MODEL,
        1,
        {"probability": 0.25},
        2,
    )
    assert (found.detail_digest, found.feature_as_of) == (blob("detail").digest, 5)
    with pytest.raises(Nondeterminism, match="output"):
        catalog.record_predictions(ALICE, None, replace(batch, records=_answers("a1", output={"probability": 0.5})))
    for changes in ({"endpoint_epoch": 2}, {"model_version": 2}, {"records": _answers("c", arm="candidate")}):
        with pytest.raises(ImpossiblePrediction):
            catalog.record_predictions(ALICE, None, replace(batch, **changes))
    with pytest.raises(UnknownEndpoint):
        catalog.record_predictions(ALICE, None, replace(batch, endpoint_epoch=3))
    with pytest.raises(UnknownPrediction):
        catalog.prediction(ALICE, "c")
    with pytest.raises(InvalidFact, match="detail document"):
        replace(batch, blobs=())
    with pytest.raises(InvalidFact, match="once"):
        replace(batch, records=_answers("x", "x"))


def test_a_cancelled_run_has_no_version(catalog: Catalog, snapshot_id: str) -> None:
    done = succeed(catalog, run_facts(snapshot_id))
    attempt = ask(catalog, run_facts(snapshot_id, seed=8)).attempt
    assert attempt is not None
    end(catalog, attempt, "cancelled")
    with pytest.raises(VersionRefused, match="the run is cancelled"):
        catalog.register_model_version(ALICE, None, version_facts(done, run_id=attempt.run_id))
