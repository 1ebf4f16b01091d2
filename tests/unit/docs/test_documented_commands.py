"""Every command that the documentation shows exists, with its options; those of a cluster stand on cluster pages.

Executed are the blocks of docs/tutorial.md (tests/e2e), of docs/operate.md as far as a machine without a cluster can
(tests/unit/deploy), and through their tests the targets of the Makefile.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from dagster_dg_cli.cli import create_dg_cli
from support.markdown import blocks

from headway.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Whoever types these has a cluster; the first lines of the page say that one is needed.
CLUSTER_PAGES = ("operate.md", "kubernetes.md")
CLUSTER_TOOLS = ("kubectl", "helm", "docker")
SHELL = (".", "cp", "curl", "done", "echo", "export", "for", "hw", "hw()", "mkdir", "python", "rm", "}", "{")


def _lines(page: Path) -> Iterator[tuple[int, str]]:
    """Commands of a page as one types them: shell blocks with continued lines joined, and code within a line."""
    for block in blocks(page):
        if block.language == "sh":
            text = re.sub(r"<<'?(\w+)'?\n.*?\n\1$", "", block.text, flags=re.DOTALL | re.MULTILINE)
            open_text = ""
            for number, line in enumerate(text.replace("\\\n", "  ").splitlines()):
                open_text = f"{open_text}\n{line}" if open_text else line
                if _words(open_text) is None:  # a quotation goes on in the next line
                    continue
                if _words(open_text):
                    yield block.line + number, open_text
                open_text = ""
            assert not open_text, f"{page.name}:{block.line}: a quotation is not closed"
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`((?:headway|dg|make) [^`]+)`", prose):
        yield 0, code.replace("\n", " ")


def _words(line: str) -> list[str] | None:
    """The words of a line without its comment; None when a quotation is open at its end."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return None


def _fault(root: click.Command, words: list[str]) -> str:
    """What is wrong with a command line, without running it; empty when nothing is."""
    command, path = root, [words[0]]
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        if rest[0] == "..." or path == ["dg", "scaffold", "defs"]:  # dg makes those of components in a project only
            return ""
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            return f"`{' '.join(path)}` has no command {rest[0]!r}"
        command = found
        path.append(rest.pop(0))
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    unknown = [w for w in rest if re.match(r"--?[a-zA-Z]", w) and w.partition("=")[0] not in options]
    return f"`{' '.join(path)}` has no option {', '.join(unknown)}" if unknown else ""


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page: Path) -> None:
    dg = create_dg_cli()
    faults = []
    for line, text in _lines(page):
        words = _words(text) or text.split()
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0], flags=re.DOTALL):
            words.pop(0)
        if not words:
            continue
        name = words[0]
        fault = ""
        if name in ("headway", "hw"):
            fault = _fault(main, words)
        elif name == "dg":
            fault = _fault(dg, words)
        elif name == "make":
            named = [w for w in words[1:] if re.fullmatch(r"[a-z-]+", w)]
            fault = "; ".join(f"no target {w}" for w in named[:1] if w not in _targets())
        elif name in CLUSTER_TOOLS:
            fault = "" if page.name in CLUSTER_PAGES else "needs a cluster, and this page does not say so"
        elif line and name not in SHELL and not (page.name in CLUSTER_PAGES and text.startswith(" ")):
            fault = "is no command that a test knows"
        if fault:
            faults.append(f"{page.name}:{line or ''}: {text.strip()!r:.120}: {fault}")
    assert faults == []


@pytest.mark.parametrize("name", CLUSTER_PAGES)
def test_cluster_pages_say_so_at_once(name: str) -> None:
    head = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()[:8])
    assert re.search(r"cluster|Kubernetes", head)


def test_a_wrong_command_would_be_found() -> None:
    assert _fault(main, ["headway", "snapshot", "list"]) == "`headway` has no command 'snapshot'"
    assert _fault(main, ["headway", "snapshots", "list", "--page=2"]) == (
        "`headway snapshots list` has no option --page=2"
    )
    assert _fault(main, ["headway", "snapshots", "list", "-p", "churn"]) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []
