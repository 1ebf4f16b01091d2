"""The catalog's face for training runs and budgets."""

from collections.abc import Callable, Mapping, Sequence

import sqlalchemy as sa

from headway.artifacts.digests import Json
from headway.catalog import budgets, runs
from headway.catalog.base import CatalogBase
from headway.catalog.commands import Command, Document, Step
from headway.catalog.encoding import encode
from headway.catalog.errors import InvalidFact
from headway.catalog.facts import Principal, check_count, check_hash, check_name, check_text
from headway.catalog.run_documents import attempt_of, run_of, submission_of
from headway.catalog.run_facts import (
    Asker,
    Attempt,
    BudgetEntry,
    BudgetState,
    Checkpoint,
    FinalState,
    Retry,
    RunEvent,
    RunFacts,
    RunResult,
    Submission,
    TrainingRun,
    check_json,
)
from headway.catalog.runs import Ask, Ending


class RunCommands(CatalogBase):
    """Runs, attempts, their events and checkpoints, and the budgets that they draw on."""

    def submit_run(
        self,
        principal: Principal,
        key: str | None,
        facts: RunFacts,
        *,
        asker: Asker,
        retry: bool,
        reserve_seconds: int,
        launcher: str,
    ) -> Submission:
        """Ask for the run of these facts; its identity decides what the ask means.

        No such run: it is made with attempt 1 (`started`). Open: `adopted`. Succeeded: `up_to_date`. Ended by
        infrastructure, or cancelled and asked for by a person: a new attempt (`started`). A new attempt reserves
        `reserve_seconds` from the run's budget in the UTC month of now, in the same commit. An attempt starts as
        `admitted`; whoever gets `started` or `adopted` makes sure that its processes are there.

        Args:
            principal: who acts.
            key: the idempotency key, None to derive one.
            facts: what the run pins; of an existing run the stored facts stand, but for `max_attempts`.
            asker: whether a person asks, or a sensor, backfill or retry policy.
            retry: start a new attempt although the code failed, or although `max_attempts` are spent.
            reserve_seconds: worker-seconds that the attempt may cost.
            launcher: the launcher that will run the attempt.

        Raises:
            UnknownSnapshot, UnknownVersion, InputNotReleased: a pinned input is not what the catalog has.
            RunRefused: the last attempt failed by its code, and `retry` is not set.
            RunCancelled: the run was cancelled, and no person asks.
            AttemptsSpent: infrastructure ended `max_attempts` attempts (preemptions not counted).
            BudgetMissing: the run's budget has no amount in this month.
            BudgetExhausted: the budget cannot carry the reservation.
        """
        ask = Ask(asker, retry, reserve_seconds, launcher)
        run_id = facts.run_id(principal.tenant)
        command = Command("run.submit", runs.aggregate(run_id), {"facts": encode(facts), "ask": encode(ask)})
        answer = self._runner.run(
            principal,
            key,
            command,
            lambda step: runs.submit(step, facts, ask),
            lambda connection: runs.own_seq(connection, principal.tenant, run_id),
        )
        return submission_of(answer)

    def restart_run(
        self,
        principal: Principal,
        key: str | None,
        run_id: str,
        *,
        reserve_seconds: int,
        layout: Mapping[str, Json] | None = None,
    ) -> Submission:
        """Ask for another attempt of a run that infrastructure ended, with a `layout` of its own or the run's.

        The reconciler's way.

        Raises:
            UnknownRun: there is no such run.
            RunRefused, RunCancelled, AttemptsSpent, BudgetMissing, BudgetExhausted: as `submit_run` for a machine.
        """
        check_count("reserve_seconds", reserve_seconds)
        answer = self._run_command(
            principal,
            key,
            "run.restart",
            run_id,
            {"reserve_seconds": reserve_seconds} | ({} if layout is None else {"layout": dict(layout)}),
            lambda step: runs.restart(step, run_id, reserve_seconds, layout),
            lambda connection: runs.own_seq(connection, principal.tenant, run_id),
        )
        return submission_of(answer)

    def mark_running(self, principal: Principal, key: str | None, run_id: str, attempt: int, token: int) -> Attempt:
        """Record that an admitted attempt's processes were seen; nothing when it runs already.

        Raises:
            UnknownRun, UnknownAttempt: there is no such attempt.
            StaleAttempt: it is over, or the token is not its token.
        """
        answer = self._run_command(
            principal,
            key,
            "run.mark_running",
            run_id,
            {"attempt": attempt, "token": token},
            lambda step: runs.mark_running(step, run_id, attempt, token),
            lambda connection: attempt,
        )
        return attempt_of(answer)

    def note_waiting(
        self, principal: Principal, run_id: str, attempt: int, token: int, code: str, message: str
    ) -> Attempt:
        """Record why an open attempt does not run yet: a reason code and the place's words; the same again is nothing.

        Raises:
            UnknownRun, UnknownAttempt: there is no such attempt.
            StaleAttempt: it is over, or the token is not its token.
        """
        check_name("code", code)
        check_text("message", message)
        answer = self._run_command(
            principal,
            None,
            "run.note_waiting",
            run_id,
            {"attempt": attempt, "token": token, "code": code, "message": message},
            lambda step: runs.note_waiting(step, run_id, attempt, token, code, message),
            lambda connection: runs.own_seq(connection, principal.tenant, run_id),
        )
        return attempt_of(answer)

    def beat(self, principal: Principal, run_id: str, attempt: int, token: int, at: int) -> None:
        """Note that an open attempt was seen alive at `at` (microseconds UTC). Light: neither audited nor told.

        Raises:
            UnknownRun, UnknownAttempt: there is no such attempt.
            StaleAttempt: it is over, or the token is not its token.
        """
        with self.database.write(principal.tenant, "run.beat") as connection:
            runs.beat(connection, principal.tenant, run_id, attempt, token, at)

    def append_events(
        self,
        principal: Principal,
        run_id: str,
        attempt: int,
        node: int,
        first_seq: int,
        events: Sequence[Mapping[str, Json]],
    ) -> int:
        """Store events of one node's stream exactly once; return the number that is expected next.

        Args:
            principal: who acts.
            run_id: the run.
            attempt: the attempt, which may be over: what it said before stays worth keeping.
            node: the node whose stream this is.
            first_seq: the stream's number of the first event, from 1; what is stored already is skipped.
            events: objects with `kind`, `data` and `at` (microseconds UTC) in order; a `seq` must be the right one.

        Raises:
            UnknownRun, UnknownAttempt: there is no such attempt.
            EventGap: events before `first_seq` are missing.
            InvalidFact: an event has another form; none is stored.
        """
        check_count("node", node)
        runs.check_events(first_seq, events)
        with self.database.write(principal.tenant, "run.events") as connection:
            self.database.lock(connection, principal.tenant, runs.aggregate(run_id))
            stream = (run_id, attempt, node)
            return runs.append_events(connection, principal.tenant, principal.actor, stream, first_seq, events)

    def event_cursor(self, principal: Principal, run_id: str, attempt: int, node: int) -> int:
        """Return the number of the last stored event of a node's stream; 0 when there is none."""
        with self.reading(principal) as connection:
            return runs.event_cursor(connection, principal.tenant, run_id, attempt, node)

    def run_events(
        self,
        principal: Principal,
        run_id: str,
        attempt: int | None = None,
        after: int = 0,
        limit: int = 1_000,
        kinds: Sequence[str] | None = None,
    ) -> list[RunEvent]:
        """Return at most `limit` events of a run after number `after`, in order; of an attempt or kinds when named."""
        with self.reading(principal) as connection:
            return runs.read_events(connection, principal.tenant, run_id, attempt, after, limit, kinds)

    def record_checkpoint(
        self,
        principal: Principal,
        key: str | None,
        run_id: str,
        attempt: int,
        token: int,
        step: int,
        manifest_digest: str,
        layout: Mapping[str, Json],
    ) -> Checkpoint:
        """Keep a complete checkpoint of an open attempt, with the layout that wrote it.

        Raises:
            UnknownRun, UnknownAttempt: there is no such attempt.
            StaleAttempt: it is over, or the token is not its token.
            Nondeterminism: the attempt had another checkpoint at this step.
        """
        check_count("step", step)
        check_hash("manifest_digest", manifest_digest)
        check_json("layout", layout)
        made = Checkpoint(run_id, attempt, step, manifest_digest, layout, 0)
        answer = self._run_command(
            principal,
            key,
            "run.checkpoint",
            run_id,
            encode(made) | {"token": token},
            lambda transaction: runs.record_checkpoint(transaction, made, token),
            lambda connection: attempt,
        )
        return Checkpoint(**answer)  # pyright: ignore[reportArgumentType]

    def checkpoints(self, principal: Principal, run_id: str) -> list[Checkpoint]:
        """Return the recorded checkpoints of a run in order of attempt and step."""
        with self.reading(principal) as connection:
            return runs.read_checkpoints(connection, principal.tenant, run_id)

    def finish_attempt(
        self,
        principal: Principal,
        key: str | None,
        run_id: str,
        attempt: int,
        token: int,
        *,
        state: FinalState,
        reason: str | None,
        code: int | None,
        worker_seconds: float,
        result: RunResult | None,
        restart: bool = False,
        reason_code: str | None = None,
        retry: Retry | None = None,
        next_layout: Mapping[str, Json] | None = None,
    ) -> TrainingRun:
        """Record how an attempt ended; its result and the settlement of its budget are in the same commit.

        With `restart`, so is the attempt that follows one which infrastructure ended, under the rules of `restart_run`
        and with the same reservation: nobody ever sees the run without it. It has `next_layout`, or the run's own.
        Where a rule forbids it, the run stays as it ended. `retry` says whether the end counts against `max_attempts`;
        None: the exit code decides.

        The reservation is given back whole and what was used is committed: worker-seconds rounded up, even where they
        are more than was reserved (the limit is checked when something is reserved). The same end again is answered
        again; a terminal state never changes.

        Raises:
            UnknownRun, UnknownAttempt: there is no such attempt.
            StaleAttempt: it ended otherwise already, or the token is not its token.
            InvalidFact: a success without an artifact, or a result without a success.
        """
        ending = Ending(state, reason, code, worker_seconds, result, reason_code, retry)
        answer = self._run_command(
            principal,
            key,
            "run.finish",
            run_id,
            encode(ending)
            | {"attempt": attempt, "token": token, "restart": restart}
            | ({} if next_layout is None else {"next_layout": dict(next_layout)}),
            lambda step: runs.finish(step, run_id, attempt, token, ending, restart, next_layout),
            lambda connection: attempt,
        )
        return run_of(answer)

    def request_cancel(self, principal: Principal, key: str | None, run_id: str, reason: str) -> TrainingRun:
        """Ask for a run to stop: its open attempt, or the attempt that a machine would start after a failure.

        Nothing changes when it succeeded, failed by its code, or was asked to stop already.

        Raises:
            UnknownRun: there is no such run.
        """
        check_text("reason", reason)
        answer = self._run_command(
            principal,
            key,
            "run.cancel",
            run_id,
            {"reason": reason},
            lambda step: runs.request_cancel(step, run_id, reason),
            lambda connection: runs.own_seq(connection, principal.tenant, run_id),
        )
        return run_of(answer)

    def run(self, principal: Principal, run_id: str) -> TrainingRun:
        """Return one run with its attempts and result.

        Raises:
            UnknownRun: there is no such run.
        """
        with self.reading(principal) as connection:
            return runs.read_run(connection, principal.tenant, run_id)

    def run_ids(self, principal: Principal, prefix: str) -> list[str]:
        """Return the run ids that begin with a text, in order."""
        with self.reading(principal) as connection:
            return runs.read_ids(connection, principal.tenant, prefix)

    def runs(
        self, principal: Principal, pipeline: str | None = None, partition: str | None = None, limit: int = 200
    ) -> list[TrainingRun]:
        """Return at most `limit` runs, the newest first; of a pipeline or partition when named."""
        with self.reading(principal) as connection:
            return runs.read_runs(connection, principal.tenant, pipeline, partition, limit)

    def open_attempts(self, principal: Principal) -> list[Attempt]:
        """Return the attempts whose end was not observed, the oldest first."""
        with self.reading(principal) as connection:
            return runs.read_open(connection, principal.tenant)

    def set_budget(
        self, principal: Principal, key: str | None, budget_id: str, period: str, unit: str, amount: int
    ) -> BudgetState:
        """Set what may be spent from a budget in a period (runs use the UTC month, as 2013-06).

        Raises:
            BudgetBelowUse: more is reserved or spent already.
            InvalidFact: another unit than the one in which something was reserved or spent.
        """
        for name, value in (("budget_id", budget_id), ("period", period), ("unit", unit)):
            check_name(name, value)
        if "/" in period:
            raise InvalidFact("period", period, "a name without a slash")
        check_count("amount", amount)
        command = Command("budget.set", budgets.aggregate(budget_id, period), {"unit": unit, "amount": amount})
        answer = self._runner.run(
            principal,
            key,
            command,
            lambda step: budgets.set_amount(step, budget_id, period, unit, amount),
            lambda connection: budgets.set_at(connection, principal.tenant, budget_id, period, unit, amount),
        )
        return BudgetState(**answer)  # pyright: ignore[reportArgumentType]

    def budget(self, principal: Principal, budget_id: str, period: str) -> BudgetState | None:
        """Return a budget's state in a period; None when it has no amount there."""
        with self.reading(principal) as connection:
            return budgets.read(connection, principal.tenant, budget_id, period)

    def budget_entries(self, principal: Principal, budget_id: str, period: str) -> list[BudgetEntry]:
        """Return a budget's movements in a period, in order of time."""
        with self.reading(principal) as connection:
            return budgets.read_entries(connection, principal.tenant, budget_id, period)

    def _run_command(
        self,
        principal: Principal,
        key: str | None,
        operation: str,
        run_id: str,
        arguments: Mapping[str, Json],
        effect: Callable[[Step], Document],
        position: Callable[[sa.Connection], int],
    ) -> Document:
        command = Command(operation, runs.aggregate(run_id), arguments)
        return self._runner.run(principal, key, command, effect, position)
