"""`python -m trainer.ledger [--step a:b] [--json] [--digest]`: which samples each step of a run learned from.

Standard input names the run as one JSON document: `spec` (its run spec), `store_root`, and `events`, in their order:
`{"attempt", "kind", "data"}` of the kinds `position`, `step`, `epoch`, `checkpoint` and `metrics`.

Nothing of it was written down while the run went on: order and division of the samples are a pure function of the spec,
the step and the number of data ranks (`trainer.batches.BatchPlan`). What the events add is which attempt took a step,
and on how many ranks. An attempt counts from its own `position` up to where a later attempt began again; what it took
beyond that was lost with it. Of rows a sample is named by its identity, of tokens by its shard and the offset in it.

Exits 2 when a step is asked for that was not taken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trainer.batches import BatchPlan
from trainer.blobs import InvalidManifest, Json, canonical_json, digest_bytes, parse_manifest
from trainer.data import DataRefused, blob_path, load_rows
from trainer.spec import RunSpec, SpecRefused, TokenDataSpec, parse_run
from trainer.tokens import first_samples, locate

Sample = tuple[Json, ...]
"""The identity of a row, or shard and offset of a window of tokens."""

CODE_ROOT = Path(__file__).resolve().parents[1]
_DECIDING = ("trainer/batches.py", "trainer/data.py", "trainer/tokens.py")
_REFUSED = 2


class NotRecorded(ValueError):
    """Steps that the run's events say nothing of; the message says which ones they tell of."""


@dataclass(frozen=True)
class Taken:
    """Steps `first` to `last` (from 1, both included) as one attempt took them, each batch over `data_ranks` parts."""

    attempt: int
    first: int
    last: int
    data_ranks: int


@dataclass(frozen=True)
class Entry:
    """One step: the samples that each data rank learned from, in its order; filling is left out."""

    step: int
    epoch: int
    attempt: int
    ranks: tuple[tuple[Sample, ...], ...]

    @property
    def samples(self) -> list[Sample]:
        """All samples of the step, in the order of the ranks: the same on any number of them."""
        return [sample for rank in self.ranks for sample in rank]


class Ledger:
    """What a run has learned from.

    Args:
        spec: The run.
        store_root: Root of the content-addressed store; only for rows, whose identities are read from there.
        taken: Which attempt took which steps, see `steps_taken`.

    Raises:
        DataRefused: the rows are not what the run learned from.
    """

    def __init__(self, spec: RunSpec, store_root: Path, taken: Sequence[Taken]) -> None:
        self.taken = tuple(taken)
        self._spec = spec
        self._samples, self._name = _token_samples(spec) if _is_text(spec) else _row_samples(spec, store_root)

    @property
    def last(self) -> int:
        """The last step, from 1; 0 when none was taken."""
        return max((part.last for part in self.taken), default=0)

    def entries(self, first: int, last: int) -> Iterator[Entry]:
        """The steps `first` to `last`, from 1, both included.

        Raises:
            NotRecorded: one of them was not taken.
        """
        if not 1 <= first <= last <= self.last:
            raise NotRecorded(f"steps {first} to {last}; the run's events tell of steps 1 to {self.last}")
        for part in self.taken:
            plan = self._plan(part.data_ranks)
            epoch, order = -1, torch.empty(0, dtype=torch.int64)
            for step in range(max(first, part.first), min(last, part.last) + 1):
                if plan.place(step - 1)[0] != epoch:
                    epoch = plan.place(step - 1)[0]
                    order = plan.order(epoch)
                ranks = tuple(self._real(plan, order, step, rank) for rank in range(part.data_ranks))
                yield Entry(step, epoch + 1, part.attempt, ranks)

    def _plan(self, data_ranks: int) -> BatchPlan:
        batch = self._spec.batch
        return BatchPlan(self._samples, batch.global_size, data_ranks, batch.accumulation, self._spec.seed)

    def _real(self, plan: BatchPlan, order: Tensor, step: int, rank: int) -> tuple[Sample, ...]:
        parts = plan.micro_batches(order, step - 1, rank)
        places = [places if weight is None else places[weight > 0] for places, weight in parts]
        return tuple(self._name(torch.cat(places)))


def steps_taken(spec: RunSpec, events: Sequence[Mapping[str, Any]]) -> list[Taken]:
    """Which attempt took which steps for good, in the order of the steps.

    Raises:
        NotRecorded: an attempt took steps and did not say where it began.
    """
    begun: dict[int, tuple[int, int]] = {}
    reached: dict[int, int] = {}
    for event in events:
        attempt, data = int(event["attempt"]), event["data"]
        if event["kind"] == "position":
            begun[attempt] = int(data["step"]), int(data["data_ranks"])
        else:
            told = data.get("steps" if event["kind"] == "metrics" else "step")
            reached[attempt] = max(reached.get(attempt, 0), int(told or 0))
    for attempt in sorted(reached.keys() - begun.keys()):
        # Runs from before attempts said so; the first attempt begins with the first step.
        if attempt != 1:
            raise NotRecorded(f"attempt {attempt} took steps up to {reached[attempt]} and did not say where it began")
        begun[attempt] = 0, spec.layout.data_ranks
    taken: list[Taken] = []
    end = max([reached.get(max(begun), 0), begun[max(begun)][0]]) if begun else 0
    for attempt in sorted(begun, reverse=True):
        start, data_ranks = begun[attempt]
        if start < end:
            taken.append(Taken(attempt, start + 1, end, data_ranks))
        end = min(end, start)
    return taken[::-1]


def _is_text(spec: RunSpec) -> bool:
    return isinstance(spec.data, TokenDataSpec)


def _token_samples(spec: RunSpec) -> tuple[int, Callable[[Tensor], list[Sample]]]:
    data = spec.tokens
    firsts = first_samples([file.tokens for file in data.of_split("train")], data.context)
    return int(firsts[-1]), lambda places: [*locate(firsts, places.numpy(), data.context)]


def _row_samples(spec: RunSpec, store_root: Path) -> tuple[int, Callable[[Tensor], list[Sample]]]:
    # The inputs themselves are not needed.
    data = replace(spec.rows, categorical=(), numeric=())
    rows = load_rows(data, store_root, lambda: None, data.identity).train
    columns = [[_plain(value) for value in rows.column(name).to_pylist()] for name in data.identity]
    return rows.num_rows, lambda places: [tuple(column[i] for column in columns) for i in places.tolist()]


def _plain(value: object) -> Json:
    if isinstance(value, datetime | date):
        return value.isoformat()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def same_order(spec: RunSpec, store_root: Path) -> bool | None:
    """Whether the code here that decides about the order is that of the run; None when the run's is not stored."""
    if not spec.model.code_manifest:
        return None
    stored = parse_manifest(blob_path(store_root, spec.model.code_manifest).read_bytes())
    before = {entry.name: entry.sha256 for entry in stored.entries}
    return all(before.get(name) == digest_bytes((CODE_ROOT / name).read_bytes()) for name in _DECIDING)


def _header(spec: RunSpec, ledger: Ledger, same_code: bool | None) -> dict[str, Json]:
    """What the samples' names mean, which attempt took which steps, and whether this is the code that took them."""
    named: dict[str, Json]
    if isinstance(spec.data, TokenDataSpec):
        shards = [{"sha256": file.sha256, "tokens": file.tokens} for file in spec.data.of_split("train")]
        named = {"kind": "tokens", "sample": ["shard", "offset"], "context": spec.data.context, "shards": shards}
    else:
        named = {"kind": "rows", "sample": list(spec.data.identity)}
    attempts: list[Json] = [dict(vars(part)) for part in ledger.taken]
    return {"spec_digest": spec.digest, **named, "steps": ledger.last, "attempts": attempts, "same_code": same_code}


def _print_json(header: Mapping[str, Json], entries: Iterator[Entry]) -> None:
    """One document, a step a line: it may be too large to be held."""
    print(json.dumps(header)[:-1] + ', "ledger": [', end="")
    for index, entry in enumerate(entries):
        print("," if index else "", json.dumps(vars(entry)), sep="\n", end="")
    print("\n]}")


def _print_words(header: Mapping[str, Json], entries: Iterator[Entry]) -> None:
    print(f"{header['kind']} by {', '.join(cast('list[str]', header['sample']))}")
    for entry in entries:
        for rank, samples in enumerate(entry.ranks):
            said = "  ".join("/".join(str(part) for part in sample) for sample in samples)
            print(f"step {entry.step}  epoch {entry.epoch}  attempt {entry.attempt}  data rank {rank}:  {said or '-'}")


def _print_digest(header: Mapping[str, Json], entries: Iterator[Entry], *, as_json: bool) -> None:
    """A digest over step and samples, which no restart and no change of ranks alters."""
    digest, steps, samples = hashlib.sha256(), list[int](), 0
    for entry in entries:
        digest.update(canonical_json([entry.step, cast("Json", entry.samples)]) + b"\n")
        steps, samples = [*steps[:1], entry.step], samples + len(entry.samples)
    told = f"sha256:{digest.hexdigest()}"
    if as_json:
        print(json.dumps({**header, "from": steps[0], "to": steps[-1], "samples": samples, "digest": told}))
        return
    print(f"steps {steps[0]} to {steps[-1]}: {samples} samples: {told}")


def main() -> int:
    """Print the ledger of the run that standard input describes; returns the exit status."""
    parser = argparse.ArgumentParser(prog="trainer.ledger")
    parser.add_argument("--step", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--digest", action="store_true")
    asked = parser.parse_args()
    given = cast("dict[str, Any]", json.load(sys.stdin))
    try:
        spec = parse_run(json.dumps(given["spec"]))
        store_root = Path(given["store_root"])
        ledger = Ledger(spec, store_root, steps_taken(spec, given["events"]))
        first, last = _range(asked.step, ledger.last)
        entries = ledger.entries(first, last)
        header = _header(spec, ledger, same_order(spec, store_root))
        if not header["same_code"]:
            print(f"{', '.join(_DECIDING)} are not those of the run; the order is theirs", file=sys.stderr)
        if asked.digest:
            _print_digest(header, entries, as_json=asked.json)
        elif asked.json:
            _print_json(header, entries)
        else:
            _print_words(header, entries)
    except (NotRecorded, SpecRefused, DataRefused, InvalidManifest) as error:
        print(f"refused: {error}", file=sys.stderr)
        return _REFUSED
    return 0


def _range(text: str, last: int) -> tuple[int, int]:
    """The steps that `a:b` or `a` names; all of them when it is empty."""
    if not text:
        return 1, last
    first, colon, end = text.partition(":")
    try:
        return int(first or 1), int(end or last) if colon else int(first)
    except ValueError:
        raise NotRecorded(f"step {text!r:.40}; steps are named as 3, 3:8, 3: or :8") from None


if __name__ == "__main__":
    sys.exit(main())
