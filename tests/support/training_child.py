"""Materializes the training stages of a bench in a process of its own, which a test may kill.

`python -m support.training_child ROOT AS_OF [judge]`: `training_run`, and with `judge` `model_version` too. The Dagster
instance is the one in DAGSTER_HOME. With a file `toy` in ROOT the ranks are toys.
"""

import sys
from pathlib import Path

import dagster as dg
import pytest
from support.training_bench import TrainingBench, use_toy_ranks

from assets.model_version import build_model_version
from assets.training_run import build_training_run
from headway.loading import load_pipeline
from resources.platform import Platform


def main() -> int:
    root, as_of = Path(sys.argv[1]), sys.argv[2]
    bench = TrainingBench(root / "shop", root / "home")
    pipeline = load_pipeline(bench.folder)
    stages = [build_training_run(pipeline)]
    if sys.argv[3:] == ["judge"]:
        stages.append(build_model_version(pipeline))
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.get() as instance:
        if (root / "toy").exists():
            use_toy_ranks(patch, root / f"child-{len(list(root.glob('child-*')))}")
        result = dg.materialize(
            stages,
            instance=instance,
            partition_key=as_of,
            resources={"platform": Platform(home=str(bench.home))},
            raise_on_error=False,
        )
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main())
