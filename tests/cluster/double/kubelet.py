"""Kubelets of the double: they run the pods of their node and report what becomes of them.

The reports come in the order and with the conditions of a real kubelet (recorded exchanges `run_*`); its delays (it
looks at containers about once a second) are the cluster's own and follow the time scale. Probes, lifecycle hooks and
sidecars are not modelled.
"""

import asyncio
import contextlib
import hashlib
import re
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.double import containers
from tests.cluster.double.containers import Process
from tests.cluster.double.quantity import number, text
from tests.cluster.double.store import Object, Store, stamp
from tests.cluster.double.volumes import NotReady, Volumes, environment

if TYPE_CHECKING:
    from tests.cluster.double.controllers import Options

# Seconds until a kubelet acts on a deletion; not scaled, since a client's next request must find the pod unchanged.
_NOTICE = 0.08
# Seconds that a pod which is deleted while it starts is waited for: it starts, and is then stopped.
_STARTING = 60.0
_LOOK = 1.2
_SETTLE = 0.3
_REMOVE = 0.8
_RETRY = 10.0
_BACKOFF = 10.0
_IMAGE = "sha256:" + "0" * 64
_REFERENCE = re.compile(r"([a-z0-9.:_-]+/)*[a-z0-9._-]+(:[\w.-]+)?(@sha256:[0-9a-f]+)?")
_OWN = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
_GONE = "The container could not be located when the pod was terminated"


def _time(seconds: float) -> str:
    return stamp(datetime.fromtimestamp(seconds, UTC))


def _image_fault(image: str, policy: str) -> tuple[str, str]:
    """Why an image is not there: (reason, message); ("", "") when it is.

    Images whose last part is `nope`, and registries under .example or .invalid, do not exist.
    """
    if not _REFERENCE.fullmatch(image):
        part = re.search(r"[A-Z][^/:]*(?=[:/]|$)", image.split("/")[-1])
        why = f"repository name ({part[0]}) must be lowercase" if part else ""
        message = f'couldn\'t parse image name "{image}": invalid reference format' + (f": {why}" if why else "")
        return "InvalidImageName", f'Failed to apply default image tag "{image}": {message}'
    host, _, path = image.rpartition("/")
    missing = re.split("[:@]", path)[0] == "nope" or host.split("/")[0].split(":")[0].endswith((".example", ".invalid"))
    if not missing:
        return "", ""
    if policy == "Never":
        return "ErrImageNeverPull", f'Container image "{image}" is not present with pull policy of Never'
    host, _, rest = image.partition("/")
    name, _, tag = rest.partition(":")
    why = f'failed to do request: Head "https://{host}/v2/{name}/manifests/{tag or "latest"}": dial tcp: lookup {host}'
    why = f"{why} on 127.0.0.1:53: read udp 127.0.0.1:59120->127.0.0.1:53: read: connection refused"
    both = f'failed to pull and unpack image "{image}": failed to resolve reference "{image}"'
    return "ErrImagePull", f"{both}: {why}"


@dataclass
class Container:
    """One container of a pod and what a kubelet says of it."""

    spec: Object
    init: bool
    state: Object
    last: Object = field(default_factory=dict)
    restarts: int = 0
    identity: str = ""
    process: Process | None = None
    ended_at: float = 0.0

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec["name"]

    @property
    def ended(self) -> bool:
        """Whether it has run and ended."""
        return "terminated" in self.state

    def finish(self, process: Process, text: str) -> None:
        """Note the end of a run."""
        reason = "OOMKilled" if process.out_of_memory else "Error" if process.exit_code else "Completed"
        end: Object = {"exitCode": process.exit_code, "reason": reason, **({"message": text} if text else {})}
        end |= {"startedAt": _time(process.started_at), "finishedAt": _time(process.finished_at)}
        self.state = {"terminated": {**end, "containerID": self.identity}}
        self.process, self.ended_at = None, process.finished_at

    def status(self) -> Object:
        """Its entry in the pod's status."""
        running = "running" in self.state
        done = self.init and self.ended and self.state["terminated"]["exitCode"] == 0
        status: Object = {
            "name": self.name,
            "state": self.state,
            "lastState": self.last,
            "ready": (running and not self.init) or done,
            "restartCount": self.restarts,
            "image": self.spec["image"],
            "imageID": _IMAGE if self.identity else "",
            "started": running,
        }
        if self.identity:
            status["containerID"] = self.identity
            resources = self.spec.get("resources", {})
            if resources.get("requests"):
                status["allocatedResources"] = resources["requests"]
            status["resources"] = resources
        return status


def _sum(specs: Iterable[Object], kind: str) -> Object:
    total: dict[str, str] = {}
    for spec in specs:
        for name, value in spec.get("resources", {}).get(kind, {}).items():
            total[name] = text(number(total[name]) + number(value), name) if name in total else value
    return total


class PodWorker:
    """Runs one pod of one node."""

    def __init__(self, kubelet: "Kubelet", pod: Object) -> None:
        """Take the pod up."""
        self._kubelet, self._store, self._clock = kubelet, kubelet.store, kubelet.store.clock
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.address = ""
        self.netns = f"{kubelet.options.network.tag}-{self.uid[:8]}"
        self._folder = kubelet.options.state / "pods" / self.uid
        self._volumes = Volumes(self._store, pod, self._folder, kubelet.options.issue_token)
        spec = pod["spec"]
        waiting = {"waiting": {"reason": "PodInitializing" if spec.get("initContainers") else "ContainerCreating"}}
        self._init = [Container(one, True, dict(waiting)) for one in spec.get("initContainers", ())]
        self._main = [Container(one, False, dict(waiting)) for one in spec["containers"]]
        self._sandbox = False
        self._over = False
        self._started_at = time.time()
        self._deleted = asyncio.Event()
        self._stopping = self._blocked = False
        self._kill_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def hosts(self) -> Path:
        """Its hosts file."""
        return self._folder / "hosts"

    @property
    def host(self) -> str:
        """Its host name."""
        return (self.pod["spec"].get("hostname") or self.pod["metadata"]["name"])[:63]

    @property
    def ready(self) -> bool:
        """Whether all its containers run."""
        return all("running" in one.state for one in self._main)

    def see(self, pod: Object | None) -> None:
        """A change of the pod in the API; None when it is gone from there."""
        if pod is not None:
            self.pod = pod
        if pod is None or "deletionTimestamp" in pod["metadata"]:
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 0) if pod else 0
            kill_at = time.time() + max(grace, 1)
            self._kill_at = min(self._kill_at, kill_at) if self._deleted.is_set() else kill_at
            self._deleted.set()

    async def run(self) -> None:
        """The pod's life on its node."""
        deletion = asyncio.create_task(self._deletion())
        life = asyncio.create_task(self._life())
        self._tasks = [deletion, life]
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # The deletion of a pod that has not started cancels its life.
                if not task.cancelled():
                    task.result()
            await deletion
        finally:
            await self._close(deletion, life)

    async def _close(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        for container in self._init + self._main:
            if container.process:
                container.process.kill()
                await container.process.wait()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._tear_down()
        self._kubelet.options.logs.forget(self.uid)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _life(self) -> None:
        await self._kubelet.online()
        if self._deleted.is_set():
            return
        self._report()
        await self._make_sandbox()
        if await self._initialize():
            await asyncio.gather(*(self._keep(one) for one in self._main))
        await self._finish()

    async def _finish(self) -> None:
        """Every container has ended for good."""
        await self._kubelet.online()
        late = self._kubelet.was_offline_since(self._last_end())
        if not self._stopping and not late:
            self._report()
            await self._wait_or_deleted(_LOOK)
            await self._kubelet.online()
        self._over, self._sandbox = True, False
        self._report()
        await self._tear_down()

    async def _tear_down(self) -> None:
        self._volumes.close()
        self.address = ""
        await self._kubelet.options.network.disconnect(self.netns)

    def _last_end(self) -> float:
        return max(one.ended_at or time.time() for one in self._main)

    async def _wait_or_deleted(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._deleted.wait(), seconds / self._clock.scale)

    async def _make_sandbox(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "resolv.conf").touch()
        while True:
            try:
                self._volumes.prepare()
            except NotReady as missing:
                name = next((v["name"] for v in self.pod["spec"].get("volumes", ())), "")
                message = f'MountVolume.SetUp failed for volume "{name}" : {missing}'
                self._event("Warning", "FailedMount", message)
                self._blocked = True
                await self._clock.sleep(_RETRY)
            else:
                self._blocked = False
                break
        self.address = await self._kubelet.options.network.connect(self._kubelet.name, self.netns)
        self._kubelet.write_hosts()
        self._sandbox = True
        self._report()

    async def _initialize(self) -> bool:
        """Run the init containers; whether the main ones may start."""
        for container in self._init:
            while True:
                await self._once(container)
                if container.state["terminated"]["exitCode"] == 0:
                    break
                if self._stopping or self.pod["spec"]["restartPolicy"] == "Never":
                    return False
                self._report()
                if not await self._again(container):
                    return False
            self._report()
        return not self._stopping

    async def _keep(self, container: Container) -> None:
        """Run one main container, again as often as the restart policy says."""
        policy = self.pod["spec"]["restartPolicy"]
        while True:
            await self._once(container)
            failed = container.state["terminated"]["exitCode"] != 0
            if self._stopping or policy == "Never" or (policy == "OnFailure" and not failed):
                if len(self._main) > 1 and any("running" in one.state for one in self._main) and not self._stopping:
                    self._report()
                return
            await self._kubelet.online()
            self._report()
            if not await self._again(container):
                return

    async def _again(self, container: Container) -> bool:
        """Wait before the next run of a container: the first comes at once, then 10 s times 2^n.

        Returns:
            Whether it may run; not when the pod is deleted, which is being ended then.
        """
        if container.restarts:
            meta = self.pod["metadata"]
            about = f"{meta['name']}_{meta['namespace']}({self.uid})"
            self._event(
                "Warning", "BackOff", f"Back-off restarting failed container {container.name} in pod {about}", container
            )
            await self._wait_or_deleted(_BACKOFF)
            wait = _BACKOFF * 2 ** (container.restarts - 1)
            if wait > _BACKOFF and not self._stopping:
                words = f"back-off {wait:.0f}s restarting failed container={container.name} pod={about}"
                container.last, ended = container.state, container.state
                container.state = {"waiting": {"reason": "CrashLoopBackOff", "message": words}}
                self._report()
                await self._wait_or_deleted(wait - _BACKOFF)
                container.state = ended
        else:
            await self._wait_or_deleted(_SETTLE)
        while self._deleted.is_set() and not self._stopping:
            await asyncio.sleep(0.01)
        if not self._stopping:
            container.last, container.restarts = container.state, container.restarts + 1
        return not self._stopping

    async def _once(self, container: Container) -> None:
        """One run of a container, from its image to its end."""
        await self._image(container)
        process = await self._start(container)
        if process is None:
            return
        container.process = process
        container.state = {"running": {"startedAt": _time(process.started_at)}}
        if all("running" in one.state or one.ended for one in self._main) or container.init:
            await asyncio.sleep(0.02)
            await self._kubelet.online()
            if not self._stopping and not container.init:
                self._report()
        shown = time.time()
        watch = asyncio.create_task(self._out_of_memory(process))
        await process.wait()
        watch.cancel()
        look = _SETTLE if container.init else max(_SETTLE, _LOOK - (time.time() - shown) * self._clock.scale)
        await (self._clock.sleep(_SETTLE) if self._stopping else self._wait_or_deleted(look))
        message = process.message()
        fallback = container.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        if not message and process.exit_code and fallback:
            message = self._kubelet.options.logs.tail(self.pod, container.name, 80, 2048)
        container.finish(process, message)

    async def _out_of_memory(self, process: Process) -> None:
        while not self._kubelet.options.faults.oom(self.pod["metadata"]["name"]):
            await asyncio.sleep(0.1)
        process.out_of_memory = True
        process.kill()

    async def _image(self, container: Container) -> None:
        image = container.spec["image"]
        reason, message = _image_fault(image, container.spec.get("imagePullPolicy", "IfNotPresent"))
        if not reason:
            words = f'Container image "{image}" already present on machine and can be accessed by the pod'
            self._event("Normal", "Pulled", words, container)
        elif reason == "ErrImagePull":
            await self._pull(container, image, message)
        else:
            await self._absent(container, reason, message)

    async def _absent(self, container: Container, reason: str, message: str) -> None:
        """An image that may not be pulled, or has no valid name: looked for again and again."""
        kind = "InspectFailed" if reason == "InvalidImageName" else reason
        container.state = {"waiting": {"reason": reason, "message": message}}
        wait = 1.0
        while True:
            await self._kubelet.online()
            self._event("Warning", kind, message, container)
            self._event("Warning", "Failed", f"Error: {reason}", container)
            self._report()
            await self._clock.sleep(wait)
            wait = 11.0

    async def _pull(self, container: Container, image: str, message: str) -> None:
        """An image that no registry has: pulled with growing back-off."""
        container.state = {"waiting": {"reason": "ErrImagePull", "message": message}}
        wait = _BACKOFF
        for turn in range(1_000_000):
            await self._kubelet.online()
            why = message.replace("59120", str(59120 + turn))
            self._event("Normal", "Pulling", f'Pulling image "{image}"', container)
            self._event("Warning", "Failed", f'Failed to pull image "{image}": {why}', container)
            self._event("Warning", "Failed", "Error: ErrImagePull", container)
            self._report()
            await self._clock.sleep(1.0)
            if turn == 0:
                self._event("Normal", "BackOff", f'Back-off pulling image "{image}"', container)
                self._event("Warning", "Failed", "Error: ImagePullBackOff", container)
                words = f'Back-off pulling image "{image}": ErrImagePull: {message}'
                await self._clock.sleep(4.0)
                container.state = {"waiting": {"reason": "ImagePullBackOff", "message": words}}
            await self._clock.sleep(wait)
            wait = min(wait * 2, 300.0)

    async def _start(self, container: Container) -> Process | None:
        options = self._kubelet.options
        network = options.network
        services = {"KUBERNETES_SERVICE_HOST": network.gateway, "KUBERNETES_SERVICE_PORT": str(options.api_port)}
        services["KUBERNETES_SERVICE_PORT_HTTPS"] = str(options.api_port)
        wait = _SETTLE
        while True:
            seen = {**self.pod, "status": {**self.pod.get("status", {}), "podIP": self.address}}
            seen["status"]["hostIP"] = network.address(self._kubelet.name)
            try:
                env = environment(self._store, seen, container.spec, services)
                mounts = self._volumes.mounts(container.spec)
            except NotReady as missing:
                self._event("Warning", "Failed", f"Error: {missing}", container)
                container.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(missing)}}
                self._report()
                await self._clock.sleep(wait)
                await self._image(container)
                wait = _RETRY
            else:
                break
        log = options.logs.open(self.pod, container.name)
        digest = hashlib.sha256(f"{self.uid}{container.name}{container.restarts}".encode()).hexdigest()
        container.identity = f"containerd://{digest}"
        self._event("Normal", "Created", "Container created", container)
        try:
            process = await containers.start(
                container.spec,
                namespace=self.netns,
                host=self.host,
                folder=self._folder,
                env=env,
                mounts=mounts,
                log=log,
            )
        except containers.StartFailed as error:
            log.ended = True
            words = (
                f"OCI runtime create failed: runc create failed: unable to start container process: {error}: unknown"
            )
            words = f"failed to create containerd task: failed to create shim task: {words}"
            self._event("Warning", "Failed", f"Error: {words}", container)
            end: Object = {"exitCode": 128, "reason": "StartError", "message": words}
            end |= {"startedAt": "1970-01-01T00:00:00Z", "finishedAt": _time(time.time())}
            container.state = {"terminated": {**end, "containerID": container.identity}}
            return None
        self._event("Normal", "Started", "Container started", container)
        return process

    async def _deletion(self) -> None:
        """Wait for the pod's deletion and end it: SIGTERM, its grace, SIGKILL, and away with it."""
        await self._deleted.wait()
        await asyncio.sleep(_NOTICE)
        await self._kubelet.online()
        life = self._tasks[1]
        await self._until_started(life)
        self._stopping = True
        if not self._started() and not life.done():
            await self._stop_unstarted(life)
        elif not self._over:
            self._report()
            await self._stop(life)
        await self._clock.sleep(_REMOVE)
        await self._kubelet.online()
        self._remove()
        await self._until_gone()

    def _started(self) -> bool:
        return any(one.process or one.ended for one in self._init + self._main)

    async def _until_started(self, life: asyncio.Task[None]) -> None:
        """A kubelet ends what it is doing first: containers that are being started start, and are then stopped."""
        limit = time.time() + _STARTING
        while not self._started() and not self._blocked and not life.done() and time.time() < limit:
            if any(self._shown(one) for one in self._init + self._main):
                return
            await asyncio.sleep(0.01)

    async def _stop_unstarted(self, life: asyncio.Task[None]) -> None:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        for container in self._main:
            container.state = {"waiting": {"reason": "ContainerCreating"}}
        self._report()
        if self._sandbox:
            self._sandbox = False
            self._report()
        await self._clock.sleep(_SETTLE)
        await self._give_up(life)

    async def _stop(self, life: asyncio.Task[None]) -> None:
        for container in self._init + self._main:
            if container.process:
                self._event("Normal", "Killing", f"Stopping container {container.name}", container)
                container.process.send(signal.SIGTERM)
        while not life.done():
            if time.time() >= self._kill_at:
                for container in self._init + self._main:
                    if container.process:
                        container.process.kill()
            await asyncio.wait([life], timeout=0.05)
            if not any(one.process for one in self._init + self._main) and self._unstarted() and not life.done():
                await self._give_up(life)
                return
        life.result()

    def _unstarted(self) -> list[Container]:
        return [one for one in self._main if "waiting" in one.state]

    async def _give_up(self, life: asyncio.Task[None]) -> None:
        """End a pod of which some container cannot start."""
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        end = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": _GONE}
        for container in self._unstarted():
            container.state = {"terminated": {**end, "startedAt": None, "finishedAt": None}}
        self._over, self._sandbox = True, False
        self._report()

    def _remove(self) -> None:
        meta = self.pod["metadata"]
        found = self._store.get("pods", meta["namespace"], meta["name"])
        if found is not None and found["metadata"]["uid"] == self.uid:
            self._store.delete("pods", meta["namespace"], meta["name"], grace=0, uid=self.uid)

    async def _until_gone(self) -> None:
        meta = self.pod["metadata"]
        while True:
            found = self._store.get("pods", meta["namespace"], meta["name"])
            if found is None or found["metadata"]["uid"] != self.uid:
                return
            await asyncio.sleep(0.05)

    def _event(self, type_: str, reason: str, message: str, container: Container | None = None) -> None:
        path = ""
        if container is not None:
            path = f"spec.{'initContainers' if container.init else 'containers'}{{{container.name}}}"
        self._store.record_event(self.pod, type_, reason, message, "kubelet", host=self._kubelet.name, field_path=path)

    def _report(self) -> None:
        meta = self.pod["metadata"]
        pod = self._store.get("pods", meta["namespace"], meta["name"])
        if pod is None or pod["metadata"]["uid"] != self.uid:
            return
        pod["status"] = self._status(pod)
        del pod["metadata"]["resourceVersion"]
        self._store.update("pods", pod, status=True)
        self._kubelet.write_hosts()

    def _status(self, pod: Object) -> Object:
        old, specs = pod.get("status", {}), self.pod["spec"]["containers"]
        network = self._kubelet.options.network
        final = self._phase()
        hold = final in ("Succeeded", "Failed") and not self._over
        status: Object = {"observedGeneration": pod["metadata"].get("generation", 1)}
        status["phase"] = old.get("phase", "Pending") if hold else final
        status["conditions"] = self._conditions(old, final, status["observedGeneration"])
        address = network.address(self._kubelet.name)
        status |= {"hostIP": address, "hostIPs": [{"ip": address}]}
        if "podIP" in old:
            status |= {"podIP": old["podIP"], "podIPs": old["podIPs"]}
        elif self.address and any(self._shown(one) for one in self._main + self._init):
            status |= {"podIP": self.address, "podIPs": [{"ip": self.address}]}
        status["startTime"] = _time(self._started_at)
        if self._init:
            status["initContainerStatuses"] = [one.status() for one in self._init]
        status["containerStatuses"] = [one.status() for one in self._main]
        status["qosClass"] = old.get("qosClass", "BestEffort")
        requests, limits = _sum(specs, "requests"), _sum(specs, "limits")
        if requests:
            status["allocatedResources"] = requests
        both = {"limits": limits, "requests": requests}
        status["resources"] = {key: value for key, value in both.items() if value}
        return status

    def _shown(self, container: Container) -> bool:
        waiting = container.state.get("waiting", {}).get("reason", "")
        return waiting not in ("ContainerCreating", "PodInitializing")

    def _phase(self) -> str:
        never = self.pod["spec"]["restartPolicy"] == "Never"
        codes = [one.state["terminated"]["exitCode"] for one in self._main if one.ended]
        broken = [one for one in self._init if one.ended and one.state["terminated"]["exitCode"] != 0]
        if broken and (never or self._stopping):
            return "Failed"
        if len(codes) == len(self._main) and (self._stopping or self._finished(codes)):
            return "Failed" if any(codes) else "Succeeded"
        started = any("running" in one.state or one.ended or one.restarts for one in self._main)
        return "Running" if started else "Pending"

    def _finished(self, codes: list[int]) -> bool:
        policy = self.pod["spec"]["restartPolicy"]
        return policy == "Never" or (policy == "OnFailure" and not any(codes))

    def _conditions(self, old: Object, final: str, generation: int) -> list[Object]:
        unready = [one.name for one in self._main if not one.status()["ready"]]
        reason, message = "", ""
        if unready:
            reason, message = "ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]"
            unknown = any(
                one.state.get("terminated", {}).get("reason") == "ContainerStatusUnknown" for one in self._main
            )
            if final in ("Succeeded", "Failed") and not unknown:
                reason, message = "PodCompleted" if final == "Succeeded" else "PodFailed", ""
        incomplete = [one.name for one in self._init if not one.status()["ready"]]
        initialized = ("ContainersNotInitialized", f"containers with incomplete status: [{' '.join(incomplete)}]")
        if not incomplete:
            initialized = ("PodCompleted" if final == "Succeeded" else "", "")
        wanted: dict[str, tuple[bool, str, str]] = {
            "PodReadyToStartContainers": (self._sandbox, "", ""),
            "Initialized": (not incomplete, initialized[0], initialized[1]),
            "Ready": (not unready, reason, message),
            "ContainersReady": (not unready, reason, message),
        }
        before = {one["type"]: one for one in old.get("conditions", ())}
        others = [one for kind, one in before.items() if kind not in (*_OWN, "PodScheduled")]
        own = [_condition(kind, values, before.get(kind)) for kind, values in wanted.items()]
        scheduled = [before["PodScheduled"]] if "PodScheduled" in before else []
        marked = [{"type": one["type"], "observedGeneration": generation, **_rest(one)} for one in own + scheduled]
        return others + marked


def _rest(condition: Object) -> Object:
    return {key: value for key, value in condition.items() if key not in ("type", "observedGeneration")}


def _condition(kind: str, values: tuple[bool, str, str], before: Object | None) -> Object:
    holds, reason, message = values
    status = "True" if holds else "False"
    since = before["lastTransitionTime"] if before and before["status"] == status else _time(time.time())
    condition: Object = {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": since}
    return {**condition, **({"reason": reason} if reason else {}), **({"message": message} if message else {})}


class Kubelet:
    """The kubelet of one node.

    Attributes:
        name: The node.
        state: `ready`, `killed` (containers run on) or `partitioned`.
    """

    def __init__(self, name: str, store: Store, options: "Options") -> None:
        """Take charge of a node."""
        self.name, self.store, self.options = name, store, options
        self.state = "ready"
        self._online = asyncio.Event()
        self._online.set()
        self._offline_at = self._online_at = 0.0
        self._workers: dict[str, tuple[PodWorker, asyncio.Task[None]]] = {}

    @property
    def answers(self) -> bool:
        """Whether the API server gets an answer from it."""
        return self.state == "ready"

    @property
    def workers(self) -> list[PodWorker]:
        """The pods that it runs."""
        return [worker for worker, _ in self._workers.values()]

    async def online(self) -> None:
        """Wait until the kubelet lives and reaches the API server."""
        await self._online.wait()

    def was_offline_since(self, moment: float) -> bool:
        """Whether an end at `moment` fell into a time offline."""
        return self._offline_at <= moment <= self._online_at

    def become(self, state: str) -> None:
        """Kill it, cut it off, or bring it back."""
        if state == self.state:
            return
        self.state = state
        if state == "ready":
            self._online_at = time.time()
            self._online.set()
            for pod in self.store.list("pods"):
                self._see(pod)
            known = {pod["metadata"]["uid"] for pod in self.store.peek("pods")}
            for worker in self.workers:
                if worker.uid not in known:
                    worker.see(None)
        else:
            self._offline_at, self._online_at = time.time(), float("inf")
            self._online.clear()

    async def run(self) -> None:
        """Run the pods that are bound to the node."""
        Path("/dev/termination-log").touch()
        changes = self.store.subscribe()
        for pod in self.store.list("pods"):
            self._see(pod)
        while True:
            plural, kind, obj = await changes.get()
            if plural == "services":
                self.write_hosts()
            if plural != "pods" or self.state != "ready":
                continue
            if kind != "DELETED":
                self._see(obj)
            elif obj["metadata"]["uid"] in self._workers:
                self._workers[obj["metadata"]["uid"]][0].see(None)

    def _see(self, pod: Object) -> None:
        if pod["spec"].get("nodeName") != self.name:
            return
        uid = pod["metadata"]["uid"]
        if uid not in self._workers:
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                return
            worker = PodWorker(self, pod)
            task = asyncio.create_task(worker.run(), name=f"pod {pod['metadata']['name']}")
            task.add_done_callback(lambda done: self._done(uid, done))
            self._workers[uid] = (worker, task)
        self._workers[uid][0].see(pod)

    def _done(self, uid: str, task: asyncio.Task[None]) -> None:
        self._workers.pop(uid, None)
        self.write_hosts()
        if not task.cancelled() and task.exception() is not None:
            raise RuntimeError(f"the worker of pod {uid} failed") from task.exception()

    def write_hosts(self) -> None:
        """Write the hosts file of every pod of every node anew, in place, since containers hold it mounted."""
        workers = [one for kubelet in self.options.kubelets.values() for one in kubelet.workers if one.address]
        tables: dict[str, str] = {}
        for worker in workers:
            namespace = worker.pod["metadata"]["namespace"]
            if namespace not in tables:
                tables[namespace] = _hosts(self.store, workers, self.options.network.gateway, namespace)
            _overwrite(worker.hosts, f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{_own(worker)}{tables[namespace]}")

    async def close(self) -> None:
        """Kill every pod."""
        tasks = [task for _, task in self._workers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _overwrite(path: Path, content: str) -> None:
    with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
        data = content.encode()
        file.write(data)
        file.truncate(len(data))


def _own(worker: PodWorker) -> str:
    subdomain, namespace = worker.pod["spec"].get("subdomain"), worker.pod["metadata"]["namespace"]
    full = f"{worker.host}.{subdomain}.{namespace}.svc.cluster.local\t" if subdomain else ""
    return f"{worker.address}\t{full}{worker.host}\n"


def _matches(service: Object, pod: Object) -> bool:
    wanted, labels = service["spec"].get("selector"), pod["metadata"].get("labels", {})
    same = service["metadata"]["namespace"] == pod["metadata"]["namespace"]
    return bool(wanted) and same and all(labels.get(key) == value for key, value in wanted.items())


def _hosts(store: Store, workers: list[PodWorker], gateway: str, namespace: str) -> str:
    """What the cluster's DNS would say in a namespace: services, and the pods behind headless ones by name.

    There is no proxy: the name of a service with an address of its own leads to its pods directly.
    """
    lines = [f"{gateway}\tkubernetes.default.svc.cluster.local kubernetes.default.svc"]
    for service in store.peek("services"):
        meta = service["metadata"]
        name, early = f"{meta['name']}.{meta['namespace']}", service["spec"].get("publishNotReadyAddresses")
        short = [meta["name"]] if meta["namespace"] == namespace else []
        for worker in workers:
            if not _matches(service, worker.pod) or not (early or worker.ready):
                continue
            names = [f"{name}.svc.cluster.local", f"{name}.svc", name, *short]
            if worker.pod["spec"].get("subdomain") == meta["name"]:
                names = [f"{worker.host}.{one}" for one in names] + names
            lines.append(f"{worker.address}\t{' '.join(names)}")
    return "\n".join(lines) + "\n"
