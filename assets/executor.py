"""Where the steps of a run execute, and how a backfill is cut into runs: here, or as pods on a cluster."""

from __future__ import annotations

import dagster as dg

from headway.home import Settings

PARTITIONS_PER_POD = 30
"""Partitions of a dataset or snapshot that one pod works through, about a month of days: starting a pod and importing
Headway costs seconds, which a handful of partitions would not repay."""


def executor_for(settings: Settings) -> dg.ExecutorDefinition | None:
    """The executor of every job of the code location; None: Dagster's own, a process for each step.

    On a cluster each step is a Job of its own (`k8s_job_executor`), owned by the pod of its run: when that pod is
    deleted, Kubernetes collects the steps that it left. Imports dagster-k8s (two seconds) on a cluster only.
    """
    if settings.profile != "cluster":
        return None
    from dagster_k8s import k8s_job_executor

    return k8s_job_executor.configured({"enable_owner_references": True}, name="k8s_steps")


def backfill_policy_for(settings: Settings) -> dg.BackfillPolicy:
    """How a backfill of datasets and snapshots is cut into runs.

    On one machine a range is one run, whose step works on all partitions; on a cluster it becomes runs of
    `PARTITIONS_PER_POD` partitions, each with pods of its own, as many at a time as the instance allows.
    """
    if settings.profile == "cluster":
        return dg.BackfillPolicy.multi_run(PARTITIONS_PER_POD)
    return dg.BackfillPolicy.single_run()
