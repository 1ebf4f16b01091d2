"""Budgets: reserved before something starts, settled from what was observed when it ends, each exactly once.

One reservation, one release and one commitment per owner: their entries have names that follow from the owner.
"""

import math
from datetime import UTC, datetime

import sqlalchemy as sa

from headway.catalog.commands import Document, Step
from headway.catalog.encoding import encode
from headway.catalog.errors import BudgetBelowUse, BudgetExhausted, BudgetMissing, InvalidFact
from headway.catalog.run_facts import BudgetEntry, BudgetState
from headway.catalog.tables import budget, budget_entry

ATTEMPT = "run_attempt"


def aggregate(budget_id: str, period: str) -> str:
    """Return the aggregate of a budget in a period."""
    return f"budget:{budget_id}/{period}"


def period_of(now: int) -> str:
    """Return the UTC month of a time in microseconds, as 2013-06."""
    return datetime.fromtimestamp(now // 1_000_000, UTC).strftime("%Y-%m")


def set_amount(step: Step, budget_id: str, period: str, unit: str, amount: int) -> Document:
    """Set what may be spent in a period; never less than what is reserved and spent already."""
    found = read(step.connection, step.tenant, budget_id, period)
    if found is None:
        step.insert(budget, budget_id=budget_id, period=period, unit=unit, amount=amount, created_at=step.now, epoch=1)
    elif (found.unit, found.limit) != (unit, amount):
        used = found.reserved + found.committed
        if unit != found.unit and used:
            raise InvalidFact("unit", unit, f"{found.unit!r}, in which {used} are reserved or spent already")
        if amount < used:
            raise BudgetBelowUse(budget_id, period, amount, used)
        step.connection.execute(
            sa.update(budget)
            .where(*_mine(step.tenant, budget_id, period))
            .values(unit=unit, amount=amount, epoch=budget.c.epoch + 1)
        )
    state = read(step.connection, step.tenant, budget_id, period)
    return encode(state)


def set_at(connection: sa.Connection, tenant: str, budget_id: str, period: str, unit: str, amount: int) -> int:
    """Return the epoch at which the budget got, or would get, this amount."""
    statement = sa.select(budget.c.unit, budget.c.amount, budget.c.epoch).where(*_mine(tenant, budget_id, period))
    row = connection.execute(statement).first()
    if row is None:
        return 1
    return row.epoch if (row.unit, row.amount) == (unit, amount) else row.epoch + 1


def reserve(
    step: Step, budget_id: str, owner_id: str, amount: int, *, period: str | None = None, owner_kind: str = ATTEMPT
) -> str:
    """Hold `amount` for an owner in a period, None for the month of the command; return the period.

    Raises:
        BudgetMissing: the budget has no amount in this month.
        BudgetExhausted: reserved + committed + amount would pass the limit.
    """
    period = period or period_of(step.now)
    step.database.lock(step.connection, step.tenant, aggregate(budget_id, period))
    state = read(step.connection, step.tenant, budget_id, period)
    if state is None:
        raise BudgetMissing(budget_id, period)
    if state.reserved + state.committed + amount > state.limit:
        raise BudgetExhausted(budget_id, period, state.limit, state.reserved, state.committed, amount)
    _insert(step, budget_id, period, "reserve", owner_id, amount, owner_kind)
    return period


def settle(
    step: Step,
    budget_id: str,
    period: str,
    owner_id: str,
    reserved: int,
    observed: float,
    *,
    owner_kind: str = ATTEMPT,
) -> None:
    """Give back what an owner held and commit what it used: whole units, rounded up, in the period of reservation."""
    step.database.lock(step.connection, step.tenant, aggregate(budget_id, period))
    _insert(step, budget_id, period, "release", owner_id, reserved, owner_kind)
    _insert(step, budget_id, period, "commit", owner_id, math.ceil(observed), owner_kind)


def read(connection: sa.Connection, tenant: str, budget_id: str, period: str) -> BudgetState | None:
    """Return a budget's state in a period; None when it has no amount there."""
    row = connection.execute(sa.select(budget.c.amount, budget.c.unit).where(*_mine(tenant, budget_id, period))).first()
    if row is None:
        return None
    sums = sa.select(budget_entry.c.kind, sa.func.sum(budget_entry.c.amount).label("total"))
    rows = connection.execute(sums.where(*_entries(tenant, budget_id, period)).group_by(budget_entry.c.kind))
    total: dict[str, int] = {item.kind: int(item.total) for item in rows}
    reserved = total.get("reserve", 0) - total.get("release", 0)
    return BudgetState(row.amount, reserved, total.get("commit", 0), row.unit)


def read_entries(connection: sa.Connection, tenant: str, budget_id: str, period: str) -> list[BudgetEntry]:
    """Return a budget's movements in a period, in order of time and name."""
    columns = budget_entry.c
    statement = (
        sa.select(columns.entry_id, columns.kind, columns.owner_kind, columns.owner_id, columns.amount, columns.at)
        .where(*_entries(tenant, budget_id, period))
        .order_by(columns.at, columns.entry_id)
    )
    return [BudgetEntry(*row) for row in connection.execute(statement)]


def _mine(tenant: str, budget_id: str, period: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (budget.c.tenant_id == tenant, budget.c.budget_id == budget_id, budget.c.period == period)


def _entries(tenant: str, budget_id: str, period: str) -> tuple[sa.ColumnElement[bool], ...]:
    columns = budget_entry.c
    return (columns.tenant_id == tenant, columns.budget_id == budget_id, columns.period == period)


def _insert(step: Step, budget_id: str, period: str, kind: str, owner_id: str, amount: int, owner_kind: str) -> None:
    step.insert(
        budget_entry,
        entry_id=f"{owner_id}:{kind}",
        budget_id=budget_id,
        period=period,
        kind=kind,
        owner_kind=owner_kind,
        owner_id=owner_id,
        amount=amount,
        at=step.now,
        command_key=step.key,
    )
