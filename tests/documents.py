"""Programs in the documents, and what these say that they do.

A program of a document is a block marked ``python``, or a file of which parts are shown with ``{literalinclude}``. One that
is marked ``python ranks=3`` is run by ``gradwire run -n 3``, or by torchrun if it is for torch alone; one
marked ``python name.py`` is a module of the next program.

What follows a program is compared with what it does: a block marked ``output`` with all that it prints, one marked ``pytb``
with the traceback that it ends with. ``...`` in these stands for any text; in a traceback line breaks do not count. With
``output about``, numbers may differ by a tenth; with ``output unordered``, lines may be in any order. A file that is
followed by none of these is not run here.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(python|output|pytb|\{literalinclude\}) *(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^ *(`{3,}|~{3,})(.*)$")
LABELS = re.compile(  # what is in other blocks is not run
    r"(python|python ranks=\d+|python \w+\.py|output|output about|output unordered|pytb|text|console|\{(?!code)[\w-]+\}.*|)"
)
PRINTS_NOTES = sys.version_info >= (3, 11)  # where to read about an error is a note of the exception
NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Shown(NamedTuple):
    """A program in a document, and what the document says that it does."""

    name: str
    """Of its file; empty if its text is in the document."""
    text: str
    num_ranks: int = 0
    """How many processes run it; 0 if it is not started by a launcher."""
    modules: tuple[tuple[str, str], ...] = ()
    """Names and texts of the files that it imports."""
    output: str | None = None
    is_about: bool = False
    is_unordered: bool = False
    traceback: str | None = None


def shown_in(document: str) -> list[Shown]:
    """The programs of a document that are to be run, in order."""
    path = ROOT / document
    found: list[Shown] = []
    modules: list[tuple[str, str]] = []
    for kind, name, text in BLOCK.findall(path.read_text()):
        if kind == "python" and name.endswith(".py"):
            modules.append((name, text))
        elif kind == "python":
            found.append(Shown("", text, int(name.removeprefix("ranks=") or 0), tuple(modules)))
            modules = []
        elif kind == "output":
            found[-1] = found[-1]._replace(output=text, is_about=name == "about", is_unordered=name == "unordered")
        elif kind == "pytb":
            found[-1] = found[-1]._replace(
                traceback=text if PRINTS_NOTES else re.sub(r"^See https.*\n", "", text, flags=re.M)
            )
        elif name.endswith(".py") and not (found and found[-1].name == name):
            found.append(Shown(name, (path.parent / name).read_text()))
    assert not modules, f"{document} has a module that no program uses"
    num_blocks = sum(label.startswith("python") for label, _ in blocks_in(document))
    assert sum(1 + len(item.modules) for item in found if not item.name) == num_blocks, f"{document} has other blocks"
    return [item for item in found if not item.name or item.output or item.traceback]


def blocks_in(document: str) -> list[tuple[str, str]]:
    """All fenced blocks of a document: what is written behind the fence, and the text."""
    found: list[tuple[str, str]] = []
    fence, label, lines = "", "", []
    for line in (ROOT / document).read_text().splitlines(keepends=True):
        match = FENCE.match(line.rstrip("\n"))
        if not fence and match:
            (fence, label), lines = match.groups(), []
        elif fence and match and match[1].startswith(fence) and not match[2]:
            found.append((label.strip(), "".join(lines)))
            fence = ""
        elif fence:
            lines.append(line)
    assert not fence, f"a block of {document} does not end"
    return found


def python_in_other_blocks(document: str) -> list[str]:
    """Blocks that nothing runs although they are code in Python."""
    found = []
    for label, text in blocks_in(document):
        assert LABELS.fullmatch(label), f"{document} has a block marked {label!r}"
        if label in ("text", "console", ""):
            with contextlib.suppress(SyntaxError):
                nodes = list(ast.walk(ast.parse(textwrap.dedent(text))))
                plain = (ast.Expr, ast.AnnAssign)  # names, and lines such as ``RpcTimeout: text``
                has_statements = any(isinstance(node, ast.stmt) and not isinstance(node, plain) for node in nodes)
                if has_statements or any(isinstance(node, ast.Call) for node in nodes):
                    found.append(text)
    return found


def text_shown_in(document: str, word: str) -> str:
    """The block marked ``text`` that has this word in it, as one line."""
    blocks = re.findall(r"^```text\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    (found,) = (block for block in blocks if word in block)
    return " ".join(found.split())


def is_as_shown(shown: str, printed: str, is_about: bool = False, is_unordered: bool = False) -> bool:
    """Whether a program printed what a document shows, in which ``...`` stands for any text."""
    if is_unordered:
        shown, printed = ("\n".join(sorted(text.splitlines())) for text in (shown, printed))
    if is_about:
        numbers = zip(*(map(float, NUMBER.findall(text)) for text in (shown, printed)), strict=False)
        if not all(abs(one - other) <= 0.1 * one for one, other in numbers):
            return False
        shown, printed = (NUMBER.sub("0", text) for text in (shown, printed))
    return re.fullmatch(".*".join(map(re.escape, shown.split("..."))), printed, re.DOTALL) is not None
