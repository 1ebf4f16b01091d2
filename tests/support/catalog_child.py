"""A child process that runs one catalog command and kills itself at a labelled point.

Children are forked from a small server process that has imported everything, so each costs milliseconds.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

from support.catalog_facts import ALICE, Ticker, delivery, evidence, feature_set, payload, snapshot

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog

COMMANDS = ("register", "validate", "release", "quarantine", "revalidate", "retire", "feature_set", "publish", "refuse")
# What a command needs before it can run.
BEFORE = {
    "register": (),
    "validate": ("register",),
    "release": ("register", "validate"),
    "quarantine": ("register", "validate"),
    "revalidate": ("register", "validate", "release"),
    "retire": ("register", "validate", "release"),
    "feature_set": (),
    "publish": ("register", "validate", "release", "feature_set"),
    "refuse": (),
}


def run(catalog: Catalog, store: LocalStore, command: str, key: str | None) -> object:
    """Run one command; blobs go to the store first, as the order of durability demands."""
    good = evidence()
    match command:
        case "register":
            store.put_bytes(payload("manifest", "flights", "2013-06-01", 1))
            return catalog.register_version(ALICE, key, delivery())
        case "validate":
            return catalog.start_validation(ALICE, key, "flights", 1, good.suite_digest)
        case "release" | "quarantine":
            store.put_bytes(payload("report", "suite", "good"))
            end = catalog.release_version if command == "release" else catalog.quarantine_version
            return end(ALICE, key, "flights", 1, good)
        case "revalidate":
            store.put_bytes(payload("report", "other suite", "good"))
            return catalog.record_validation(ALICE, key, "flights", 1, evidence("other suite"))
        case "retire":
            return catalog.retire_version(ALICE, key, "flights", 1, "replaced")
        case "feature_set":
            return catalog.register_feature_set(ALICE, key, feature_set())
        case "publish":
            store.put_bytes(payload("snapshot manifest", "2013-06-01", 1))
            return catalog.publish_snapshot(ALICE, key, snapshot((catalog.version(ALICE, "flights", 1),)))
        case "refuse":
            return catalog.refuse_snapshot(ALICE, key, "flight_delay", "2013-06-01", "quarantined", ("flights",))
        case _:
            raise ValueError(command)


def die_at(point: str) -> Callable[[str], None]:
    """Return a probe that kills this process at `point`."""

    def probe(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return probe


def main(url: str, folder: Path, command: str, point: str, key: str | None) -> None:
    """Run the command in this process, with the probe in catalog and store."""
    run(open_catalog(url, Ticker(), die_at(point)), LocalStore(folder, die_at(point)), command, key)


def exit_code(target: Callable[..., None], *arguments: object) -> int | None:
    """Run `target` in a child process; return its exit code, negative for the signal that ended it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "headway.catalog.catalog", "headway.catalog.migrate", "psycopg"])
    child = context.Process(target=target, args=arguments)
    child.start()
    child.join(120)
    return child.exitcode
