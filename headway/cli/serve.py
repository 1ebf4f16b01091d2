"""`headway serve`: promoted versions answer over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from headway.errors import HeadwayError
from headway.home import Settings

if TYPE_CHECKING:
    from headway.catalog.registry_facts import Endpoint
    from headway.features.online.store import OnlineStore
    from headway.loading import Pipeline
    from headway.services import Services
    from headway.serving.http.keeping import LateServices
    from headway.serving.live.types import Engine

LEVELS = ("debug", "info", "warning", "error")
# A frozen database answers nothing at all; a server does not wait for it to start.
_CATALOG_S = 10.0
_STOP_S = 2.0
# Recorded events of a partition among which one to ask for is looked for.
_EVENTS = 1_000
_RECENT_HOURS = 6

T = TypeVar("T")


class NothingToServe(HeadwayError):
    """No endpoint that could be served."""


@click.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; there is no login.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 takes any free one [HEADWAY_SERVE_PORT].")
@click.option("--endpoint", "-e", "endpoints", multiple=True, help="Only these endpoints; none: all that serve.")
@click.option("--pipeline", "-p", "references", multiple=True, help="Name under pipelines/, or a folder; none: all.")
@click.option("--name", default="default", show_default=True, help="Name of this server; its log and pointers.")
@click.option("--no-sync", is_flag=True, help="Leave the online store to the online_features asset.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
@click.pass_obj
def command(
    settings: Settings,
    host: str,
    port: int | None,
    endpoints: tuple[str, ...],
    references: tuple[str, ...],
    name: str,
    no_sync: bool,
    log_level: str,
) -> None:
    """Answer requests over HTTP (Open Inference Protocol v2) with the promoted versions, until Ctrl-C.

    Promotions and rollbacks are followed without a restart. The catalog may go away meanwhile: the last signed pointer
    goes on answering, and says so. Labels come to POST /v2/labels, figures are at /metrics.

    The log is one JSON object a line on standard error.
    """
    from headway.features.online import online_store_for
    from headway.serving.http.app import create_app
    from headway.serving.http.keeping import LateServices, OnlineKeeper
    from headway.serving.http.limits import Limits
    from headway.serving.http.logs import configure
    from headway.serving.http.metrics import ServeMetrics
    from headway.serving.http.server import listen, run_server
    from headway.serving.live.engine import LiveEngine

    late = LateServices(settings, name)
    with listen(host, settings.serve_port if port is None else port) as bound:
        services = _catalog(late)
        pipelines = {p.name: p for p in _pipelines(services, references, endpoints)}
        configure(log_level)
        online = online_store_for(settings)
        if services is not None and not no_sync:
            _sync(services, list(pipelines.values()), online)
        limits = Limits()
        engine = LiveEngine(settings, pipelines, online, name=name, endpoints=endpoints or None)
        app = create_app(engine, partial(late.accept, pipelines), limits, ServeMetrics(engine))
        keeper = OnlineKeeper(settings, late, list(pipelines.values()), online_store_for(settings))
        if not no_sync:
            keeper.start()
        url = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
        try:
            run_server(app, engine, bound, limits, partial(_started, settings, engine, services, pipelines, url))
        finally:
            keeper.stop(_STOP_S)
            late.close()
    click.echo("stopped")


def _catalog(late: LateServices) -> Services | None:
    """The services, None when the catalog is away: the pointers on disk may still be served."""
    from headway.catalog.errors import CatalogUnavailable

    try:
        return _within(_CATALOG_S, late.get)
    except (CatalogUnavailable, TimeoutError) as error:
        why = error.message if isinstance(error, CatalogUnavailable) else f"no answer within {_CATALOG_S:g} s"
        click.echo(f"the catalog is away ({why}); what was served last is looked for on disk", err=True)
        return None


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Do it in a thread that is left behind when it hangs. Raises `TimeoutError`."""
    found: list[T] = []
    failed: list[HeadwayError] = []

    def run() -> None:
        try:
            found.append(work())
        except HeadwayError as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError
    return found[0]


def _pipelines(services: Services | None, references: Sequence[str], endpoints: Sequence[str]) -> list[Pipeline]:
    """The pipelines whose models are served.

    Raises:
        NothingToServe: no endpoint among those asked for has a version, or none of a pipeline that is here.
    """
    from headway.loading import load_pipeline

    named = [load_pipeline(r) for r in references]
    if services is None:
        return named or [p for p in map(load_pipeline, _tree()) if p.spec.serving is not None]
    needed = _needed(services, endpoints)
    here = set(_tree())
    known = {p.name: p for p in named} or {n: load_pipeline(n) for n in needed if n in here}
    found = [p for n, p in known.items() if n in needed]
    if not found:
        told = ", ".join(sorted(needed))
        raise NothingToServe(
            f"the endpoints serve models of {told}, and {', '.join(known) or 'no such pipeline'} is what is here",
            "name the pipeline's folder with --pipeline",
        )
    silent = [p.name for p in found if p.spec.serving is None]
    if silent and (references or endpoints or len(silent) == len(found)):
        raise NothingToServe(
            f"{', '.join(silent)} declares no `serving`: its models answer no requests",
            "serve another one; language models are judged, promoted and read with `headway models show`",
        )
    for name in silent:
        click.echo(f"{name}: its models answer no requests; left out", err=True)
    return [p for p in found if p.spec.serving is not None]


def _needed(services: Services, endpoints: Sequence[str]) -> set[str]:
    """Names of the pipelines behind the endpoints that serve a version."""
    known = {e.endpoint_id: e for e in services.catalog.endpoints(services.principal) if e.stable is not None}
    asked: list[Endpoint] = [known[e] for e in endpoints if e in known] if endpoints else list(known.values())
    if not asked:
        wanted = f"endpoint {' or '.join(endpoints)} serves" if endpoints else "no endpoint serves"
        there = f"; those that do: {', '.join(known)}" if endpoints and known else ""
        raise NothingToServe(
            f"{wanted} {'nothing' if endpoints else 'a version'} yet{there}",
            "promote one first: `headway promote MODEL` (`headway models list` shows what there is)",
        )
    found: set[str] = set()
    for endpoint in asked:
        version = services.catalog.model_version(services.principal, endpoint.model_id, int(endpoint.stable or 0))
        found.add(version.facts.pipeline)
    return found


def _tree() -> list[str]:
    from headway.loading import PIPELINES_ROOT

    return sorted(file.parent.name for file in PIPELINES_ROOT.glob("*/defs.yaml"))


def _sync(services: Services, pipelines: Sequence[Pipeline], online: OnlineStore) -> None:
    """Fill the online store first, so that the first answers are not all stale."""
    from headway.catalog.clock import utc_text
    from headway.features.online.sync import sync_online

    for pipeline in pipelines:
        click.echo(f"loading the features of {pipeline.name} known by {utc_text(services.world())} ...")
        report = sync_online(services, pipeline, online)
        left_out = {source: len(partitions) for source, partitions in report.skipped.items() if partitions}
        told = f"; left out: {left_out}" if left_out else ""
        click.echo(f"  {report.rows_written:,} rows written, {report.seconds:.1f} s{told}")


def _started(
    settings: Settings, engine: Engine, services: Services | None, pipelines: dict[str, Pipeline], url: str
) -> None:
    """Say what is served, by which clock, where, and how to ask."""
    from headway.serving.http.page import curl, not_now
    from headway.serving.live.types import NotReady
    from headway.serving.requests import is_asked_at
    from headway.world import clock_in_force

    now = engine.now()
    click.echo(clock_in_force(settings.clock_file))
    lines: list[str] = []
    for model in engine.models():
        try:
            served = engine.served(model)
        except NotReady as error:
            click.echo(f"{model}: {error.message}")
            continue
        degraded = f"  degraded: {', '.join(served.degraded)}" if served.degraded else ""
        what = f"{model} version {served.version}  epoch {served.endpoint_epoch}  {served.artifact_digest}"
        click.echo(f"{what}{degraded}")
        if is_asked_at(served.spec, now):
            lines.append(curl(url, model, _request(services, pipelines[served.spec.name], now)))
        else:
            click.echo(f"  {not_now(served.spec, now)}; `headway demo clock --to DATE` sets another time")
    click.echo(f"listening on {url} (Ctrl-C stops it)")
    for line in lines:
        click.echo(f"try:\n  {line}")


def _request(services: Services | None, pipeline: Pipeline, now: int) -> dict[str, object]:
    """The newest recorded event that can be asked for now; made-up values where none is recorded."""
    from headway.datasets.zones import HOUR_US
    from headway.replay.events import NotReplayable, events_of, partitions_between
    from headway.serving.http.page import example_body
    from headway.serving.http.v2 import request_body

    made_up = example_body(pipeline.spec, now)
    if services is None:
        return made_up
    try:
        partitions = partitions_between(pipeline.spec, now, now)
        events = [e for p in partitions for e in events_of(services, pipeline, p, _EVENTS)]
    except NotReplayable:
        return made_up
    recent = [e for e in events if now - _RECENT_HOURS * HOUR_US <= e.at <= now]
    newest = max(recent, key=lambda e: (e.at, e.caller_id), default=None)
    return made_up if newest is None else request_body(pipeline.spec, newest.request)
