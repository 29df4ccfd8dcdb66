"""The documentation: public names in programs and in the reference, links, and the stored output of examples."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.test_examples import LAST_LINES

ROOT = Path(__file__).parents[2]
PUBLIC = set(Path(__file__).with_name("public_names.txt").read_text().splitlines())
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
ABOUT_INTERNALS = {"docs/internals/protocol.md"}  # it shows the bytes on the wire, with the functions that make them
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = sorted([*EXAMPLES, *(ROOT / "docs" / "tutorial").glob("*.py")])
REFERENCE = ROOT / "docs" / "reference"
DECISIONS = ROOT / "docs" / "internals" / "adr"
STORED = ROOT / "docs" / "examples" / "output"
LINKED = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md")])


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


def documented() -> Counter[str]:
    """How often the reference has a name: in a directive, or in the table of second names."""
    found: Counter[str] = Counter()
    for page in REFERENCE.glob("*.rst"):
        text = page.read_text()
        found.update(re.findall(r"^\.\. (?:auto\w+|py:\w+):: ([\w.]+)", text, re.MULTILINE))
        if page.stem == "second-names":
            found.update(re.findall(r"^``([\w.]+)``", text, re.MULTILINE))
    return found


def test_every_public_name_is_in_the_reference_once() -> None:
    """Names with an underscore are there for programs written for PyTorch, and are not shown."""
    wanted = {name for name in PUBLIC if not is_private(name)}
    found = documented()
    assert sorted(wanted - set(found)) == [], "add them to a page in docs/reference"
    assert sorted(name for name, times in found.items() if times > 1) == []


def test_nothing_else_is_in_the_reference() -> None:
    more = set(documented()) - known()
    assert [name for name in more if name.rpartition(".")[0] not in PUBLIC] == []
    assert [name for name in documented() if is_private(name)] == []
    assert not any("private-members" in page.read_text() for page in REFERENCE.glob("*.rst"))


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("page", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target, anchor in links(page):
        place = (page.parent / target).resolve() if target else page
        is_known = place.exists() and (not anchor or place.suffix != ".md" or anchor in anchors(place))
        dead += [] if is_known else [f"{target}#{anchor}"]
    assert dead == []


def links(page: Path) -> Iterator[tuple[str, str]]:
    """The relative links of a page, pictures included: path and anchor. Sphinx checks those of cards."""
    text = without_code(page.read_text())
    for found in re.findall(r"""\]\(([^()\s]+)\)|(?:src|href|srcset)="([^"]+)""", text):
        target, _, anchor = "".join(found).partition("#")
        if ":" not in target:
            yield target, anchor


@functools.cache
def anchors(page: Path) -> set[str]:
    """What can follow `#` in a link to a page: its headings as GitHub and MyST spell them, and explicit targets."""
    text = without_code(page.read_text(), inline=False)
    found: Counter[str] = Counter()
    names = set(re.findall(r"^\(([\w.-]+)\)=$", text, re.MULTILINE))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names


def without_code(text: str, inline: bool = True) -> str:
    text = re.sub(
        r"^( *)(```+|~~~+)(?!\{(?:grid|card|tab|note|tip|warning|admonition))[^\n]*\n.*?^\1\2$",
        "",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    return re.sub(r"`[^`\n]+`", "code", text) if inline else text


def test_index_of_decisions_lists_every_one_in_order() -> None:
    """Number, title and file. Sphinx numbers a list anew where a number is missing."""
    listed = re.findall(r"^(\d+)\. \[(.+)\]\(([^()]+)\)$", (DECISIONS / "index.md").read_text(), re.MULTILINE)
    there = []
    for page in sorted(DECISIONS.glob("0*.md")):
        number, title = re.findall(r"\A# (\d+)\. (.+)$", page.read_text(), re.MULTILINE)[0]
        assert page.name.startswith(f"{int(number):04}-")
        there.append((number, title, page.name))
    assert listed == there
    assert [int(number) for number, _, _ in there] == list(range(1, len(there) + 1))


@pytest.mark.parametrize("program", EXAMPLES, ids=lambda path: path.name)
def test_stored_output_ends_as_the_example_promises(program: Path) -> None:
    """After a change of an example: ``make docs-examples EXAMPLES=<its name>``."""
    command, *lines = (STORED / f"{program.stem}.txt").read_text().splitlines()
    assert f"examples/{program.name}" in command
    assert command.removeprefix("$ ") in program.read_text()
    assert re.fullmatch(LAST_LINES[program.name], lines[-1])
    assert str(ROOT) not in "".join(lines)
