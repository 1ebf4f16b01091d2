"""docs/kubernetes.md says what the code says: reasons with what follows, and every field of the profile."""

import re
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from headway.training.kubernetes.platform import Platform
from headway.training.reasons import ENDED, WAITING

PAGE = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The table's rows below a heading, its head left out."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_reasons_of_an_end_are_the_table() -> None:
    expected = [[f"`{r.code}`", r.words, r.retry] for r in ENDED.values()]
    assert rows("Why an attempt ended, and what follows") == expected, "\n" + "\n".join(
        "| " + " | ".join(row) + " |" for row in expected
    )


def test_the_reasons_to_wait_are_the_table() -> None:
    expected = [[f"`{code}`", words] for code, words in WAITING.items()]
    assert rows("Why an attempt does not run yet") == expected, "\n" + "\n".join(
        "| " + " | ".join(row) + " |" for row in expected
    )


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every field with its default; a part's own fields follow it."""
    for name, info in model.model_fields.items():
        yield prefix + name, "required" if info.is_required() else info.get_default(call_default_factory=True)
        kinds = (info.annotation, *typing.get_args(info.annotation))
        for part in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)):
            many = "[]" if typing.get_origin(info.annotation) is tuple else ""
            yield from fields(part, f"{prefix}{name}{many}.")


def shown(default: object) -> str:
    if isinstance(default, BaseModel):
        return ""
    if default == "required":
        return "required"
    if default is None or default in ((), {}):
        return "none"
    if default == "":
        return "empty"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def test_every_field_of_the_profile_is_on_the_page_with_its_default() -> None:
    listed = [(row[0].strip("`"), row[1]) for row in rows("The platform profile")]
    assert listed == [(name, shown(default)) for name, default in fields(Platform)]


def test_every_file_and_command_that_is_named_exists() -> None:
    from headway.cli.main import COMMANDS

    root = Path(__file__).parents[3]
    for link in re.findall(r"\]\(([a-z.]+\.md)\)", PAGE):
        assert (root / "docs" / link).exists(), link
    for name in re.findall(r"headway ([a-z]+) ", PAGE):
        assert name in COMMANDS, name
