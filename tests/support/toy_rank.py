"""Stands in for `trainer.worker`: a rank without torch, for tests of what surrounds a training.

A double at the boundary of the user's torch code; everything else (node, supervisor, launcher, catalog, Dagster) is
real. What it does follows from the files beside its run spec, so that a test can change it while it runs:

- `hold`, there or in the folder of all runs: keep stepping until the file is gone;
- `exit`: leave with the code written in it (once: rank 0 takes the file away first);
- `exit_always`: the same, each time;
- `nan`: report a metric that is no finite number (null).

SIGTERM ends it with 75, as a rank that has saved.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from trainer.blobs import Manifest, ManifestEntry, digest_bytes
from trainer.events import EventSink
from trainer.spec import parse_attempt, parse_run

STOP = {"asked": False}


def main() -> int:
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, lambda *_: STOP.update(asked=True))
    attempt = parse_attempt(Path(os.environ["TRAINER_ATTEMPT"]).read_bytes())
    run_dir = Path(attempt.run_dir)
    spec = parse_run((run_dir / "spec.json").read_bytes())
    sink = EventSink.from_environment()
    sink.emit("phase", {"name": "train", "may_take_s": None})
    step = 0
    while step < 3 or any((folder / "hold").exists() for folder in (run_dir, run_dir.parent)):
        step += 1
        sink.beat()
        if rank == 0:
            sink.emit("step", {"step": step, "epoch": 1, "loss": 1.0 / step})
        time.sleep(0.02)
        if STOP["asked"]:
            return 75
        for name in ("exit", "exit_always"):
            if (run_dir / name).exists():
                return leave(run_dir / name, rank)
    if rank == 0:
        finish(sink, run_dir, Path(os.environ["TRAINER_ATTEMPT"]).parent, spec.seed, attempt.run_id)
    return 0


def leave(order: Path, rank: int) -> int:
    if rank != 0:
        time.sleep(30)
        return 77
    code = int(order.read_text())
    if order.name == "exit":
        order.unlink()
    return code


def finish(sink: EventSink, run_dir: Path, folder: Path, seed: int, run_id: str) -> None:
    sink.emit("epoch", {"epoch": 1, "train_loss": 0.5, "valid_loss": 0.6, "valid_auc": 0.7, "best": True})
    target = folder / "artifact" / "network"
    target.mkdir(parents=True)
    data = json.dumps({"weights": seed, "run": run_id}).encode()
    (target / "weights.safetensors").write_bytes(data)
    manifest = Manifest((ManifestEntry("weights.safetensors", len(data), digest_bytes(data)),), {"kind": "network"})
    (target / "manifest.json").write_bytes(manifest.canonical())
    sink.emit("metrics", {"valid_loss": None if (run_dir / "nan").exists() else 0.6, "valid_auc": 0.7})
    sink.emit("artifact", {"name": "network", "manifest": manifest.digest, "path": str(target)})


if __name__ == "__main__":
    sys.exit(main())
