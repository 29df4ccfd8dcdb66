"""A function is called with modules of certain names as soon as their own code has run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gradwire.compat.import_hook import ImportHook

NAME = "module_that_an_import_hook_waits_for"


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop(NAME, None)


def test_modules_are_seen_when_their_code_has_run_and_again_when_they_are_reloaded(importable: Path) -> None:
    seen: list[tuple[str, int]] = []
    hook = ImportHook((NAME,), lambda module: seen.append((module.__name__, module.value)))
    hook.install()
    try:
        module = importlib.import_module(NAME)
        importlib.reload(module)
        importlib.import_module("json.tool")
    finally:
        hook.remove()
        hook.remove()
    assert seen == [(NAME, 1), (NAME, 1)]
    assert module.__spec__ is not None
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
    importlib.reload(module)
    assert len(seen) == 2


def test_what_the_function_raises_fails_the_import(importable: Path) -> None:
    def fail(module: ModuleType) -> None:
        raise ValueError("on purpose")

    hook = ImportHook((NAME,), fail)
    hook.install()
    try:
        with pytest.raises(ValueError, match="on purpose"):
            importlib.import_module(NAME)
    finally:
        hook.remove()
    assert NAME not in sys.modules
    assert importlib.import_module(NAME).value == 1
