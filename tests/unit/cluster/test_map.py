"""The progress bar of `Cluster.map` appears only on a terminal, and only if it takes long."""

from __future__ import annotations

import io
import sys

import pytest
import rich.console

from gradwire.cluster import map as map_module
from gradwire.cluster.map import DelayedProgress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _use_terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Not a fixture: pytest sets its own streams between the preparation of a test and the test."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def test_it_shows_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    monkeypatch.setattr(map_module, "_PROGRESS_DELAY_S", 0.0)
    with DelayedProgress("square", 4) as progress:
        progress.advance()
        progress.refresh()
        progress.advance()
        progress.refresh()
    assert "square" in terminal.getvalue()
    assert "2/4" in terminal.getvalue()


def test_it_does_not_show_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    with DelayedProgress("square", None) as progress:
        progress.advance()
        progress.refresh()
    assert terminal.getvalue() == ""


def test_it_does_not_show_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(map_module, "_PROGRESS_DELAY_S", 0.0)
    with DelayedProgress("square", 4) as progress:
        progress.refresh()
        progress.refresh()
    assert file.getvalue() == ""


def test_it_does_not_show_in_a_notebook_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(map_module, "_PROGRESS_DELAY_S", 0.0)
    with DelayedProgress("square", 4) as progress:
        progress.refresh()  # rich would warn
        progress.refresh()
    assert sys.stderr.getvalue() == ""
