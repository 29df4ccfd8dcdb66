"""Programs in the documentation use public names alone."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = set(Path(__file__).with_name("public_names.txt").read_text().splitlines())
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
ABOUT_INTERNALS = {"docs/internals/protocol.md"}  # it shows the bytes on the wire, with the functions that make them
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_programs() -> None:
    assert sum(len(list(blocks(page))) for page in PAGES) > 20


@pytest.mark.parametrize("path", [*PAGES, *PROGRAMS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_is_imported_is_public(path: Path) -> None:
    programs = [path.read_text()] if path.suffix == ".py" else list(blocks(path))
    private = sorted({name for program in programs for name in imported(program)} - known())
    assert path.relative_to(ROOT).as_posix() in ABOUT_INTERNALS or private == []


def blocks(page: Path) -> Iterator[str]:
    """The Python programs of a page."""
    for text in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield textwrap.dedent(text)


def imported(program: str) -> Iterator[str]:
    """What a program imports from gradwire: dotted names."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names if _is_ours(item.name))
        elif isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            yield from (f"{node.module}.{item.name}" for item in node.names)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "gradwire"


def known() -> set[str]:
    """Public names, and the modules that have some."""
    return PUBLIC | {name.rpartition(".")[0] for name in PUBLIC}
