"""What a pod's containers find in their environment and their volumes."""

import base64
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.cluster.double.containers import Mount, expand
from tests.cluster.double.quantity import number
from tests.cluster.double.store import Object, Store


class NotReady(Exception):
    """Something that the pod refers to does not exist (yet)."""


def _data(store: Store, plural: str, namespace: str, name: str, optional: bool) -> dict[str, bytes] | None:
    found = store.get(plural, namespace, name)
    if found is None:
        if optional:
            return None
        raise NotReady(f'{plural.removesuffix("s")} "{name}" not found')
    if plural == "secrets":
        return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}
    data = {key: value.encode() for key, value in found.get("data", {}).items()}
    return data | {key: base64.b64decode(value) for key, value in found.get("binaryData", {}).items()}


def field_value(pod: Object, path: str) -> str:
    """A field of the downward API."""
    meta = pod["metadata"]
    for part in ("labels", "annotations"):
        if path.startswith(f"metadata.{part}["):
            return meta.get(part, {}).get(path.split("'")[1], "")
        if path == f"metadata.{part}":
            return "\n".join(f'{key}="{value}"' for key, value in sorted(meta.get(part, {}).items()))
    if path == "status.podIPs":
        path = "status.podIP"
    top, _, key = path.partition(".")
    return str(pod.get(top, {}).get(key, ""))


def _resource(pod: Object, container: Object, ref: Object) -> str:
    every = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
    name = ref.get("containerName", container["name"])
    resources = next(one for one in every if one["name"] == name).get("resources", {})
    kind, _, what = ref["resource"].partition(".")
    value = number(resources.get(kind, {}).get(what, 0)) / number(ref.get("divisor") or 1)
    return str(-(-value // 1))


def _value(store: Store, pod: Object, container: Object, source: Object) -> str | None:
    namespace = pod["metadata"]["namespace"]
    if "fieldRef" in source:
        return field_value(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _resource(pod, container, source["resourceFieldRef"])
    plural, kind = ("configmaps", "ConfigMap") if "configMapKeyRef" in source else ("secrets", "Secret")
    ref = source.get("configMapKeyRef") or source["secretKeyRef"]
    data = _data(store, plural, namespace, ref["name"], ref.get("optional", False))
    if data is None or (ref["key"] not in data and ref.get("optional")):
        return None
    if ref["key"] not in data:
        raise NotReady(f"couldn't find key {ref['key']} in {kind} {namespace}/{ref['name']}")
    return data[ref["key"]].decode()


def environment(store: Store, pod: Object, container: Object, services: dict[str, str]) -> dict[str, str]:
    """The environment of a container.

    Args:
        store: The cluster.
        pod: The pod, with its address in the status.
        container: The container of its spec.
        services: Variables that name services.

    Raises:
        NotReady: A ConfigMap, a Secret or a key is missing.
    """
    values = dict(services)
    for source in container.get("envFrom", ()):
        plural, ref = (
            ("configmaps", source["configMapRef"]) if "configMapRef" in source else ("secrets", source["secretRef"])
        )
        data = _data(store, plural, pod["metadata"]["namespace"], ref["name"], ref.get("optional", False)) or {}
        values |= {source.get("prefix", "") + key: value.decode() for key, value in data.items()}
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            value = _value(store, pod, container, entry["valueFrom"])
            if value is not None:
                values[entry["name"]] = value
        else:
            values[entry["name"]] = expand(entry.get("value", ""), values)
    return values


class Volumes:
    """The volumes of one pod, as folders of the host."""

    def __init__(self, store: Store, pod: Object, folder: Path, issue_token: Callable[[str, str], str]) -> None:
        """Keep what is needed to make them under `folder`."""
        self._store, self._pod, self._folder, self._issue_token = store, pod, folder, issue_token
        self._mounted: list[Path] = []
        self._made: list[Path] = []

    def prepare(self) -> None:
        """Make every volume.

        Raises:
            NotReady: A ConfigMap, a Secret, a claim or a folder is missing.
        """
        for volume in self._pod["spec"].get("volumes", ()):
            self._source(volume)

    def mounts(self, container: Object) -> list[Mount]:
        """The mounts of one container; mount points that the image lacks are made."""
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes", ())}
        mounts = []
        for entry in container.get("volumeMounts", ()):
            source = self._source(volumes[entry["name"]])
            if entry.get("subPath"):
                source /= entry["subPath"]
                if not source.exists():
                    source.mkdir(parents=True)
            target = Path(entry["mountPath"])
            self._mount_point(target, source.is_dir())
            mounts.append(Mount(source, str(target), entry.get("readOnly", False)))
        return mounts

    def close(self) -> None:
        """Unmount and remove what was made."""
        for path in self._mounted:
            subprocess.run(["umount", "--lazy", path], check=False, stderr=subprocess.DEVNULL)
        for path in reversed(self._made):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        self._mounted, self._made = [], []

    def _mount_point(self, target: Path, folder: bool) -> None:
        if target.exists():
            return
        missing = [parent for parent in target.parents if not parent.exists()]
        self._made += reversed(missing)
        if folder:
            target.mkdir(parents=True)
            self._made.append(target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()

    def _source(self, volume: Object) -> Path:
        path = self._folder / "volumes" / volume["name"]
        if "hostPath" in volume:
            return self._host_path(volume["hostPath"])
        if "persistentVolumeClaim" in volume:
            return self._claim(volume["persistentVolumeClaim"]["claimName"])
        if "emptyDir" in volume:
            return self._empty(path, volume["emptyDir"])
        files = self._files(volume)
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        return path

    def _host_path(self, spec: Object) -> Path:
        path, kind = Path(spec["path"]), spec.get("type", "")
        if kind == "DirectoryOrCreate" or (not kind and not path.exists()):
            path.mkdir(parents=True, exist_ok=True)
        elif kind == "Directory" and not path.is_dir():
            raise NotReady(f"hostPath type check failed: {path} is not a directory")
        elif kind == "File" and not path.is_file():
            raise NotReady(f"hostPath type check failed: {path} is not a file")
        return path

    def _claim(self, name: str) -> Path:
        namespace = self._pod["metadata"]["namespace"]
        claim = self._store.get("persistentvolumeclaims", namespace, name)
        if claim is None:
            raise NotReady(f'persistentvolumeclaim "{name}" not found')
        volume = self._store.get("persistentvolumes", "", claim["spec"].get("volumeName") or "-")
        if volume is not None and "hostPath" in volume["spec"]:
            return self._host_path(volume["spec"]["hostPath"])
        path = self._folder.parent.parent / "claims" / namespace / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _empty(self, path: Path, spec: Object) -> Path:
        fresh = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        if fresh and spec.get("medium") == "Memory":
            size = f"size={int(number(spec['sizeLimit']))}," if spec.get("sizeLimit") else ""
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"{size}mode=1777", "emptydir", path], check=True)
            self._mounted.append(path)
        elif fresh:
            path.chmod(0o777)
        return path

    def _files(self, volume: Object) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for source in volume.get("projected", {}).get("sources", [volume]):
            files |= self._from(source)
        return files

    def _from(self, source: Object) -> dict[str, bytes]:
        pod, namespace = self._pod, self._pod["metadata"]["namespace"]
        if "serviceAccountToken" in source:
            account = pod["spec"].get("serviceAccountName") or "default"
            return {source["serviceAccountToken"]["path"]: self._issue_token(namespace, account).encode()}
        if "downwardAPI" in source:
            items = source["downwardAPI"].get("items", ())
            return {one["path"]: field_value(pod, one["fieldRef"]["fieldPath"]).encode() for one in items}
        for key, plural in (("configMap", "configmaps"), ("secret", "secrets")):
            if key in source:
                spec = source[key]
                name = spec.get("name") or spec.get("secretName")
                data = _data(self._store, plural, namespace, name, spec.get("optional", False)) or {}
                if "items" in spec:
                    return {one["path"]: data[one["key"]] for one in spec["items"]}
                return data
        raise NotReady(f"the double has no volumes of kind {sorted(set(source) - {'name'})}")
