"""Layers, sizes and docstrings: what a reviewer should not have to look for."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import gradwire

SOURCE = Path(gradwire.__file__).parent
PROJECT = SOURCE.parent.parent
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 900

TEXTS = {str(path.relative_to(SOURCE)): path.read_text() for path in MODULES}


def test_imports_only_point_down() -> None:
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Imports only point down KEPT" in run.stdout


def test_every_module_says_what_it_is() -> None:
    docstrings = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in TEXTS.items()}
    assert [name for name, docstring in docstrings.items() if not docstring.partition("\n")[0].strip()] == []


def test_no_module_is_too_long() -> None:
    num_lines = {name: len(text.splitlines()) for name, text in TEXTS.items()}
    assert {name: number for name, number in num_lines.items() if number > MAX_LINES} == {}


def test_threads_have_names() -> None:
    threads = {name: _calls(text, "Thread") for name, text in TEXTS.items() if "Thread" in text}
    assert [(name, call) for name, calls in threads.items() for call in calls if "name=" not in call] == []
    assert sum(map(len, threads.values())) > 5, "otherwise none was found"


def test_locks_say_what_they_guard() -> None:
    pattern = re.compile(r"(?m)^(?:\w+|\s+self\.\w+) = threading\.(?:R?Lock|Condition)\(.*$")
    locks = {name: pattern.findall(text) for name, text in TEXTS.items()}
    assert [(name, line.strip()) for name, lines in locks.items() for line in lines if "#" not in line] == []
    assert sum(map(len, locks.values())) > 20, "otherwise none was found"


def _calls(text: str, name: str) -> list[str]:
    """The text of every call of ``threading.<name>``."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == name]
    return [ast.get_source_segment(text, node) or "" for node in named]


def test_no_file_has_a_name_that_says_nothing() -> None:
    empty = {"utils.py", "util.py", "helpers.py", "common.py", "manager.py", "misc.py"}
    assert empty.isdisjoint(path.name.lstrip("_") for path in MODULES)


def test_types_are_shipped() -> None:
    assert (SOURCE / "py.typed").is_file()
    assert 'packages = ["src/gradwire"]' in (PROJECT / "pyproject.toml").read_text()


def test_neither_pickles_nor_evaluates_outside_the_wire() -> None:
    """Only the modules that exist for it may load code from bytes."""
    allowed = {"wire/pickling.py", "compat/__main__.py"}  # the last runs the user's own script
    pattern = re.compile(r"\b(?:cloud)?pickle\.loads?\(|\beval\(|\bexec\(|\bmarshal\.|Unpickler\(")
    found = {name for name, text in TEXTS.items() if pattern.search(text)}
    assert found <= allowed


def test_no_finalizers_of_weakref() -> None:
    """At the end of a program Python goes through all of them without a lock, and fails if a thread adds or removes one.

    Temporary directories have one, too; the tools for tests end before the program does.
    """
    pattern = re.compile(r"\bweakref\.finalize\(|\bfrom weakref import .*\bfinalize\b|\bTemporaryDirectory\(")
    found = {name for name, text in TEXTS.items() if pattern.search(text)}
    assert found == {"testing/clusters.py"}
