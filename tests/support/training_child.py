"""Materializes `training_run` of a bench in a process of its own, which a test may kill: `python -m ... ROOT AS_OF`.

The Dagster instance is the one in DAGSTER_HOME; the run's id is fixed by the caller, so that it can be looked up.
"""

import sys
from pathlib import Path

import dagster as dg
import pytest
from support.training_bench import TrainingBench, use_toy_ranks

from assets.training_run import build_training_run
from headway.loading import load_pipeline
from resources.platform import Platform


def main() -> int:
    root, as_of = Path(sys.argv[1]), sys.argv[2]
    bench = TrainingBench(root / "shop", root / "home")
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.get() as instance:
        if (root / "toy").exists():
            use_toy_ranks(patch, root / f"child-{len(list(root.glob('child-*')))}")
        result = dg.materialize(
            [build_training_run(load_pipeline(bench.folder))],
            instance=instance,
            partition_key=as_of,
            resources={"platform": Platform(home=str(bench.home))},
            raise_on_error=False,
        )
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main())
