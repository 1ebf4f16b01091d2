"""The engine follows signed pointers: under load, past versions that do not load, past processes that die."""

import errno
import json
import os
import signal
import threading
import time

import pyarrow as pa
import pytest
from support.live_bench import ENDPOINT, LiveServer, another_version, settings_of
from support.serving_bench import opened
from support.serving_model import keys_of
from support.workbench import Workbench

from headway.catalog.registry_facts import Endpoint
from headway.features.online.answer import OnlineFeatures
from headway.features.online.open import online_store_for
from headway.loading import Pipeline
from headway.registry.keys import KeyRing, Trust
from headway.registry.promote import NotPromoted, rollback, verify_served
from headway.registry.statements import ROLLBACK, record, sign_now
from headway.replay.moments import moment_of
from headway.services import Services
from headway.serving.live import following
from headway.serving.live.answering import Computed, Features
from headway.serving.live.child import SCORE_SECONDS
from headway.serving.live.engine import EngineLimits, EngineStarted
from headway.serving.live.following import Slot
from headway.serving.live.pointer import Pointer, PointerRefused, gather, read_pointer, verify, write_pointer
from headway.serving.live.spool import ServerRunning
from headway.serving.live.types import DeadlineExceeded, UnknownModel, VersionNotServed
from headway.serving.live.versions import Loader, Version
from headway.world import move_clock
from trainer.blobs import Json
from trainer.spec import parse_run

pytestmark = pytest.mark.xdist_group("live")
WAIT_SECONDS = 60.0


def _slot(server: LiveServer) -> Slot:
    followed = server.engine._following
    assert followed is not None
    slot = followed.endpoints[ENDPOINT].current
    assert slot is not None
    return slot


def _pid(server: LiveServer) -> int:
    return _slot(server).version.pid or 0


def test_promotions_and_rollbacks_are_followed_under_load_and_no_request_fails(
    bench: Workbench, rows: pa.Table
) -> None:
    with LiveServer(bench, limits=EngineLimits(spare=True)) as server:
        served = server.engine.served(ENDPOINT)
        assert (served.version, served.endpoint_epoch, served.degraded) == (1, 1, ())
        assert server.engine.models() == (ENDPOINT,)
        with pytest.raises(VersionNotServed):
            server.engine.served(ENDPOINT, 2)
        with pytest.raises(UnknownModel):
            server.engine.served("../../etc/passwd")
        with server.load(rows) as answers:
            another_version(bench, 5)
            server.until(lambda: server.engine.served(ENDPOINT).endpoint_epoch == 2)
            with opened(bench) as services:
                rollback(services, keys_of(bench), ENDPOINT, "worse on Mondays")
            server.until(lambda: server.engine.served(ENDPOINT).endpoint_epoch == 3)
            another_version(bench, 6)
            server.until(lambda: server.engine.served(ENDPOINT).endpoint_epoch == 4)
            time.sleep(0.5)
        assert server.engine.status().loaded == {ENDPOINT: (3, 1)}
        with pytest.raises(EngineStarted):
            server._run(server.engine.start())
    given = {(a.served.endpoint_epoch, a.served.version) for a in answers}
    assert given >= {(1, 1), (4, 3)}
    with opened(bench) as services:
        moves = {(e.epoch, e.row.stable) for e in services.catalog.endpoint_events(services.principal, ENDPOINT)}
    assert given <= moves == {(1, 1), (2, 2), (3, 1), (4, 3)}
    # One request twice under different versions gives different answers, under one version the same.
    by_row: dict[tuple[int, int], set[float]] = {}
    for number, answer in enumerate(answers):
        by_row.setdefault((number % rows.num_rows, answer.served.version), set()).add(answer.probability)
    assert {len(found) for found in by_row.values()} == {1}


def test_a_version_that_does_not_load_leaves_the_old_one_serving_and_is_tried_again(
    bench: Workbench, rows: pa.Table
) -> None:
    with LiveServer(bench) as server:
        with opened(bench) as services:
            run = services.catalog.run(
                services.principal, services.catalog.model_version(services.principal, ENDPOINT, 1).run_id
            )
            manifest = parse_run(services.store.get_bytes(run.facts.spec_digest)).model.code_manifest
            data = services.store.get_bytes(manifest)
        version = another_version(bench, 5, promoted=False)
        with opened(bench) as services:
            services.store.erase(manifest)
        assert bench.run("promote", f"{ENDPOINT}@{version}").exit_code == 0
        server.until(lambda: server.degraded() == (f"load_failed:{version}@epoch 2",))
        (answer,) = server.ask(rows.slice(0, 1))
        assert (answer.served.version, answer.degraded) == (1, (f"load_failed:{version}@epoch 2",))
        assert server.engine.ready() == (True, "")
        with opened(bench) as services:
            services.store.put_bytes(data)
        server.until(lambda: server.engine.served(ENDPOINT).version == version)
        assert server.degraded() == ()


def test_what_could_not_be_gathered_while_another_version_loads_is_followed_after_it(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, proceed, refused = threading.Event(), threading.Event(), threading.Event()

    def slowly(loader: Loader, pointer: Pointer) -> Version:
        loading.set()
        assert proceed.wait(WAIT_SECONDS)
        return first

    def gathered(services: Services, keys: Trust, endpoint: Endpoint) -> Pointer:
        if endpoint.epoch == 3 and not refused.is_set():
            refused.set()
            raise ValueError("half of it is here")
        return gather(services, keys, endpoint)

    with LiveServer(bench) as server:
        first = _slot(server).version
        monkeypatch.setattr(Loader, "load", slowly)
        monkeypatch.setattr(following, "gather", gathered)
        another_version(bench, 5)
        assert loading.wait(WAIT_SECONDS)
        # Longer than this test waits: it is not tried again before the other one was loaded.
        monkeypatch.setattr(following, "backoff", lambda failures: 1.0)
        with opened(bench) as services:
            rollback(services, keys_of(bench), ENDPOINT, "at once")
        assert refused.wait(WAIT_SECONDS)
        proceed.set()
        server.until(lambda: server.engine.served(ENDPOINT).endpoint_epoch == 3)
        assert server.degraded() == ()


def test_a_process_that_cannot_be_started_now_ends_no_other(
    bench: Workbench, rows: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def keep_spare(loader: Loader) -> None:
        tried.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Loader, "keep_spare", keep_spare)
    with LiveServer(bench, limits=EngineLimits(spare=True)) as server:
        server.until(tried.is_set)
        dead = _pid(server)
        os.kill(dead, signal.SIGKILL)
        server.ask(rows.slice(0, 1))
        assert _pid(server) not in (0, dead)


def test_a_scoring_process_that_dies_is_replaced_and_requests_wait_for_it(
    bench: Workbench, rows: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.serving.live.spool._TAKEOVER_SECONDS", 0.0)
    with LiveServer(bench) as server:
        with pytest.raises(ServerRunning):
            LiveServer(bench)
        before = server.ask(rows.slice(0, 3))
        dead = _pid(server)
        os.kill(dead, signal.SIGKILL)
        after = server.ask(rows.slice(0, 3))
        assert [a.probability for a in after] == [a.probability for a in before]
        assert _pid(server) != dead
        # A request that cannot wait so long is told why.
        os.kill(_pid(server), signal.SIGKILL)
        with pytest.raises(Exception, match=r"model_restarting|deadline passed") as caught:
            server.ask(rows.slice(0, 1), seconds=0.2)
        assert type(caught.value).__name__ in ("NotReady", "DeadlineExceeded")


class _Watched:
    """Features of the store that note what they compute; made-up values make them raise, if they are told to."""

    def __init__(self, features: Features, raises: bool) -> None:
        self.rows_independent = features.rows_independent
        self.computed: list[int] = []
        self._features = features
        self._raises = raises

    def compute(self, requests: pa.Table, now: int) -> Computed:
        self.computed.append(requests.num_rows)
        if self._raises:
            raise ZeroDivisionError("a custom feature of made-up values")
        return self._features.compute(requests, now)


@pytest.mark.parametrize("raises", [False, True])
def test_features_are_computed_once_unrecorded_before_a_version_answers(bench: Workbench, raises: bool) -> None:
    clock = settings_of(bench).clock_file
    clock.unlink()
    move_clock(clock, moment_of("2026-03-05T12:00Z"))  # Within the calendar, so that something can be asked for.
    made: list[_Watched] = []

    def watched(pipeline: Pipeline) -> Features:
        settings = settings_of(bench)
        made.append(_Watched(OnlineFeatures(pipeline, online_store_for(settings), settings.tenant), raises))
        return made[-1]

    with LiveServer(bench, features_of=watched) as server:
        assert server.engine.ready() == (True, "")
        assert [w.computed for w in made] == [[1]]
        assert server.engine.status().spool.records == 0


def test_a_scoring_process_that_hangs_is_replaced_soon_after_the_last_deadline(
    bench: Workbench, rows: pa.Table
) -> None:
    with LiveServer(bench) as server:
        before = server.ask(rows.slice(0, 1))
        hung = _pid(server)
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            server.ask(rows.slice(0, 1), seconds=0.2)
        # Less than what one score may take.
        after = server.ask(rows.slice(0, 1), seconds=SCORE_SECONDS - 20)
        assert _pid(server) != hung
        assert [a.probability for a in after] == [a.probability for a in before]


@pytest.mark.parametrize("how", ["unsigned", "for another epoch", "of another key"])
def test_a_rollback_that_no_promoter_signed_for_this_epoch_is_not_followed(bench: Workbench, how: str) -> None:
    version = another_version(bench, 5)
    keys = keys_of(bench)
    with opened(bench) as services:
        first = services.catalog.model_version(services.principal, ENDPOINT, 1)
        if how != "unsigned":
            other = KeyRing(bench.home / "other") if how == "of another key" else keys
            said: dict[str, Json] = {"endpoint": ENDPOINT, "epoch": 3 + (how == "for another epoch"), "to": 1}
            envelope = sign_now(other, "promoter", "m", first.manifest_digest, ROLLBACK, said)
            record(services, envelope, first.manifest_digest, ROLLBACK, "promoter")
        services.catalog.rollback(services.principal, None, ENDPOINT, reason="by hand")
        endpoint = services.catalog.endpoint(services.principal, ENDPOINT)
        assert endpoint is not None
        assert (endpoint.epoch, endpoint.stable, endpoint.previous) == (3, 1, version)
        with pytest.raises(NotPromoted, match="unsigned" if how == "unsigned" else "refused"):
            verify_served(services, keys.trust(), endpoint)
        with pytest.raises(NotPromoted):
            gather(services, keys.trust(), endpoint)
        # A rollback by the command from here is signed, and verifies.
        back = rollback(services, keys, ENDPOINT, "forth again")
        assert verify_served(services, keys.trust(), back).epoch == 2
        verify(gather(services, keys.trust(), back), keys.trust())


@pytest.mark.parametrize("change", ["epoch", "version", "artifact", "signature", "nothing left"])
def test_a_pointer_that_was_altered_on_disk_is_not_followed(bench: Workbench, change: str) -> None:
    folder = bench.home / "pointers"
    with opened(bench) as services:
        endpoint = services.catalog.endpoint(services.principal, ENDPOINT)
        assert endpoint is not None
        keys = keys_of(bench).trust()
        write_pointer(folder, gather(services, keys, endpoint))
    path = folder / f"{ENDPOINT}.json"
    verify(read_pointer(path), keys)
    document = json.loads(path.read_text())
    other = "sha256:" + "0" * 64
    if change == "epoch":
        document["endpoint"]["epoch"] += 1
    elif change == "version":
        document["endpoint"]["stable"] = document["version"]["version"] = 7
    elif change == "artifact":
        document["version"]["facts"]["blobs"][0][0] = other
        document["version"]["facts"]["manifest_digest"] = other
    elif change == "signature":
        flip = document["promoted"]["envelope"]
        document["promoted"]["envelope"] = flip[:-8] + ("A" if flip[-8] != "A" else "B") + flip[-7:]
    path.write_text("{" if change == "nothing left" else json.dumps(document))
    with pytest.raises(PointerRefused):
        verify(read_pointer(path), keys)
