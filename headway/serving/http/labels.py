"""`POST /v2/labels`: what became of predictions, item by item."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from headway.serving.http.body import off_loop
from headway.serving.http.faults import Fault
from headway.serving.http.strict_json import parse_json

if TYPE_CHECKING:
    from headway.serving.http.limits import Limits
    from headway.serving.live.types import Engine

MAX_KEY = 200
REMEMBERED = 1_000

_TOP = ("labels", "endpoint")
# Labels are few and short; what a frozen catalog holds up is bounded by this and refused beyond.
_WAITING = 8


# Endpoint and items to what became of each item, in order: `LabelDesk.accept` of a tenant.
Accept: TypeAlias = Callable[[str, Sequence[object]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class _Remembered:
    """What was answered under an Idempotency-Key; None while it is still being answered."""

    digest: bytes
    answer: bytes | None


class LabelRoute:
    """Checks a body of labels, hands it to the desk in a thread, and remembers answers by Idempotency-Key.

    Labels are idempotent by themselves; the key lets a caller notice that it sent something else under it. Keys live
    as long as the server, the newest `REMEMBERED` of them.
    """

    def __init__(self, engine: Engine, accept: Accept, limits: Limits) -> None:
        self._engine = engine
        self._accept = accept
        self._limits = limits
        self._waiting = 0
        self._keys: OrderedDict[str, _Remembered] = OrderedDict()

    async def answer(self, body: bytes, key: str | None) -> tuple[bytes, Sequence[Mapping[str, Any]]]:
        """The body of the answer, and the outcomes to count (none for an answer that is repeated).

        Raises:
            Fault: the body is not as it must be, or the catalog does not answer in time.
            HeadwayError: what the engine says of the endpoint, or the desk of the catalog.
        """
        if key is None:
            return await self._fresh(body)
        if not key.isprintable() or not 0 < len(key) <= MAX_KEY:
            raise Fault("bad_request", f"Idempotency-Key must be printable text of at most {MAX_KEY} characters")
        digest = hashlib.sha256(body).digest()
        known = self._keys.get(key)
        if known is not None:
            return self._repeated(known, digest), []
        self._keys[key] = _Remembered(digest, None)
        try:
            answer, outcomes = await self._fresh(body)
        except BaseException:
            # Nothing was answered under it, so the same key may come again.
            del self._keys[key]
            raise
        self._keys[key] = _Remembered(digest, answer)
        while len(self._keys) > REMEMBERED:
            self._keys.popitem(last=False)
        return answer, outcomes

    @staticmethod
    def _repeated(known: _Remembered, digest: bytes) -> bytes:
        if not secrets.compare_digest(known.digest, digest):
            raise Fault("key_reused", "this Idempotency-Key came before with another body; use a new key")
        if known.answer is None:
            raise Fault("key_in_use", "a request with this Idempotency-Key is being answered; ask again")
        return known.answer

    async def _fresh(self, body: bytes) -> tuple[bytes, Sequence[Mapping[str, Any]]]:
        endpoint, items = await off_loop(len(body), lambda: self._read(body))
        outcomes = await self._accepted(self._engine.served(endpoint).endpoint_id, items)
        counts: dict[str, int] = {}
        for outcome in outcomes:
            status = str(outcome.get("status"))
            counts[status] = counts.get(status, 0) + 1
        return msgspec.json.encode({"results": outcomes, "counts": counts}), outcomes

    def _read(self, body: bytes) -> tuple[str, list[object]]:
        document: object = parse_json(body, self._limits)
        if not isinstance(document, dict):
            raise Fault("bad_request", 'send {"labels": [{...}, ...]}', field="labels")
        given = cast("dict[str, object]", document)
        for name in given:
            if name not in _TOP:
                text = f"the body has a member {name!r:.80}; known are {', '.join(_TOP)}"
                raise Fault("bad_request", text, field=name[:80])
        items = given.get("labels")
        if not isinstance(items, list) or not items:
            raise Fault("bad_request", "labels must be a list of at least one label", field="labels")
        found = cast("list[object]", items)
        if len(found) > self._limits.labels:
            text = f"{len(found):,} labels came at once, the limit is {self._limits.labels:,}; send fewer"
            raise Fault("too_many_rows", text, field="labels")
        return self._endpoint(given.get("endpoint")), found

    def _endpoint(self, given: object) -> str:
        models = self._engine.models()
        if given is None and len(models) == 1:
            return models[0]
        if not isinstance(given, str):
            text = f"say which endpoint the labels are for, as endpoint: one of {', '.join(models)}"
            raise Fault("bad_request", text, field="endpoint")
        return given

    async def _accepted(self, endpoint: str, items: Sequence[object]) -> Sequence[Mapping[str, Any]]:
        if self._waiting >= _WAITING:
            raise Fault("catalog_unavailable", "labels wait for the catalog already; send them again later")
        self._waiting += 1
        work = _in_thread(partial(self._accept, endpoint, items))
        work.add_done_callback(lambda _: self._finished())
        try:
            return await asyncio.wait_for(asyncio.shield(work), self._limits.labels_s)
        except TimeoutError as error:
            # Repeating is safe: a label that was taken after all is a duplicate then.
            text = f"the catalog did not answer within {self._limits.labels_s:g} s; send the same labels again"
            raise Fault("catalog_unavailable", text) from error

    def _finished(self) -> None:
        self._waiting -= 1


def _in_thread(work: Callable[[], Sequence[Mapping[str, Any]]]) -> asyncio.Future[Sequence[Mapping[str, Any]]]:
    """Do it in a thread of its own; one of an executor would keep a server from ending while the catalog is frozen."""
    done: Future[Sequence[Mapping[str, Any]]] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="labels", daemon=True).start()
    return asyncio.wrap_future(done)
