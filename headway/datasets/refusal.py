"""What is wrong with a delivery: a refusal of the whole, or the rejection of single rows.

Values from the data are for the person at the command line. Logs, metadata and the catalog get `redacted()` texts and
reason codes, which carry none.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headway.errors import HeadwayError

MAX_SHOWN = 80
WITHHELD = "withheld: personal"
"""Stands in for a value of a personal column, which nobody gets to see."""


class DeliveryRefused(HeadwayError):
    """A delivery that does not have the declared form. Raised before any version exists.

    `row` counts data rows of the file from 1 (the header is not counted); it and `column` are None where the fault is
    not in one. `value` is the offending text, if it is one.
    """

    def __init__(
        self,
        file: str,
        problem: str,
        remedy: str,
        *,
        row: int | None = None,
        column: str | None = None,
        value: str | None = None,
        limit: str = "",
    ) -> None:
        self.file, self.problem, self.row, self.column, self.value, self.limit = (
            file,
            problem,
            row,
            column,
            value,
            limit,
        )
        super().__init__(self._text(shown=True), remedy)

    def redacted(self) -> str:
        """The message without any value from the data."""
        return f"{self._text(shown=False)}; {self.remedy}"

    def withheld(self) -> "DeliveryRefused":
        """The same refusal without its value, for a personal column."""
        value = None if self.value is None else WITHHELD
        return DeliveryRefused(
            self.file, self.problem, self.remedy, row=self.row, column=self.column, value=value, limit=self.limit
        )

    def _text(self, *, shown: bool) -> str:
        place = self.file
        place += f", row {self.row}" if self.row is not None else ""
        place += f", column {self.column!r}" if self.column is not None else ""
        value = f" {_short(self.value)}" if shown and self.value is not None else ""
        limit = f" (expected: {self.limit})" if self.limit else ""
        return f"{place}:{value} {self.problem}{limit}"


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that has the declared form but cannot be kept.

    `code` is the reason code, `value` and `detail` are for people and stay in memory; of a personal column `value` is
    `WITHHELD` and `detail` empty. `time` is where its partition time would lie (microseconds UTC), None when unknown.
    """

    file: str
    row: int
    column: str
    code: str
    value: str
    detail: str
    time: int | None = None

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.file}, row {self.row}, column {self.column!r}: {_short(self.value)} {self.code}{detail}"


def counts_by_code(rejected: Iterable[RejectedRow]) -> dict[str, int]:
    """How many rows were rejected for each reason; a row with several faults counts once under each."""
    counted = Counter(code for _, _, code in {(r.file, r.row, r.code) for r in rejected})
    return dict(sorted(counted.items()))


def _short(value: str | None) -> str:
    if value is None:
        return ""
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}... ({len(value)} characters)"
