"""Processes of pods, where this machine sees them: a double's, never a real cluster's."""

from pathlib import Path


def host_pids(attempt_file: Path, node: int) -> list[int]:
    """The pids of the process that keeps a node of an attempt, `python -m trainer.node`."""
    wanted = [b"trainer.node", str(attempt_file).encode(), b"--node-rank", str(node).encode()]
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # Shells that lead to it carry the same words, and more.
        if all(word in words for word in wanted) and Path(words[0].decode()).name.startswith("python"):
            found.append(int(entry.name))
    return found
