"""Which attempt took a step for good: by where each began again, whatever was lost between."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_runs import token_spec

from trainer.ledger import Ledger, NotRecorded, main, steps_taken
from trainer.spec import RunSpec


@dataclass
class Played:
    """A run as it went: `owner[i]` is the attempt and the ranks that step i + 1 of the present state comes from."""

    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    owner: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def attempt(self, back: int, steps: int, ranks: int) -> None:
        """One more attempt, from a checkpoint `back` steps before the present."""
        number = max((event["attempt"] for event in self.events), default=0) + 1
        del self.owner[max(len(self.owner) - back, 0) :]
        self.tell(number, "position", step=len(self.owner), data_ranks=ranks)
        for _ in range(steps):
            self.owner.append((number, ranks))
            self.tell(number, "step", step=len(self.owner))

    def tell(self, attempt: int, kind: str, **data: int) -> None:
        self.events.append({"attempt": attempt, "kind": kind, "data": data})


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    return token_spec(tmp_path_factory.mktemp("spec"))


attempts = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([1, 2, 4])), max_size=7)


@settings(max_examples=80, deadline=None)
@given(given_attempts=attempts)
def test_each_step_belongs_to_the_attempt_whose_state_went_on(
    spec: RunSpec, given_attempts: list[tuple[int, int, int]]
) -> None:
    played = Played()
    for back, steps, ranks in given_attempts:
        played.attempt(back, steps, ranks)
    taken = steps_taken(spec, played.events)
    found = [(part.attempt, part.data_ranks) for part in taken for _ in range(part.first, part.last + 1)]
    assert found == played.owner
    assert [part.first for part in taken] == [1, *(part.last + 1 for part in taken)][: len(taken)]


def test_an_attempt_that_died_before_it_trained_says_nothing(spec: RunSpec) -> None:
    played = Played()
    played.attempt(0, 5, 2)
    played.tell(2, "phase")
    (part,) = steps_taken(spec, [e for e in played.events if e["kind"] != "phase"])
    assert (part.attempt, part.first, part.last) == (1, 1, 5)


def test_of_a_run_before_positions_only_the_first_attempt_is_known(spec: RunSpec) -> None:
    played = Played()
    played.tell(1, "step", step=4)
    played.tell(1, "metrics", steps=6)
    (part,) = steps_taken(spec, played.events)
    assert (part.first, part.last, part.data_ranks) == (1, 6, 2)
    played.tell(2, "step", step=8)
    with pytest.raises(NotRecorded, match="attempt 2 took steps up to 8 and did not say where it began"):
        steps_taken(spec, played.events)


@pytest.mark.parametrize("asked", [(0, 3), (3, 2), (3, 7)])
def test_steps_that_were_not_taken_are_refused(spec: RunSpec, asked: tuple[int, int], tmp_path: Path) -> None:
    played = Played()
    played.attempt(0, 6, 2)
    ledger = Ledger(spec, tmp_path, steps_taken(spec, played.events))
    with pytest.raises(NotRecorded, match=f"steps {asked[0]} to {asked[1]}; the run's events tell of steps 1 to 6"):
        list(ledger.entries(*asked))


def test_samples_of_a_step_do_not_depend_on_the_ranks(spec: RunSpec, tmp_path: Path) -> None:
    by_ranks = []
    for ranks in (1, 2, 4):
        played = Played()
        played.attempt(0, 16, ranks)
        entries = list(Ledger(spec, tmp_path, steps_taken(spec, played.events)).entries(1, 16))
        assert {len(entry.ranks) for entry in entries} == {ranks}
        by_ranks.append([entry.samples for entry in entries])
    assert by_ranks[0] == by_ranks[1] == by_ranks[2]


def test_the_digest_is_that_of_the_samples_whatever_restarted(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, moved = Played(), Played()
    whole.attempt(0, 16, 2)
    for back, steps, ranks in ((0, 7, 4), (3, 6, 1), (1, 7, 2)):
        moved.attempt(back, steps, ranks)

    def printed(played: Played, *arguments: str) -> str:
        asked = {"spec": spec.to_json(), "store_root": str(tmp_path), "events": played.events}
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
        monkeypatch.setattr("sys.argv", ["ledger", *arguments])
        assert main() == 0
        return capsys.readouterr().out

    digest = printed(whole, "--digest")
    assert digest.startswith("steps 1 to 16: 122 samples: sha256:")
    assert printed(moved, "--digest") == digest
    assert printed(moved, "--digest", "--step", "1:15") != digest
    document = json.loads(printed(moved, "--digest", "--json"))
    assert document["digest"] == digest.split()[-1]
    assert [(part["attempt"], part["data_ranks"]) for part in document["attempts"]] == [(1, 4), (2, 1), (3, 2)]
    assert document["same_code"] is None
    shards = {(number, offset) for number, offset in _named(json.loads(printed(moved, "--json")))}
    assert shards == {(0, 16 * i) for i in range(31)} | {(1, 16 * i) for i in range(30)}


def _named(document: dict[str, Any]) -> list[tuple[int, int]]:
    return [(shard, offset) for entry in document["ledger"] for rank in entry["ranks"] for shard, offset in rank]
