"""Which setting of a user makes a field of the manifest: a refusal of the API server is told in these words too."""

from __future__ import annotations

import re

_POD = r"(spec\.template\.)?spec\."
_CONTAINER = _POD + r"containers\[\d+\]\."
_PLACES: tuple[tuple[str, str], ...] = (
    (r"metadata\.namespace", "profile: namespace"),
    (r"metadata\.labels\[?.*queue-name", "profile: queue.local_queue"),
    (r"metadata\.labels\[?.*priority-class", "profile: queue.priority_class"),
    (r"metadata\.(name|labels|annotations)", "run: tenant and pipeline, which its names are made of"),
    (r"spec\.(completions|parallelism|completionMode|backoffLimit.*)", "run: training.nodes"),
    (r"spec\.ports", "profile: port"),
    (_CONTAINER + r"image$", "profile: image"),
    (_CONTAINER + r"imagePullPolicy", "profile: image_pull_policy"),
    (_CONTAINER + r"command", "profile: python"),
    (_CONTAINER + r"ports", "profile: port"),
    (_CONTAINER + r"env\[\d+\]\.valueFrom", "profile: secret_environment"),
    (_CONTAINER + r"env", "profile: environment"),
    (_CONTAINER + r"resources.*\[?cpu\]?", "profile: cpu"),
    (_CONTAINER + r"resources.*\[?memory\]?", "profile: memory"),
    (_CONTAINER + r"resources", "profile: gpu.resource, gpu.count, cpu, memory"),
    (_CONTAINER + r"securityContext", "profile: security.read_only_root"),
    (_CONTAINER + r"volumeMounts", "profile: volume.mount_path"),
    (_CONTAINER + r"workingDir", "HEADWAY_HOME, which lies below the profile's volume.mount_path"),
    (_POD + r"volumes.*(emptyDir|sizeLimit)", "profile: shared_memory"),
    (_POD + r"volumes", "profile: volume.claim or volume.host_path"),
    (_POD + r"securityContext\.runAsUser", "profile: run_as_user"),
    (_POD + r"securityContext\.runAsGroup", "profile: run_as_group"),
    (_POD + r"securityContext\.fsGroup", "profile: fs_group"),
    (_POD + r"serviceAccount", "profile: service_account"),
    (_POD + r"priorityClassName", "profile: priority_class"),
    (_POD + r"nodeSelector", "profile: node_selector"),
    (_POD + r"tolerations", "profile: tolerations"),
    (_POD + r"topologySpreadConstraints", "profile: topology"),
    (_POD + r"imagePullSecrets", "profile: image_pull_secrets"),
    (_POD + r"terminationGracePeriodSeconds", "profile: grace_s"),
)


def setting_of(path: str) -> str:
    """Return what a user sets that makes the manifest's field at `path`; "" for what no setting makes."""
    return next((setting for place, setting in _PLACES if re.match(place, path)), "")


def in_settings(refusal: str) -> str:
    """Return a refusal, one `path: words` per line, with the setting that made each field beside it."""
    return "\n".join(_with_setting(line) for line in refusal.splitlines())


def _with_setting(line: str) -> str:
    setting = setting_of(line.partition(": ")[0])
    return f"{line} [{setting}]" if setting else line
