"""The cluster that the contract suite judges the launcher on, and a plain way to look at it.

What is behind the kubeconfig does not matter here:

| variable | meaning |
|---|---|
| HEADWAY_TEST_KUBECONFIG | a cluster whose current context may do everything; without it a double is started |
| HEADWAY_TEST_IMAGE | the image of training pods |
| HEADWAY_TEST_STORE | a folder that tests and pods see under the same path; without it a temporary one |
| HEADWAY_TEST_FAULTS | a file through which faults are made; tests that need one are skipped without it |
| HEADWAY_TEST_PATIENCE_S | how long a test waits for what has to come, 180 s |
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import config
from kubernetes.client.exceptions import ApiException

ROOT = Path(__file__).parents[2]
NO_IMAGE = "headway/trainer@sha256:" + "0" * 64
# How long to wait for what should come; it says nothing about speed.
PATIENCE_S = float(os.environ.get("HEADWAY_TEST_PATIENCE_S", "180"))

T = TypeVar("T")


class Faults:
    """The faults in force, as one document; what is not named works."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def set(self, **faults: Any) -> None:  # noqa: ANN401 - JSON
        """Replace the faults in force."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(faults))
        temporary.replace(self._file)

    def clear(self) -> None:
        """Let everything work again."""
        self.set()


class Admin:
    """Plain requests with every right, so that the launcher's own client proves nothing about itself."""

    def __init__(self, kubeconfig: Path) -> None:
        self._api = config.new_client_from_config(str(kubeconfig), persist_config=False)
        self.server: str = self._api.configuration.host

    def send(self, method: str, path: str, body: object = None, **query: str) -> dict[str, Any]:
        """Send one request; the answer's document.

        Raises:
            ApiException: the answer was no success.
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Content-Type": kind, "Accept": "application/json"}
        self._api.update_params_for_auth(headers, [], ["BearerToken"])
        response = self._api.request(
            method,
            self.server + path,
            query_params=sorted(query.items()),
            headers=headers,
            body=body,
            _preload_content=False,
            _request_timeout=60,
        )
        return json.loads(response.data)

    def find(self, path: str) -> dict[str, Any] | None:
        """The object at `path`, None when there is none."""
        try:
            return self.send("GET", path)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        """The objects of a collection."""
        return self.send("GET", path, **query)["items"]

    def delete(self, path: str, **options: Any) -> None:  # noqa: ANN401 - DeleteOptions
        """Delete an object, in the background; one that is gone is no error."""
        try:
            self.send("DELETE", path, {"propagationPolicy": "Background", **options})
        except ApiException as error:
            if error.status != 404:
                raise


@dataclass(frozen=True)
class Cluster:
    """One cluster, for the length of a test session."""

    kubeconfig: Path
    image: str
    store: Path
    faults: Faults | None
    admin: Admin

    def serves(self, path: str) -> bool:
        """Whether the cluster has this API group."""
        return self.admin.find(path) is not None

    def nodes(self) -> list[str]:
        """Names of the nodes."""
        return sorted(node["metadata"]["name"] for node in self.admin.items("/api/v1/nodes"))

    def cordon(self, *, unschedulable: bool) -> None:
        """Let no new pod onto any node, or let them again."""
        for node in self.nodes():
            self.admin.send("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": unschedulable}})


def given_cluster(environ: Mapping[str, str], store: Path) -> Cluster:
    """The cluster that the environment names."""
    kubeconfig = Path(environ["HEADWAY_TEST_KUBECONFIG"])
    faults = environ.get("HEADWAY_TEST_FAULTS")
    return Cluster(
        kubeconfig,
        environ.get("HEADWAY_TEST_IMAGE", NO_IMAGE),
        Path(environ.get("HEADWAY_TEST_STORE", store)),
        Faults(Path(faults)) if faults else None,
        Admin(kubeconfig),
    )


@contextmanager
def started_double(folder: Path) -> Iterator[dict[str, str]]:
    """A double of a cluster, with Kueue; the variables that describe it."""
    kubeconfig, faults = folder / "kubeconfig", folder / "faults.json"
    faults.write_text("{}")
    command = [sys.executable, "-m", "tests.cluster.double", "--kubeconfig", str(kubeconfig), "--fault", str(faults)]
    command += ["--time-scale", "10", "--nodes", "3", "--kueue", "--state", str(folder / "state")]
    with (folder / "double.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT)
    try:
        assert process.stdout is not None
        said = process.stdout.readline().decode()
        assert said.strip() == "ready", (folder / "double.log").read_text()[-4000:]
        yield {"HEADWAY_TEST_KUBECONFIG": str(kubeconfig), "HEADWAY_TEST_FAULTS": str(faults)}
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(look: Callable[[], T | None], what: str, every_s: float = 0.1) -> T:
    """The first true answer of `look`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if seen := look():
            return seen
        time.sleep(every_s)
    raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}")


def conditions(thing: Mapping[str, Any]) -> dict[str, str]:
    """The true conditions of an object, with their reasons."""
    found = thing.get("status", {}).get("conditions", [])
    return {c["type"]: c.get("reason", "") for c in found if c["status"] == "True"}


def is_label(text: str) -> bool:
    """Whether `text` may be a label's value."""
    return re.fullmatch(r"|[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", text) is not None
