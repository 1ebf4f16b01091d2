"""kill -9 around the commit of a submission, an end and a promotion, then again: nothing lost, nothing doubled."""

import signal
from pathlib import Path

import pytest
from support.catalog_child import exit_code
from support.catalog_facts import ALICE, Ticker
from support.registry_child import COMMANDS, main, prepare, run
from support.registry_facts import BUDGET, ENDPOINT, MONTH, UNIT

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.invariants import check
from headway.catalog.run_facts import BudgetState

# What there is after the command, once: attempts' states, entries and state of the budget, moves of the endpoint.
AFTER = {
    "submit": (["admitted"], ["reserve"], BudgetState(100, 100, 0, UNIT), 0),
    "finish": (["succeeded"], ["commit", "release", "reserve"], BudgetState(100, 0, 13, UNIT), 0),
    "promote": (["succeeded"], [], BudgetState(100, 0, 0, UNIT), 1),
}


def _effects(catalog: Catalog) -> tuple[list[str], list[str], BudgetState | None, int]:
    return (
        [attempt.state for found in catalog.runs(ALICE) for attempt in found.attempts],
        sorted(entry.kind for entry in catalog.budget_entries(ALICE, BUDGET, MONTH)),
        catalog.budget(ALICE, BUDGET, MONTH),
        len(catalog.endpoint_events(ALICE, ENDPOINT)),
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("point", ["effect", "before_commit", "after_commit"])
@pytest.mark.parametrize("key", ["my-key", None])
def test_a_killed_command_is_repeated_without_loss_or_doubling(
    catalog_url: str, tmp_path: Path, command: str, point: str, key: str | None
) -> None:
    catalog = open_catalog(catalog_url, Ticker())
    prepare(catalog, command)
    before = _effects(catalog)
    assert before != AFTER[command]
    assert exit_code(main, catalog_url, command, point, key) == -signal.SIGKILL
    assert _effects(catalog) == (AFTER[command] if point == "after_commit" else before)
    answer = run(catalog, command, key)
    assert run(catalog, command, key) == answer
    assert _effects(catalog) == AFTER[command]
    findings = check(catalog, ALICE, LocalStore(tmp_path / "store"))
    assert [finding for finding in findings if not finding.ok and finding.name != "stored bytes"] == []
    catalog.close()
