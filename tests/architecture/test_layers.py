"""Layers, sizes and docstrings: what a reviewer should not have to look for."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire

SOURCE = Path(gradwire.__file__).parent
PROJECT = SOURCE.parent.parent
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 900

by_name = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))


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


@by_name
def test_every_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} has no docstring"
    assert docstring.splitlines()[0].strip()


@by_name
def test_no_module_is_too_long(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES


@by_name
def test_threads_have_names_and_locks_say_what_they_guard(path: Path) -> None:
    unnamed = [line for line in _calls(path, "Thread") if "name=" not in line]
    assert unnamed == []
    locks = re.findall(r"(?m)^(?:\w+|\s+self\.\w+) = threading\.(?:R?Lock|Condition)\(.*$", path.read_text())
    assert [line.strip() for line in locks if "#" not in line] == []


def _calls(path: Path, name: str) -> list[str]:
    """The text of every call of ``threading.<name>``."""
    text = path.read_text()
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
    found = {str(path.relative_to(SOURCE)) for path in MODULES if pattern.search(path.read_text())}
    assert found <= allowed
