"""Follows the catalog's pointers: looks often, loads before it flips, and goes on with the last one when it is away.

Two threads. One asks the catalog, and may hang with it; its last contact tells how long ago that was. The other loads
versions and replaces their processes. What serves is one attribute per endpoint, which the event loop reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from headway.artifacts.store import LocalStore
from headway.catalog.catalog import Catalog
from headway.catalog.clock import system_clock
from headway.catalog.database import Database
from headway.catalog.errors import CatalogUnavailable
from headway.catalog.facts import Principal
from headway.catalog.registry_facts import Endpoint
from headway.errors import HeadwayError
from headway.features.contract import code_digest, contract_digest
from headway.registry.keys import KeyRing, Trust
from headway.services import Services
from headway.serving.live.pointer import Pointer, gather, read_pointer, verify, write_pointer
from headway.serving.live.types import Served
from headway.serving.live.versions import Loader, Version, backoff
from headway.serving.predict import FeaturesDiffer

if TYPE_CHECKING:
    from headway.home import Settings
    from headway.loading import Pipeline

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
# A transaction of the catalog is cut off after this long; serving does not wait for it.
ANSWER_SECONDS = 2.0
# Without an answer for so long, the catalog counts as away.
SILENCE_SECONDS = 2.0
FIRST_LOOK_SECONDS = 2.0
STOP_SECONDS = 10.0
# Who read what is served may ask a moment later.
GRACE_SECONDS = 5.0
_TICK_SECONDS = 0.5


@dataclass(eq=False)
class Slot:
    """A pointer in force: what it names, loaded, and how many requests are under way with it (`users`).

    `left_at` is when another pointer took its place for good, `time.monotonic()` seconds.
    """

    pointer: Pointer
    pipeline: Pipeline
    version: Version
    served: Served
    users: int = 0
    left_at: float = 0.0


@dataclass
class Followed:
    """One endpoint. `current` answers; `previous` stays loaded; `wanted` is newer than `current`, or None.

    `missed`: what the catalog names at `seen_epoch` could not even be gathered, so `wanted` is not it. `problem` is a
    code for callers (`load_failed:...`, `catalog_behind:...`), empty when there is none.
    """

    endpoint_id: str
    current: Slot | None = None
    previous: Slot | None = None
    wanted: Pointer | None = None
    seen_epoch: int = 0
    missed: bool = False
    problem: str = ""
    notes: tuple[str, ...] = ()
    failures: int = 0
    retry_at: float = 0.0
    leaving: list[Slot] = field(default_factory=list[Slot])

    @property
    def settled(self) -> bool:
        """Whether it answers, or is known not to."""
        return self.wanted is None or self.failures > 0


class Following:
    """Keeps what serves in step with the catalog.

    Args:
        settings: where catalog, store, keys and home are.
        pipelines: the tree's pipelines by name.
        endpoints: only these; None: every endpoint that serves one of the pipelines.
        folder: the server's own folder.
        prepare: called with each slot before it answers.
        spare: whether a process waits warm for the next version.
    """

    def __init__(
        self,
        settings: Settings,
        pipelines: Mapping[str, Pipeline],
        endpoints: Collection[str] | None,
        folder: Path,
        prepare: Callable[[Slot], None],
        *,
        spare: bool,
    ) -> None:
        self._settings = settings
        self._pipelines = pipelines
        self._only = endpoints
        self._folder = folder
        self._prepare = prepare
        self._spare = spare
        self._principal = Principal(settings.tenant, settings.actor)
        self._keys = KeyRing(settings.keys_folder)
        self._store = LocalStore(settings.store_root)
        self._loader = Loader(self._store, folder / "versions")
        # Both threads say what is wanted and what went wrong.
        self._wanting = threading.Lock()
        self._stopping = threading.Event()
        self._work = threading.Event()
        self._looked = threading.Event()
        self._settled = threading.Event()
        self._contact: float | None = None
        self._away = False
        self.faulty = False
        self.endpoints: dict[str, Followed] = {}
        self._watcher = threading.Thread(target=self._watch, name="headway-watch", daemon=True)
        self._loading = threading.Thread(target=self._keep, name="headway-load", daemon=True)

    @property
    def catalog_age_s(self) -> float | None:
        """Seconds since the catalog last answered; None: it has not yet."""
        return None if self._contact is None else time.monotonic() - self._contact

    @property
    def away(self) -> bool:
        """Whether the catalog does not answer."""
        age = self.catalog_age_s
        return self._away or age is None or age > SILENCE_SECONDS + LOOK_SECONDS

    def start(self) -> None:
        """Read the kept pointers and begin to follow."""
        for path in sorted((self._folder / "pointer").glob("*.json")):
            self._recall(path)
        self._watcher.start()
        self._loading.start()

    def wait_settled(self) -> None:
        """Wait until the catalog was asked once, or was silent, and every version that is known was tried."""
        self._settled.wait()

    def stop(self) -> None:
        """Stop following and end every process. A thread that hangs with the catalog is left to end with us."""
        self._stopping.set()
        self._work.set()
        self._loading.join(timeout=STOP_SECONDS)
        self._watcher.join(timeout=LOOK_SECONDS * 2)

    def degraded(self, followed: Followed) -> tuple[str, ...]:
        """What callers of an endpoint should know."""
        away = ("catalog_unreachable",) if self.away else ()
        fault = ("following_fault",) if self.faulty else ()
        return (*away, *fault, *((followed.problem,) if followed.problem else ()), *followed.notes)

    def _recall(self, path: Path) -> None:
        """Take a kept pointer, if its statements verify with the public keys of today."""
        try:
            pointer = read_pointer(path)
            if self._only is not None and pointer.endpoint.endpoint_id not in self._only:
                return
            keys, notes = self._trust(pointer)
            verify(pointer, keys)
        except HeadwayError as error:
            logger.error("a kept pointer is not followed: %s", error)
            return
        name = pointer.endpoint.endpoint_id
        self.endpoints[name] = Followed(name, wanted=pointer, seen_epoch=pointer.endpoint.epoch, notes=notes)

    def _trust(self, pointer: Pointer) -> tuple[Trust, tuple[str, ...]]:
        if self._keys.public_path.exists():
            return self._keys.trust(), ()
        return pointer.trust, ("keys_away",)

    def _watch(self) -> None:
        services: Services | None = None
        while not self._stopping.is_set():
            try:
                services = services or self._open()
                self._look(services)
                self._contact = time.monotonic()
                if self._away:
                    logger.warning("the catalog answers again")
                self._away = False
            except (HeadwayError, SQLAlchemyError, OSError) as error:
                if not self._away:
                    logger.warning("the catalog is away, the last pointer is followed: %s", error)
                self._away = True
            self._looked.set()
            self._stopping.wait(LOOK_SECONDS)
        if services is not None:
            services.close()

    def _open(self) -> Services:
        """The catalog as it is: following must not make one, nor change its tables."""
        url = make_url(self._settings.database_url)
        if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
            raise CatalogUnavailable(f"there is no {url.database}")
        catalog = Catalog(Database(self._settings.database_url, ANSWER_SECONDS), system_clock)
        return Services(catalog, self._store, self._principal)

    def _look(self, services: Services) -> None:
        url = services.catalog.database.engine.url
        if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
            raise CatalogUnavailable(f"there is no {url.database}")
        found = {e.endpoint_id: e for e in services.catalog.endpoints(self._principal) if e.stable is not None}
        for name, endpoint in found.items():
            if self._only is None or name in self._only:
                self._consider(services, endpoint)
        for name, followed in list(self.endpoints.items()):
            epoch = found[name].epoch if name in found else 0
            behind = f"catalog_behind:{epoch} of {followed.seen_epoch}" if epoch < followed.seen_epoch else ""
            if behind or followed.problem.startswith("catalog_behind"):
                followed.problem = behind

    def _consider(self, services: Services, endpoint: Endpoint) -> None:
        followed = self.endpoints.get(endpoint.endpoint_id)
        if followed is not None and endpoint.epoch <= followed.seen_epoch and not self._due(followed):
            return
        try:
            pointer = gather(services, self._keys.trust(), endpoint)
        except (CatalogUnavailable, SQLAlchemyError):
            raise
        except (HeadwayError, ValueError, LookupError, OSError) as error:
            followed = self.endpoints.setdefault(endpoint.endpoint_id, Followed(endpoint.endpoint_id))
            with self._wanting:
                followed.seen_epoch, followed.missed = endpoint.epoch, True
                self._failed(followed, f"{endpoint.stable}@epoch {endpoint.epoch}", error)
            return
        if self._only is None and pointer.version.facts.pipeline not in self._pipelines:
            return
        followed = self.endpoints.setdefault(endpoint.endpoint_id, Followed(endpoint.endpoint_id))
        with self._wanting:
            followed.seen_epoch, followed.missed = endpoint.epoch, False
            followed.retry_at, followed.failures, followed.notes = 0.0, 0, ()
            followed.wanted = pointer
        self._work.set()

    def _due(self, followed: Followed) -> bool:
        """Whether what the catalog names could not even be gathered, and it is time to try again."""
        return followed.missed and time.monotonic() >= followed.retry_at

    def _keep(self) -> None:
        """The loading thread: loads what is wanted, replaces processes, unloads what nobody needs."""
        self._looked.wait(FIRST_LOOK_SECONDS)
        while not self._stopping.is_set():
            self._work.clear()
            try:
                self._take_turn()
                self.faulty = False
            except Exception:
                # With this thread, every scoring process would die; and who waits for the first load waits for it.
                logger.exception("pointers cannot be followed now, because of a fault here")
                self.faulty = True
                self._settled.set()
            self._work.wait(_TICK_SECONDS)
        for version in self._versions():
            version.close()
        self._loader.close()
        self._settled.set()

    def _take_turn(self) -> None:
        for followed in list(self.endpoints.values()):
            if followed.wanted is not None and time.monotonic() >= followed.retry_at:
                self._follow(followed, followed.wanted)
            self._tend(lambda followed=followed: self._let_go(followed))
        self._revive()
        if all(f.settled for f in list(self.endpoints.values())):
            self._settled.set()
        if self._spare:
            self._tend(self._loader.keep_spare)

    def _tend(self, work: Callable[[], None]) -> None:
        """Do what can wait for the next turn: with this thread, every scoring process would die."""
        try:
            work()
        except OSError as error:
            logger.error("copies and processes cannot be tended now: %s", error)

    def _follow(self, followed: Followed, pointer: Pointer) -> None:
        """Load, keep the pointer on disk, flip; the old one answers until then."""
        try:
            slot = self._slot(pointer)
            self._prepare(slot)
        except (HeadwayError, ValueError, OSError) as error:
            with self._wanting:
                self._failed(followed, pointer.name, error)
            return
        notes = tuple(n for n in followed.notes if n == "keys_away")
        try:
            write_pointer(self._folder / "pointer", pointer)
        except OSError as error:
            logger.error("the pointer of %s cannot be kept: %s", followed.endpoint_id, error)
            notes = (*notes, "pointer_not_kept")
        old, followed.current = followed.current, slot
        with self._wanting:
            followed.notes = notes
            if not followed.missed:
                followed.problem, followed.failures = "", 0
            if followed.wanted is pointer:
                followed.wanted = None
        if old is not None:
            leaving = [s for s in (followed.previous, old) if s is not None]
            followed.previous = old if old.version is not slot.version else followed.previous
            for gone in (s for s in leaving if s is not followed.previous):
                gone.left_at = time.monotonic()
                followed.leaving.append(gone)
        logger.info("%s serves %s", followed.endpoint_id, pointer.name)

    def _slot(self, pointer: Pointer) -> Slot:
        facts = pointer.version.facts
        pipeline = self._pipelines.get(facts.pipeline)
        if pipeline is None:
            raise FeaturesDiffer(f"there is no pipeline {facts.pipeline!r} here", "serve it from its own tree")
        here = (contract_digest(pipeline), code_digest(pipeline))
        if here != (pointer.contract_digest, pointer.code_digest):
            raise FeaturesDiffer(
                f"{pointer.name} was trained on features {pointer.contract_digest} and {pointer.code_digest}, this "
                f"tree computes {here[0]} and {here[1]}",
                f"check out the tree of feature set version {facts.feature_set_version}, or train a new version",
            )
        loaded = {v.manifest_digest: v for v in self._versions()}
        version = loaded.get(pointer.version.manifest_digest) or self._loader.load(pointer)
        return Slot(pointer, pipeline, version, _served(pointer, pipeline))

    def _failed(self, followed: Followed, name: str, error: Exception) -> None:
        followed.failures += 1
        followed.retry_at = time.monotonic() + backoff(followed.failures)
        followed.problem = f"load_failed:{name}"
        logger.error("%s: %s cannot be loaded, what served goes on: %s", followed.endpoint_id, name, error)

    def _let_go(self, followed: Followed) -> None:
        """Unload versions that no pointer of this server needs, once no request is under way with them."""
        now = time.monotonic()
        gone = [slot for slot in followed.leaving if not slot.users and now >= slot.left_at + GRACE_SECONDS]
        if not gone:
            return
        followed.leaving = [slot for slot in followed.leaving if slot not in gone]
        kept = self._versions()
        for version in {slot.version for slot in gone}:
            if version not in kept:
                version.close()
        self._loader.remove_all_but(kept)

    def _versions(self) -> list[Version]:
        found: dict[int, Version] = {}
        for followed in list(self.endpoints.values()):
            for slot in (followed.current, followed.previous, *followed.leaving):
                if slot is not None:
                    found[id(slot.version)] = slot.version
        return list(found.values())

    def _revive(self) -> None:
        for followed in list(self.endpoints.values()):
            for slot in (followed.current, followed.previous):
                if slot is not None and slot.version.needs_process():
                    try:
                        slot.version.revive(self._loader.start(slot.pointer, slot.version.folder))
                    except (HeadwayError, ValueError, OSError) as error:
                        slot.version.failed()
                        logger.error("%s has no scoring process: %s", slot.pointer.name, error)

    def notify(self) -> None:
        """Look for work now: a process was lost, or a slot is free."""
        self._work.set()


def _served(pointer: Pointer, pipeline: Pipeline) -> Served:
    facts = pointer.version.facts
    return Served(
        model_id=facts.model_id,
        endpoint_id=pointer.endpoint.endpoint_id,
        endpoint_epoch=pointer.endpoint.epoch,
        arm="stable",
        version=pointer.version.version,
        artifact_digest=pointer.version.manifest_digest,
        contract=facts.contract,
        contract_hash=facts.contract_hash,
        feature_set_version=facts.feature_set_version,
        degraded=(),
        spec=pipeline.spec,
        run_id=pointer.version.run_id,
    )
