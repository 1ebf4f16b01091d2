"""A process that serves the double under uvicorn with tight limits; a request whose flight is 1 takes a while."""

import asyncio
import sys
from typing import Any

from support.http_engine import DoubleEngine, accept_all

from headway.serving.http.app import create_app
from headway.serving.http.limits import Limits
from headway.serving.http.logs import configure
from headway.serving.http.metrics import ServeMetrics
from headway.serving.http.server import listen, run_server

LIMITS = Limits(header_s=1.0, body_s=1.0, connections=20, drain_s=20.0)
SLOW_SECONDS = 1.5


class SlowEngine(DoubleEngine):
    async def infer(self, served: Any, requests: Any, **more: Any) -> Any:  # noqa: ANN401
        if requests.column("flight").to_pylist() == [1]:
            await asyncio.sleep(SLOW_SECONDS)
        return await super().infer(served, requests, **more)

    async def stop(self, drain_s: float) -> None:
        await super().stop(drain_s)
        await asyncio.sleep(0.5)


def main() -> None:
    configure("info")
    engine = SlowEngine()
    bound = listen("127.0.0.1", 0)
    app = create_app(engine, accept_all, LIMITS, ServeMetrics(engine))
    run_server(app, engine, bound, LIMITS, lambda: print(f"listening on http://127.0.0.1:{bound.getsockname()[1]}"))
    print("stopped")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main()
