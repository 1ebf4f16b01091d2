"""Processes that tests kill: `serve FOLDER` answers and prints each id that it answered, `ship FOLDER` ships."""

import asyncio
import json
import os
import sys
from pathlib import Path

from support.live_bench import ask, rows_to_ask, running
from support.serving_bench import opened, pipeline_of
from support.workbench import Workbench

from headway.serving import ship as shipping


async def _serve(bench: Workbench) -> None:
    rows = rows_to_ask(bench)
    async with running(bench) as engine:
        number = 0

        async def caller(first: int) -> None:
            nonlocal number
            while True:
                number += 1
                row = (first + number) % (rows.num_rows - 1)
                for answer in await ask(engine, rows.slice(row, 1 + first % 2), caller=f"{os.getpid()}-{number}"):
                    os.write(1, json.dumps({"id": answer.prediction_id}).encode() + b"\n")

        await asyncio.gather(*[caller(i) for i in range(6)])


def _ship(bench: Workbench) -> None:
    shipping.RECORDS_OF_A_SHIPMENT = 8
    pipeline = pipeline_of(bench)
    while True:
        with opened(bench) as services:
            shipping.ship(services, {pipeline.name: pipeline}.get, bench.home / "serving")


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    place = Workbench(folder, folder.parent / "home")
    if sys.argv[1] == "serve":
        asyncio.run(_serve(place))
    else:
        _ship(place)
