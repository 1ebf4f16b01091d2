"""The queue of one endpoint: requests that wait together are answered together, by one thread, never by the loop.

A batch leaves when the thread is free: at the next turn of the loop when nothing is under way, else when the batch
before it is done. So nobody waits for company, and under load batches grow by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from headway.serving.live.types import DeadlineExceeded, Inference, NotReady, QueueFull

if TYPE_CHECKING:
    import pyarrow as pa

    from headway.serving.live.following import Slot

logger = logging.getLogger(__name__)

Stage = Literal["queue", "features", "compute"]


@dataclass(slots=True, eq=False)
class Asked:
    """One request on its way. `deadline` and `arrived` are `time.monotonic()` seconds, `asked_at` the world's time.

    `stage` is what it is in; `gone`: its caller waits no more, so nothing is computed or logged for it any more.
    """

    slot: Slot
    requests: pa.Table
    caller_id: str | None
    deadline: float
    asked_at: int
    arrived: float
    answer: asyncio.Future[list[Inference]]
    stage: Stage = "queue"
    gone: bool = False
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.requests.num_rows


Outcome = list[Inference] | BaseException
Answer = Callable[[Sequence[Asked]], list[Outcome]]


class Lane:
    """Its methods are called from the event loop only; `answer` runs in the lane's own thread.

    Args:
        name: for the thread.
        answer: gives an outcome for each request of a batch; what it raises fails all of them.
        queue_rows: rows that may wait.
        batch_rows: rows of a batch, unless one request alone has more.
    """

    def __init__(self, name: str, answer: Answer, queue_rows: int, batch_rows: int) -> None:
        self._answer = answer
        self._queue_rows = queue_rows
        self._batch_rows = batch_rows
        self._waiting: deque[Asked] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"headway-lane-{name}")
        self._busy = False
        self._batch_seconds = 0.0
        self.rows = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._busy and not self._waiting

    async def ask(self, asked: Asked) -> list[Inference]:
        """The answer to a request.

        Raises:
            QueueFull: too many rows wait, or they would not be done by the deadline.
            DeadlineExceeded: the deadline passed; what was not begun is not computed.
        """
        self._admit(asked)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(0.0, asked.deadline - time.monotonic()), _expire, asked)
        self._waiting.append(asked)
        asked.slot.users += 1
        self.rows += asked.rows
        if not self._busy and len(self._waiting) == 1:
            # The next turn of the loop, so that requests that were read in this one go together.
            loop.call_soon(self._pump)
        try:
            return await asked.answer
        finally:
            timer.cancel()
            asked.gone = True

    def refuse(self) -> None:
        """Refuse what still waits."""
        while self._waiting:
            asked = self._waiting.popleft()
            self.rows -= asked.rows
            asked.slot.users -= 1
            _settle(asked, NotReady("draining", 1.0))

    def close(self) -> None:
        """End the thread after the batch that is under way."""
        self._thread.shutdown(wait=True)

    def _admit(self, asked: Asked) -> None:
        ahead = self.rows
        # By batches, not rows: what waits together is answered together, at nearly the cost of one.
        wait = (ahead // self._batch_rows + 1) * self._batch_seconds
        if ahead and ahead + asked.rows > self._queue_rows:
            raise QueueFull(ahead, self._queue_rows, max(0.1, wait))
        if ahead and time.monotonic() + wait > asked.deadline:
            raise QueueFull(ahead, self._queue_rows, wait)

    def _pump(self) -> None:
        if self._busy:
            return
        batch = self._take()
        if not batch:
            return
        self._busy = True
        loop = asyncio.get_running_loop()
        begun = time.monotonic()
        work = loop.run_in_executor(self._thread, self._answer, batch)
        work.add_done_callback(lambda done: self._finish(batch, begun, done))

    def _take(self) -> list[Asked]:
        """The next batch: requests of one slot, in their order; whose caller left, or whose time is over, is let go."""
        batch: list[Asked] = []
        rows = 0
        while self._waiting:
            asked = self._waiting[0]
            expired = asked.gone or asked.answer.done() or time.monotonic() >= asked.deadline
            if not expired and batch and (asked.slot is not batch[0].slot or rows + asked.rows > self._batch_rows):
                break
            self._waiting.popleft()
            self.rows -= asked.rows
            if expired:
                asked.slot.users -= 1
                _settle(asked, DeadlineExceeded("queue"))
                continue
            batch.append(asked)
            rows += asked.rows
        return batch

    def _finish(self, batch: Sequence[Asked], begun: float, done: asyncio.Future[list[Outcome]]) -> None:
        self._busy = False
        error = done.exception()
        if error is not None:
            logger.error("a batch of %d requests failed", len(batch), exc_info=error)
        outcomes = [error] * len(batch) if error is not None else done.result()
        if any(isinstance(outcome, list) for outcome in outcomes):
            # A process that hung or was replaced says nothing about how long the next batch will take.
            spent = time.monotonic() - begun
            self._batch_seconds = spent if self._batch_seconds == 0 else 0.8 * self._batch_seconds + 0.2 * spent
        # What waits is begun before the answers are written, so that thread and loop work at once.
        self._pump()
        for asked, outcome in zip(batch, outcomes, strict=True):
            asked.slot.users -= 1
            _settle(asked, outcome)


def _expire(asked: Asked) -> None:
    asked.gone = True
    _settle(asked, DeadlineExceeded(asked.stage))


def _settle(asked: Asked, outcome: Outcome) -> None:
    if asked.answer.done():
        return
    if isinstance(outcome, BaseException):
        asked.answer.set_exception(outcome)
    else:
        asked.answer.set_result(outcome)
