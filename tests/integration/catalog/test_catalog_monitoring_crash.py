"""kill -9 around the commit of a shipment, labels, a request and its end, then again: nothing lost, nothing doubled."""

import signal
from pathlib import Path
from typing import Any

import pytest
from support.catalog_child import exit_code
from support.catalog_facts import ALICE, Ticker
from support.catalog_monitoring import COMMANDS, LIMIT, PERIOD, main, prepare, run
from support.registry_facts import BUDGET, ENDPOINT, UNIT

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.invariants import check
from headway.catalog.run_facts import BudgetState

# What there is after the command, once: the segment's cursor, what is current and waits, requests, budget.
AFTER: dict[str, tuple[Any, ...]] = {
    "ship": (100, {"p1": "l1"}, [], [], BudgetState(LIMIT, 0, 0, UNIT)),
    "label": (100, {"p1": "l1"}, ["l2"], [], BudgetState(LIMIT, 0, 0, UNIT)),
    "open": (0, {}, [], ["ready"], BudgetState(LIMIT, 300, 0, UNIT)),
    "close": (0, {}, ["l1"], ["promoted"], BudgetState(LIMIT, 0, 121, UNIT)),
}


def _effects(catalog: Catalog) -> tuple[Any, ...]:
    return (
        catalog.segment_cursor(ALICE, "main", "000001"),
        {name: found.label_id for name, found in catalog.current_labels(ALICE, ["p1", "p2"]).items()},
        [found.label_id for found in catalog.label_inbox(ALICE, ENDPOINT)],
        [found.state for found in catalog.retrain_requests(ALICE)],
        catalog.budget(ALICE, BUDGET, PERIOD),
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("point", "key"), [("before_commit", None), ("after_commit", None), ("after_commit", "my-key")]
)
def test_a_killed_command_is_repeated_without_loss_or_doubling(
    served_url: str, tmp_path: Path, command: str, point: str, key: str | None
) -> None:
    catalog = open_catalog(served_url, Ticker())
    prepare(catalog, command)
    before = _effects(catalog)
    assert before != AFTER[command]
    assert exit_code(main, served_url, command, point, key) == -signal.SIGKILL
    assert _effects(catalog) == (AFTER[command] if point == "after_commit" else before)
    answer = run(catalog, command, key)
    assert run(catalog, command, key) == answer
    assert _effects(catalog) == AFTER[command]
    findings = check(catalog, ALICE, LocalStore(tmp_path / "store"))
    assert [finding for finding in findings if not finding.ok and finding.name != "stored bytes"] == []
    catalog.close()
