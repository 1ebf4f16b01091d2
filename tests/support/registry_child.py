"""A child process that runs one command on runs or endpoints and kills itself at a labelled point."""

from support.catalog_child import die_at
from support.catalog_facts import ALICE, Ticker
from support.registry_facts import (
    BUDGET,
    ENDPOINT,
    MODEL,
    MONTH,
    UNIT,
    ask,
    end,
    pass_all,
    prepare_inputs,
    registered,
    run_facts,
    statement,
)

from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.registry_facts import PromotionEvidence

COMMANDS = ("submit", "finish", "promote")


def prepare(catalog: Catalog, command: str) -> None:
    """Make what the command needs: a budget with one attempt's worth left, an open attempt, or a judged version."""
    snapshot_id = prepare_inputs(catalog)
    catalog.set_budget(ALICE, None, BUDGET, MONTH, UNIT, 100)
    if command == "finish":
        ask(catalog, run_facts(snapshot_id, budget_id=BUDGET))
    if command == "promote":
        pass_all(catalog, registered(catalog, snapshot_id))


def run(catalog: Catalog, command: str, key: str | None) -> object:
    """Run the command, or run it again."""
    [state] = catalog.current_snapshots(ALICE, "flight_delay").values()
    assert state.snapshot is not None
    match command:
        case "submit":
            return ask(catalog, run_facts(state.snapshot.snapshot_id, budget_id=BUDGET), key=key).run
        case "finish":
            [opened] = catalog.runs(ALICE)
            return end(catalog, opened.last, key=key)
        case "promote":
            results = catalog.gate_results(ALICE, MODEL, 1)
            said = {result.gate: result.statement_digest for result in results}
            subject = catalog.model_version(ALICE, MODEL, 1).manifest_digest
            evidence = PromotionEvidence(1, said, statement(subject, ("promotion", 1), "promoter").statement_digest, 5)
            return catalog.promote_immediate(ALICE, key, ENDPOINT, MODEL, 1, expected_epoch=None, evidence=evidence)
        case _:
            raise ValueError(command)


def main(url: str, command: str, point: str, key: str | None) -> None:
    """Run the command in this process, with the probe in the catalog."""
    run(open_catalog(url, Ticker(), die_at(point)), command, key)
