"""What every online store promises, on SQLite and PostgreSQL."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.online_bench import key_of, row_version
from support.postgres import Postgres

from headway.features.online import (
    OnlineBusy,
    OnlineState,
    OnlineStore,
    OnlineUnavailable,
    UnsupportedOnlineStore,
    online_store_at,
)
from headway.features.online.store import Change, EntityRow, PartitionMark, RowVersion

SUBJECTS = {"s": ("source", ("k",)), "other": ("source", ("j",))}
_fresh = count()


def _state(until: int = 10) -> OnlineState:
    return OnlineState("pipeline", "pipeline", 1, until, {"source": 5}, "sha256:00", 0, known_until={"source": until})


def _mark(partition: str = "p", version: int = 1) -> PartitionMark:
    return PartitionMark("source", partition, "pipeline/source", version, "c", "e", None, 10, 5, complete=True)


def _rows(store: OnlineStore, tenant: str, entity: bytes) -> list[EntityRow]:
    read = store.read(key_of(tenant), (0, 0), [("s", entity)], [])
    return sorted(read.rows.get(("s", entity), ()), key=lambda r: (r.available_time, r.position, r.here))


_ENTITIES = st.sampled_from([b"a", b"b", b"c", b""])


@st.composite
def _versions(draw: st.DrawFn) -> list[RowVersion]:
    """Versions of a few identities: corrections that keep or move the key or the event time, retractions."""
    rows: list[RowVersion] = []
    for position in range(draw(st.integers(1, 12))):
        entity, identity = draw(_ENTITIES), draw(st.sampled_from([b"1", b"2", b"3"]))
        event, known = draw(st.integers(0, 5)), draw(st.integers(0, 5))
        partition, version = draw(st.sampled_from(["p", "q"])), 1
        rows.append(row_version(entity, identity, event=event, known=known, position=position, partition=partition))
        del version
    return rows


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=_versions(), data=st.data())
def test_any_order_and_duplication_gives_one_content(
    online: OnlineStore, rows: list[RowVersion], data: st.DataObject
) -> None:
    once, mixed = f"t{next(_fresh)}", f"t{next(_fresh)}"
    online.apply(key_of(once), Change(rows=rows, state=_state()))
    online.apply(key_of(mixed), Change(state=_state()))
    again = data.draw(st.permutations([*rows, *data.draw(st.lists(st.sampled_from(rows), max_size=6))]))
    while again:
        size = data.draw(st.integers(1, len(again)))
        online.apply(key_of(mixed), Change(rows=again[:size]))
        again = again[size:]
    assert _content(online, once) == _content(online, mixed)
    for entity in (b"a", b"b", b"c"):
        read = _rows(online, mixed, entity)
        mine = {r.identity for r in rows if r.entity == entity}
        assert {(r.partition, r.position) for r in read if r.here} == {
            (r.partition, r.position) for r in rows if r.entity == entity
        }
        assert {(r.partition, r.position) for r in read if not r.here} == {
            (r.partition, r.position) for r in rows if r.identity in mine and r.entity != entity
        }, "a version that stands elsewhere still supersedes here"


def _content(store: OnlineStore, tenant: str) -> list[tuple[object, ...]]:
    return [(table, *rest) for table, _, *rest in store.dump(key_of(tenant))]


def test_an_emptied_partition_takes_its_corrections_along(online: OnlineStore) -> None:
    key = key_of("t")
    first = row_version(b"a", b"1", event=1, known=1, position=0)
    moved = row_version(b"b", b"1", event=1, known=2, position=0, partition="q")
    online.apply(key, Change(rows=[first, moved], marks=[_mark("p"), _mark("q")], state=_state()))
    assert [r.here for r in _rows(online, "t", b"a")] == [1, 0]
    online.apply(key, Change(emptied=[("s", "q")], dropped_marks=[("source", "q")]))
    assert [r.here for r in _rows(online, "t", b"a")] == [1]
    assert _rows(online, "t", b"b") == []
    assert [m.partition for m in online.marks(key)] == ["p"]


def test_a_reader_gets_what_it_lacks_and_all_when_rows_changed(online: OnlineStore) -> None:
    key = key_of("t")
    assert online.read(key, (0, 0), [("s", b"a")], []).sequence == 0, "never filled"
    online.apply(key, Change(rows=[row_version(b"a", b"1", event=1, known=1, position=0)], state=_state()))
    first = online.read(key, (0, 0), [("s", b"a")], [])
    assert first.state is not None
    assert first.state.until == 10
    assert first.state.known_until == {"source": 10}
    seen = (first.sequence, first.rows_sequence)
    assert set(online.read(key, seen, [("s", b"b")], [("s", b"a")]).rows) == {("s", b"b")}
    online.apply(key, Change(state=_state(11)))
    later = online.read(key, seen, [("s", b"b")], [("s", b"a")])
    assert later.state is not None
    assert later.state.until == 11
    assert set(later.rows) == {("s", b"b")}, "the state moved and no row did"
    online.apply(key, Change(rows=[row_version(b"a", b"2", event=2, known=2, position=1)]))
    assert set(online.read(key, seen, [("s", b"b")], [("s", b"a")]).rows) == {("s", b"a"), ("s", b"b")}


def test_tenants_and_feature_sets_do_not_see_each_other(online: OnlineStore) -> None:
    online.apply(key_of("t"), Change(rows=[row_version(b"a", b"1", event=1, known=1, position=0)], state=_state()))
    online.apply(key_of("u"), Change(state=_state()))
    online.apply(key_of("t", 2), Change(state=_state()))
    assert _rows(online, "u", b"a") == []
    assert online.read(key_of("t", 2), (0, 0), [("s", b"a")], []).rows == {("s", b"a"): []}
    assert [s.feature_set_version for s in online.states("t", "pipeline")] == [1, 1]
    assert online.states("v", "pipeline") == []


def test_an_erased_entity_stays_away_whatever_comes_later(online: OnlineStore) -> None:
    key = key_of("t")
    mine = [
        row_version(b"a", b"1", event=1, known=1, position=0),
        row_version(b"b", b"2", event=1, known=1, position=1),
    ]
    beside = RowVersion("other", b"x", b"1", "p", 1, 0, 1, 1, 0, False, b"")
    online.apply(key, Change(rows=[*mine, beside], state=_state(), subjects=SUBJECTS))
    assert online.erase(key, SUBJECTS["s"], b"a", SUBJECTS, at=20) == 2, "under the other key too"
    assert online.erase(key, SUBJECTS["s"], b"a", SUBJECTS, at=21) == 0
    late = row_version(b"a", b"9", event=30, known=30, position=2)
    online.apply(key, Change(rows=[*mine, late], subjects=SUBJECTS))
    online.apply(key_of("t", 2), Change(rows=[late], state=_state(), subjects=SUBJECTS))
    assert _rows(online, "t", b"a") == []
    assert len(_rows(online, "t", b"b")) == 1
    assert online.read(key_of("t", 2), (0, 0), [("s", b"a")], []).rows == {("s", b"a"): []}
    assert online.erased("t", "pipeline") == {(SUBJECTS["s"], b"a")}
    assert online.erased("u", "pipeline") == frozenset()


_HOLD = """
import sys, time
sys.path[:0] = ["tests", "."]
from support.online_bench import key_of
from headway.features.online import online_store_at
with online_store_at(sys.argv[1]).syncing(key_of("t")):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_writer_at_a_time_and_a_killed_one_lets_go(online_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sqlite_store", "postgres_store"):
        monkeypatch.setattr(f"headway.features.online.{module}.LOCK_SECONDS", 0.3)
    child = subprocess.Popen([sys.executable, "-c", _HOLD, online_url], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        store = online_store_at(online_url)
        with pytest.raises(OnlineBusy, match="another process"), store.syncing(key_of("t")):
            pass
        child.kill()
        child.wait(30)
        deadline = time.monotonic() + 30
        while True:
            try:
                with store.syncing(key_of("t")):
                    break
            except OnlineBusy:
                assert time.monotonic() < deadline
        store.close()
    finally:
        child.kill()
        child.wait(30)
        assert child.stdout is not None
        child.stdout.close()


def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path, postgres: Postgres) -> None:
    (tmp_path / "noise.db").write_bytes(b"this is no database" * 100)
    absent = f"postgresql://headway@/nowhere?host={postgres.socket}"
    for url, part in ((f"sqlite:///{tmp_path / 'noise.db'}", "noise.db"), (absent, "nowhere")):
        store = online_store_at(url)
        with pytest.raises(OnlineUnavailable, match=part):
            store.read(key_of("t"), (0, 0), [], [])
    for url in ("mysql://x", "sqlite://x", "nothing"):
        with pytest.raises(UnsupportedOnlineStore, match="HEADWAY_ONLINE_URL"):
            online_store_at(url)


def test_a_frozen_server_is_left_after_a_deadline(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.features.online.postgres_store.READ_SECONDS", 0.2)
    url = postgres.fresh_database()
    store = online_store_at(url)
    store.read(key_of("t"), (0, 0), [], [])
    backends = _backends(postgres, url)
    for backend in backends:
        os.kill(backend, signal.SIGSTOP)
    try:
        with pytest.raises(OnlineUnavailable):
            store.read(key_of("t"), (0, 0), [], [])
    finally:
        for backend in backends:
            os.kill(backend, signal.SIGCONT)
    assert store.read(key_of("t"), (0, 0), [], []).sequence == 0, "a new connection serves again"
    store.close()
    postgres.drop_database(url)


def _backends(postgres: Postgres, url: str) -> Sequence[int]:
    name = url.partition("@/")[2].partition("?")[0]
    with psycopg.connect(host=str(postgres.socket), user="postgres", dbname="postgres") as admin:
        found = admin.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s", (name,)).fetchall()
    return [pid for (pid,) in found]
