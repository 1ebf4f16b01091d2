"""The rules of the launcher's Role, read out of the chart's template."""

import re
from pathlib import Path
from typing import Any

import yaml

TEMPLATE = Path(__file__).parents[2] / "deploy" / "charts" / "headway" / "templates" / "rbac.yaml"


def launcher_rules() -> list[dict[str, Any]]:
    """The rules of Role `headway-launcher`, with Kueue."""
    lines = [line for line in TEMPLATE.read_text().splitlines() if not re.fullmatch(r"\s*\{\{-.*\}\}\s*", line)]
    text = re.sub(r"\{\{[^}]*\}\}", "any", "\n".join(lines))
    roles = [document for document in yaml.safe_load_all(text) if document and document["kind"] == "Role"]
    (role,) = [role for role in roles if role["metadata"]["name"] == "headway-launcher"]
    return role["rules"]
