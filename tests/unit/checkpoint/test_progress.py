"""The progress of saves and loads is shown on terminals only, and lets Ctrl-C in."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from gradwire import _interrupts, _progress_bar
from gradwire.checkpoint.progress import ByteProgress, WatchedFiles


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _use_terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Not a fixture: pytest sets its own streams between the preparation of a test and the test."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


@pytest.mark.parametrize(("option", "delay_s"), [(True, 60.0), (None, 0.0)])
def test_it_shows_on_a_terminal(monkeypatch: pytest.MonkeyPatch, option: bool | None, delay_s: float) -> None:
    terminal = _use_terminal(monkeypatch)
    monkeypatch.setattr(_progress_bar, "_DELAY_S", delay_s)
    with ByteProgress("saving", option) as progress:
        progress.total = 4 << 20
        progress.advance(2 << 20)
        progress.advance(2 << 20)
    assert "saving" in terminal.getvalue()
    assert "4.2/4.2 MB" in terminal.getvalue() or "4.0/4.0 MiB" in terminal.getvalue()


@pytest.mark.parametrize("option", [False, None, lambda *_: None])
def test_it_does_not_show_at_once_or_when_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, option: bool | None
) -> None:
    terminal = _use_terminal(monkeypatch)
    with ByteProgress("saving", option) as progress:
        progress.total = 1
        progress.advance(1)
    assert terminal.getvalue() == ""


def test_the_end_is_told_once_and_never_more_than_all() -> None:
    told: list[tuple[int, int]] = []
    with ByteProgress("saving", lambda *now: told.append(now)) as progress:
        progress.total = 10
        progress.advance(4)
        progress.advance(9)
    assert told[0] == (4, 10)
    assert told[-1] == (10, 10)
    assert len(told) == len(set(told))


def test_nothing_is_told_after_a_failure() -> None:
    told: list[tuple[int, int]] = []
    progress = ByteProgress("saving", lambda *now: told.append(now))
    progress.total = 10
    with pytest.raises(KeyError), progress:
        raise KeyError("oops")
    assert told == []


def test_files_are_watched_by_their_size(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    watched = WatchedFiles([first, second])
    assert watched.num_new() == 0
    first.write_bytes(b"abc")
    assert watched.num_new() == 3
    second.write_bytes(b"de")
    first.write_bytes(b"")  # removed and begun again: what was counted stays counted
    assert watched.num_new() == 2


def test_a_deferred_interrupt_is_raised_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interrupts, "_deferred_since", time.monotonic())
    progress = ByteProgress("saving", False)
    with pytest.raises(KeyboardInterrupt):
        progress.advance(3)
    assert progress.num_bytes == 3
    progress.advance(3)
