"""Ranks of the tests of trainer.parallel: each calls one of `parallel_cases.CASES`."""

from pathlib import Path
from typing import Any

from trainer.forked import Warm


class Forks:
    """The warmed parent of those ranks."""

    def __init__(self) -> None:
        self._parent = Warm(["support.parallel_cases"], [Path(__file__).parents[1]])

    def run(self, case: str, world: int, **options: object) -> list[Any]:
        """What `CASES[case](rank, world, options)` returned on each rank."""
        arguments = {"case": case, "options": options}
        return self._parent.call(
            "trainer.forked:run_ranks", function="support.forked_small:rank", world=world, arguments=arguments
        )

    def close(self) -> None:
        self._parent.close()


def rank(group: Any, case: str, options: dict[str, Any]) -> object:  # noqa: ANN401 - torch is not imported here
    from support.parallel_cases import CASES

    return CASES[case](group.rank, group.world_size, options)
