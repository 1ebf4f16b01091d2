"""What `headway doctor --cluster` looks at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from headway.errors import HeadwayError
from headway.findings import Finding
from headway.home import Settings


def look_at_cluster(settings: Settings, profile: Path | None, *, pod: bool, within_s: float) -> Iterator[Finding]:
    """Findings about the cluster that `profile` (else HEADWAY_PLATFORM) describes; what is refused is one, too.

    Args:
        settings: the settings in force.
        profile: file of the platform profile.
        pod: start a short pod of the training image as well.
        within_s: how long that may take.
    """
    from headway.training.kubernetes.checks import cluster_findings, try_pod
    from headway.training.kubernetes.client import ClusterClient
    from headway.training.kubernetes.platform import load_platform

    file = profile or settings.platform_file
    if file is None:
        remedy = "set HEADWAY_PLATFORM, or give --platform (docs/kubernetes.md)"
        yield Finding("profile", False, "no platform profile is named", remedy)
        return
    try:
        platform = load_platform(file)
        yield Finding("profile", True, f"{file}: namespace {platform.namespace}, image {platform.image}")
        with closing(ClusterClient(platform.context, platform.namespace)) as client:
            findings = list(cluster_findings(client, platform, settings.home))
            yield from findings
            if pod and all(finding.ok for finding in findings):
                yield from try_pod(client, platform, settings.home, within_s)
            elif pod:
                yield Finding("pod", True, "not started: what is wrong above comes first")
    except HeadwayError as error:
        yield Finding("profile", False, error.message, error.remedy)
