"""The platform profile: every fault is named with file, line and field, before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.training.kubernetes.platform import Platform, ProfileInvalid, load_platform

GOOD = """\
namespace: headway
image: registry.example/trainer@sha256:{digest}
volume:
  claim: home
  mount_path: /headway
cpu: 8
memory: 64Gi
shared_memory: 8Gi
gpu: {{resource: amd.com/gpu, count: 4}}
tolerations:
  - {{key: gpu, operator: Exists, effect: NoSchedule}}
environment:
  NCCL_DEBUG: INFO
secret_environment:
  - {{name: HF_TOKEN, secret: hub, key: token}}
queue:
  local_queue: team-a
""".format(digest="a" * 64)


def load(folder: Path, text: str) -> Platform:
    """Read a profile of this text."""
    file = folder / "platform.yaml"
    file.write_text(text)
    return load_platform(file)


def test_a_whole_profile(tmp_path: Path) -> None:
    platform = load(tmp_path, GOOD)
    assert (platform.cpu, platform.gpu.count, platform.grace_s, platform.node_lost_after_s) == ("8", 4, 120, 30)
    assert platform.memory_bytes == 72 << 30
    assert platform.queue is not None
    assert platform.secret_environment[0].secret == "hub"
    assert platform.max_pending_s is None


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "words"),
    [
        ("cpu: 8", "cpus: 8", 6, "cpus", "is not a field"),
        ("cpu: 8", "cpu: much", 6, "cpu", "no quantity"),
        ("cpu: 8", "cpu: 0", 6, "cpu", "is nothing"),
        ("cpu: 8", "namespace: twice", 6, "namespace", "written twice"),
        ("namespace: headway", "namespace: Head_way", 1, "namespace", "no DNS label"),
        ("@sha256:" + "a" * 64, ":latest", 2, "image", "allow_tags"),
        ("  claim: home\n", "", 3, "volume", "either `claim` or `host_path`"),
        ("mount_path: /headway", "mount_path: headway", 5, "volume.mount_path", "no absolute path"),
        ("count: 4", "count: four", 9, "gpu.count", "integer"),
        ("shared_memory: 8Gi", "shared_memory: 32Mi", 8, "shared_memory", "less than 64Mi"),
        ("operator: Exists", "operator: Is", 11, "tolerations.0.operator", "Equal"),
        ("NCCL_DEBUG", "AWS_SECRET_ACCESS_KEY", 13, "environment.AWS_SECRET_ACCESS_KEY", "secret_environment"),
        ("NCCL_DEBUG", "MASTER_ADDR", 13, "environment.MASTER_ADDR", "sets this itself"),
        ("local_queue: team-a", "priority_class: prod", 16, "queue.local_queue", "required"),
        ("cpu: 8", "run_as_user: 0", 6, "run_as_user", "greater than or equal to 1"),
        ("cpu: 8", "grace_s: true", 6, "grace_s", "integer"),
        ("cpu: 8", "cpu: [", 8, "yaml", "expected"),
    ],
)
def test_faults_are_named_with_line_and_field(
    tmp_path: Path, old: str, new: str, line: int, field: str, words: str
) -> None:
    assert old in GOOD
    with pytest.raises(ProfileInvalid) as refused:
        load(tmp_path, GOOD.replace(old, new, 1))
    assert f"platform.yaml:{line}: {field}: " in refused.value.message
    assert words in refused.value.message


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ProfileInvalid) as refused:
        load(tmp_path, GOOD.replace("cpu: 8", "cpu: x").replace("count: 4", "count: -1").replace("team-a", "Team"))
    assert len(refused.value.message.splitlines()) == 3


@pytest.mark.parametrize("text", ["", "- a\n", "just words\n"])
def test_what_is_no_profile(tmp_path: Path, text: str) -> None:
    with pytest.raises(ProfileInvalid, match="holds no mapping"):
        load(tmp_path, text)
    with pytest.raises(ProfileInvalid, match="HEADWAY_PLATFORM"):
        load_platform(tmp_path / "none.yaml")


def test_a_password_inside_a_url_is_refused_and_not_told(tmp_path: Path) -> None:
    """Whoever may read pods would read it there."""
    given = GOOD.replace("NCCL_DEBUG: INFO", "HTTPS_PROXY: http://me:hunter2@proxy:3128")
    assert given != GOOD
    with pytest.raises(ProfileInvalid) as refused:
        load(tmp_path, given)
    assert "environment.HTTPS_PROXY: the value holds a password" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_variable_of_tokenizers_is_no_secret(tmp_path: Path) -> None:
    given = GOOD.replace("NCCL_DEBUG: INFO", "TOKENIZERS_PARALLELISM: 'false'")
    assert load(tmp_path, given).environment == {"TOKENIZERS_PARALLELISM": "false"}
