"""`headway dagster sync`: Dagster shows again what the catalog holds, after its storage was lost.

The catalog is only read. What Dagster shows without a row in the catalog is told and left: only a person can say
whether the row or the green partition is wrong.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import dagster as dg

from assets.sync_facts import AssetFacts, Fact, pipeline_facts
from headway.errors import HeadwayError
from headway.home import Settings, load_settings, write_dagster_instance
from headway.loading import DEFS_FILE, PIPELINES_ROOT, Pipeline, load_pipeline
from headway.services import open_services

DATA_VERSION_TAG = "dagster/data_version"
SYNCED = "headway/synced"
_PAGE = 500

Kind = Literal["missing", "outdated", "missing check", "green without a row"]


@dataclass(frozen=True)
class Difference:
    """One thing in which Dagster and the catalog differ; `fact` or `check` is what would mend it, if anything."""

    kind: Kind
    key: dg.AssetKey
    partition: str
    detail: str
    fact: Fact | None = None
    check: dg.AssetCheckEvaluation | None = None

    def line(self) -> str:
        """The difference in one line."""
        where = "/".join(self.key.path) + (f" {self.partition}" if self.partition else "")
        return f"{self.kind}: {where}: {self.detail}"


@dataclass(frozen=True)
class Shown:
    """What a partition shows: the identity and the status of its newest materialization."""

    identity: str
    status: str


def differences(instance: dg.DagsterInstance, facts: AssetFacts) -> list[Difference]:
    """In what Dagster differs from the catalog for one asset; the order is that in which it is mended."""
    shown = _shown(instance, facts)
    # Dagster that shows nothing of an asset lost it, refusals and all; else a refusal may never have been a step.
    lost = not shown
    found = [d for p, fact in facts.facts.items() if (d := _difference(facts, fact, shown.get(p), lost=lost))]
    found.sort(key=lambda d: d.fact is not None and d.fact.required)
    for partition, seen in shown.items():
        if _has_no_row(facts, partition, seen):
            told = f"shows {facts.identified_by} {seen.identity or '(none)'}, which the catalog does not hold"
            found.append(Difference("green without a row", facts.key, partition, told))
    return found + list(_missing_checks(instance, facts))


def _difference(facts: AssetFacts, fact: Fact, seen: Shown | None, *, lost: bool) -> Difference | None:
    if seen is None:
        told = f"the catalog holds {facts.identified_by} {fact.identity or fact.metadata['status']}"
        return Difference("missing", facts.key, fact.partition, told, fact) if fact.required or lost else None
    if seen.identity == fact.identity or seen.identity in fact.accepted or _has_no_row(facts, fact.partition, seen):
        return None
    told = f"shows {facts.identified_by} {seen.identity or '(none)'}, in force is {fact.identity or 'a refusal'}"
    return Difference("outdated", facts.key, fact.partition, told, fact)


def _has_no_row(facts: AssetFacts, partition: str, seen: Shown) -> bool:
    fact = facts.facts.get(partition)
    if (fact is not None and seen.identity == fact.identity) or (facts.empty and seen.status == facts.empty):
        return False
    return not facts.exists(partition, seen.identity)


def _missing_checks(instance: dg.DagsterInstance, facts: AssetFacts) -> Iterator[Difference]:
    keys = [dg.AssetCheckKey(facts.key, check.check_name) for check in facts.checks]
    known = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys) if keys else {}
    for key, check in zip(keys, facts.checks, strict=True):
        if key not in known or known[key].evaluation is None:
            said = "passed" if check.passed else f"failed, {check.description}"
            yield Difference("missing check", facts.key, "", f"{check.check_name} {said}", check=check)


def _shown(instance: dg.DagsterInstance, facts: AssetFacts) -> dict[str, Shown]:
    """The newest materialization of each partition that Dagster holds as materialized."""
    wanted = instance.get_materialized_partitions(facts.key) or {""}
    shown: dict[str, Shown] = {}
    cursor: str | None = None
    while wanted - shown.keys():
        page = instance.fetch_materializations(facts.key, limit=_PAGE, cursor=cursor)
        for record in page.records:
            event = record.asset_materialization
            if event is not None and (event.partition or "") in wanted:
                metadata = event.metadata
                shown.setdefault(
                    event.partition or "",
                    Shown(*(str(metadata[n].value) if n in metadata else "" for n in (facts.identified_by, "status"))),
                )
        if not page.has_more:
            break
        cursor = page.cursor
    return shown


def mend(instance: dg.DagsterInstance, found: Sequence[Difference]) -> int:
    """Report what can be mended, materializations before checks; return how many reports were made."""
    facts = [(d.key, d.fact) for d in found if d.fact is not None]
    for key, fact in facts:
        instance.report_runless_asset_event(
            dg.AssetMaterialization(
                key,
                partition=fact.partition or None,
                description="reported from the catalog by `headway dagster sync`",
                metadata={**fact.metadata, SYNCED: True},
                tags={DATA_VERSION_TAG: fact.data_version},
            )
        )
    checks = [d.check for d in found if d.check is not None]
    for check in checks:
        instance.report_runless_asset_event(check)
    return len(facts) + len(checks)


def main() -> int:
    """Compare and, unless `--check` is given, mend. 0: nothing differs (any more); 1: something does; 2: refused."""
    parser = argparse.ArgumentParser(prog="headway dagster sync", description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--pipeline", action="append", default=[])
    arguments = parser.parse_args()
    names = arguments.pipeline or sorted(file.parent.name for file in PIPELINES_ROOT.glob(f"*/{DEFS_FILE}"))
    try:
        return sync(load_settings(), [load_pipeline(name) for name in names], check=arguments.check)
    except HeadwayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def sync(settings: Settings, pipelines: Sequence[Pipeline], *, check: bool) -> int:
    """Print the differences of Dagster's instance of `settings`, and mend them unless `check`; 1 when some are left."""
    home = write_dagster_instance(settings)
    left = mended = 0
    with open_services(settings) as services, dg.DagsterInstance.from_config(str(home)) as instance:
        for pipeline in pipelines:
            for facts in pipeline_facts(services, pipeline):
                found = differences(instance, facts)
                if not check:
                    mended += mend(instance, found)
                    found = [d for d in found if d.fact is None and d.check is None]
                left += len(found)
                for difference in found:
                    print(difference.line())
    print(f"{left} differences" if check else f"{mended} reported, {left} differences left")
    if left and not check:
        print("a green partition without a row: materialize it again, or wipe it in Dagster", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
