"""The server's log: one JSON object a line on standard error, without values of fields and without personal data.

A stack trace keeps its places and the kinds of its exceptions. Their texts are left out, because they often quote the
value that was at fault.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

import msgspec

from headway.catalog.clock import system_clock
from headway.datasets.zones import iso

LOGGER = logging.getLogger("headway.serve")


class JsonLines(logging.Formatter):
    """Formats a record as one line; `extra={"facts": {...}}` of the call stands beside time, level and event."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {"at": iso(system_clock()), "level": record.levelname.lower()}
        line["event"] = record.getMessage()
        line |= getattr(record, "facts", {})
        if record.exc_info is not None and record.exc_info[1] is not None:
            line["trace"] = _places(record.exc_info[1])
        return msgspec.json.encode(line).decode()


def configure(level: str) -> None:
    """Send what Headway and uvicorn log to standard error as JSON lines of `level` and above."""
    # A line says none of these, and looking them up costs more than the line.
    logging._srcfile = ""
    logging.logThreads = logging.logMultiprocessing = logging.logProcesses = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    wanted = logging.getLevelNamesMapping()[level.upper()]
    # Uvicorn's notices of starting and stopping say nothing that ours do not.
    for name, least in (("headway", wanted), ("uvicorn.error", max(logging.WARNING, wanted))):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least)


def log(event: str, level: int = logging.INFO, error: BaseException | None = None, /, **facts: object) -> None:
    """Write one line, with the places of an error where one is given, if its level is asked for."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, exc_info=error, extra={"facts": facts})


def _places(error: BaseException) -> list[str]:
    """Kinds and places of an exception and its causes, innermost cause first."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
    return [*([] if cause is None else _places(cause)), *frames, type(error).__name__]
