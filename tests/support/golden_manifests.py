"""The golden manifests: what one run spec becomes on two places, as `headway kube render` prints it.

After a change that is meant, write them anew and look at the difference before it is committed:
`PYTHONPATH=.:tests .venv/bin/python -m support.golden_manifests && git diff tests/cases/kubernetes`.
"""

import json
from pathlib import Path

from click.testing import CliRunner
from support.toy_attempts import toy_spec

from headway.cli.kube import command
from headway.home import load_settings

CASES = Path(__file__).parents[1] / "cases" / "kubernetes"
BACKENDS = ("job", "jobset", "trainjob")
PROFILES = ("small", "large")


def golden(backend: str, profile: str) -> Path:
    """The file of one case."""
    return CASES / f"{backend}_{profile}.yaml"


def rendered(backend: str, profile: str) -> str:
    """What the command prints now."""
    # Two nodes of two ranks; the same for both places.
    spec = CASES / "spec.json"
    settings = load_settings({"HEADWAY_HOME": "/headway", "HEADWAY_TENANT": "research"})
    arguments = ["render", str(spec), "--backend", backend, "--platform", str(CASES / f"profile_{profile}.yaml")]
    result = CliRunner().invoke(command, arguments, obj=settings, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


if __name__ == "__main__":
    (CASES / "spec.json").write_text(json.dumps(toy_spec(2, 2).to_json(), indent=1) + "\n")
    for some_backend in BACKENDS:
        for some_profile in PROFILES:
            golden(some_backend, some_profile).write_text(rendered(some_backend, some_profile))
