"""Progress bars appear only on a terminal, or in a notebook with widgets, and only if it takes long."""

from __future__ import annotations

import io
import sys

import pytest
import rich.console

from gradwire import _progress_bar
from gradwire._progress_bar import DelayedBar, count_columns


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _use_terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Not a fixture: pytest sets its own streams between the preparation of a test and the test."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def _make_bar() -> DelayedBar:
    return DelayedBar("square", lambda progress: [progress.MofNCompleteColumn()])


def test_it_shows_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    monkeypatch.setattr(_progress_bar, "_DELAY_S", 0.0)
    bar = _make_bar()
    bar.update(1, 4)
    bar.update(2, 4)
    bar.stop()
    assert "square" in terminal.getvalue()
    assert "2/4" in terminal.getvalue()


def test_it_does_not_show_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    bar = _make_bar()
    bar.update(1, None)
    bar.stop()
    assert terminal.getvalue() == ""


def test_the_elapsed_time_counts_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(_progress_bar.time, "monotonic", lambda: now[0])
    terminal = _use_terminal(monkeypatch)
    bar = DelayedBar("square", count_columns)
    now[0] = 163.0
    bar.update(1, 4)
    bar.stop()
    assert "0:01:03" in terminal.getvalue()


def test_the_current_step_is_shown_after_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    monkeypatch.setattr(_progress_bar, "_DELAY_S", 0.0)
    with _make_bar() as bar:
        bar.update(0, None, "importing torch")
        assert "square (importing torch)" in terminal.getvalue()
        terminal.truncate(0)
        bar.update(1, 4)
    assert "importing" not in terminal.getvalue()


def test_it_does_not_show_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(_progress_bar, "_DELAY_S", 0.0)
    bar = _make_bar()
    bar.update(0, 4)
    bar.update(0, 4)
    bar.stop()
    assert file.getvalue() == ""


def test_it_does_not_show_in_a_notebook_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(_progress_bar, "_DELAY_S", 0.0)
    bar = _make_bar()
    bar.update(0, 4)  # rich would warn
    bar.update(0, 4)
    bar.stop()
    assert sys.stderr.getvalue() == ""


def test_it_stops_with_its_block_and_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    monkeypatch.setattr(_progress_bar, "_DELAY_S", 0.0)
    with DelayedBar("one", count_columns) as shown, DelayedBar("two", count_columns, is_shown=False) as hidden:
        shown.update(1, 3)
        hidden.update(1, 3)
    assert "one" in terminal.getvalue()
    assert "1/3" in terminal.getvalue()
    assert "two" not in terminal.getvalue()
    assert shown._bar is not None
    assert shown._bar.finished is False
    assert not shown._bar.live.is_started
