"""A copy of the instance's Jobs and pods, kept by watching: one list, then every change.

A watch is resumed where it broke off; one that is too old (410) begins with a list again, and so does every one now and
then, whatever it told. While the API server does not answer, the copy is not shown: from what is old nothing follows.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from headway.training.kubernetes.client import Cluster, Document, Gone, Watch
from headway.training.launch import LaunchError, LauncherUnavailable

RELIST_S = 300.0
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)

logger = logging.getLogger(__name__)


class Informer:
    """The objects of one resource that a label selector chooses.

    The first use lists in the caller's thread; a daemon thread then keeps the copy until `close`. `told` is called for
    every object that is seen new, changed or gone, in whichever thread sees it.
    """

    def __init__(self, cluster: Cluster, resource: str, selector: str, told: Callable[[Document], None]) -> None:
        self._cluster = cluster
        self._resource = resource
        self._selector = selector
        self._told = told
        self._lock = threading.Lock()
        self._objects: dict[str, Document] = {}
        self._version = ""
        self._listed_s = 0.0
        self._fault: LaunchError | None = None
        self._thread: threading.Thread | None = None
        self._watch: Watch | None = None
        self._closed = threading.Event()

    def objects(self) -> Mapping[str, Document]:
        """The objects by name, as of the last change that was told.

        Raises:
            LauncherUnavailable: the API server does not answer.
            Forbidden: the account may not look.
        """
        with self._lock:
            # A thread that an unforeseen error ended must not leave a copy behind that is never current again.
            if not (self._closed.is_set() or (self._thread is not None and self._thread.is_alive())):
                self._list()
                self._thread = threading.Thread(target=self._follow, name=f"watch-{self._resource}", daemon=True)
                self._thread.start()
            elif self._fault is not None:
                # The thread waits before it tries again; who asks now gets the answer of now.
                self._list()
            return dict(self._objects)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._watch is not None:
            self._watch.close()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _list(self) -> None:
        listing = self._cluster.list(self._resource, labels=self._selector)
        self._objects = {item["metadata"]["name"]: item for item in listing.items}
        self._version, self._listed_s, self._fault = listing.version, time.monotonic(), None
        for item in listing.items:
            self._told(item)

    def _follow(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                if not self._version or time.monotonic() - self._listed_s > RELIST_S:
                    with self._lock:
                        self._list()
                self._watch_on()
                failures = 0
            except Gone:
                self._version = ""
            except LaunchError as error:
                self._fault = error
                if not isinstance(error, LauncherUnavailable):
                    self._version = ""
                pause = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
                failures += 1
                # Many launchers must not come back all at once.
                self._closed.wait(pause * random.uniform(0.5, 1.0))

    def _watch_on(self) -> None:
        self._watch = self._cluster.watch(self._resource, self._version, labels=self._selector)
        if self._closed.is_set():
            self._watch.close()
        self._fault = None
        for kind, item in self._watch:
            metadata = item["metadata"]
            with self._lock:
                self._version = metadata["resourceVersion"]
                if kind == "DELETED":
                    self._objects.pop(metadata["name"], None)
                elif kind != "BOOKMARK":
                    self._objects[metadata["name"]] = item
            if kind != "BOOKMARK":
                self._told(item)


class View:
    """Jobs and pods of one instance."""

    def __init__(self, cluster: Cluster, selector: str, told: Callable[[Document], None]) -> None:
        """`told` gets every pod that is seen new, changed or gone."""
        self._jobs = Informer(cluster, "jobs", selector, lambda _: None)
        self._pods = Informer(cluster, "pods", selector, told)

    def job(self, name: str) -> Document | None:
        """The Job of that name."""
        return self._jobs.objects().get(name)

    def pods(self, labels: Mapping[str, str]) -> list[Document]:
        """The pods that bear all of `labels`."""
        return [pod for pod in self._pods.objects().values() if bears(pod, labels)]

    def close(self) -> None:
        """End both threads."""
        self._jobs.close()
        self._pods.close()


def bears(item: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether an object has every one of `labels`."""
    given = item["metadata"].get("labels") or {}
    return all(given.get(name) == value for name, value in labels.items())
