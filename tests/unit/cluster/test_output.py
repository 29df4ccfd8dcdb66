"""What workers print becomes whole lines with a name in front."""

from __future__ import annotations

import io
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.cluster._output import LineBuffer, WorkerOutput


@given(
    text=st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])),
    cuts=st.lists(st.integers(0, 200)),
)
def test_lines_do_not_depend_on_how_they_arrive(text: str, cuts: list[int]) -> None:
    data = f"{text}\nsecond {text}\nrest".encode()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    buffer = LineBuffer()
    lines = [line for start, end in itertools.pairwise(edges) for line in buffer.feed(data[start:end])]
    assert [*lines, *buffer.finish()] == [text, f"second {text}", "rest"]
    assert buffer.finish() == []


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"0%\r50%\r100%\n", "100%"),
        (b"windows\r\n", "windows"),
        (b"\xff\xfe bytes\n", "�� bytes"),
        (b"\n", ""),
        (b"\r 50%\x1b[K\r100% \x1b[32mdone\x1b[0m\x1b[K\n", "100% \x1b[32mdone\x1b[0m"),
        (b"\r 50%\r     \rnext\n", "next"),
    ],
)
def test_a_line_is_shown_as_a_terminal_would(printed: bytes, shown: str) -> None:
    assert LineBuffer().feed(printed) == [shown]


def test_the_state_of_a_line_that_rewrites_itself() -> None:
    buffer = LineBuffer()
    for printed, lines, state in (
        (b"\r 10%", [], " 10%"),
        (b"\r 20", [], " 20"),
        (b"%", [], " 20%"),
        (b"\rall done\r", [], "all done"),
        (b"\n", ["all done"], ""),
        (b"50%\r60%\r", [], "60%"),
        (b"          \r", [], ""),
        (b"plain", [], "plain"),
        (b" text\nmore", ["plain text"], ""),
        (b"\router 1\n\rinner 1\x1b[A\n\rinner 2\x1b[A", ["outer 1"], "inner 2"),
        (b"\n\rinner 3\x1b[A\n", [], "inner 3"),
        (b"\router 2\n", ["outer 2"], ""),
    ):
        assert (buffer.feed(printed), buffer.progress) == (lines, state), printed
    buffer.feed(b"\r" + b"x" * 1000)
    for _ in range(1000):
        assert buffer.feed(b"\r" + b"x" * 1000) == [], "what was rewritten costs no memory"
    buffer.feed(b"\r   \r")
    assert buffer.finish() == []


def test_progress_is_shown_in_good_time(capsys: pytest.CaptureFixture[str]) -> None:
    output = WorkerOutput("w", 0)
    output.feed("stderr", b"\r  0%", 0.0)
    assert output.refresh_at is None, "a worker that is not ready shows nothing"
    output.release()
    output.feed("stderr", b"\r  1%", 10.0)
    output.feed("stdout", b"a line\n", 10.2)
    assert output.refresh_at == 11.0
    output.feed("stderr", b"\r  2%", 10.9)
    output.refresh(10.9)
    assert capsys.readouterr() == ("[w] a line\n", "")
    output.refresh(11.0)
    assert capsys.readouterr() == ("", "[w]   2%\n")
    assert output.refresh_at is None, "there is nothing new"
    shown_at = []
    for tenth in range(110, 900):
        output.feed("stderr", b"\r%5.1f%%" % (tenth / 10), tenth / 10)
        if (at := output.refresh_at) is not None and at <= tenth / 10:
            output.refresh(tenth / 10)
            shown_at.append(tenth // 10)
    assert shown_at == [13, 17, 25, 35, 45, 55, 65, 75, 85]
    assert len(capsys.readouterr().err.splitlines()) == len(shown_at)
    output.feed("stderr", b"\r 100%\n", 90.0)
    assert capsys.readouterr().err == "[w]  100%\n"
    assert output.refresh_at is None


def test_a_state_that_was_shown_is_not_shown_again_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    output = WorkerOutput("w", 0)
    output.release()
    output.feed("stdout", b"\r100%", 0.0)
    output.refresh(1.0)
    output.feed("stdout", b"\nnext\n", 2.0)
    assert capsys.readouterr().out == "[w] 100%\n[w] next\n"


def test_a_line_without_end_comes_in_pieces() -> None:
    buffer = LineBuffer()
    pieces = buffer.feed(b"x" * 200_000)
    assert len(pieces) == 3
    assert sum(map(len, pieces)) + len(buffer.finish()[0]) == 200_000


def test_lines_are_kept_back_until_the_worker_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    output = WorkerOutput("worker3", 3)
    output.feed("stdout", b"early\nnot yet whole", 0.0)
    output.feed("stderr", b"warning\n", 0.0)
    assert capsys.readouterr() == ("", "")
    assert output.kept() == "early\nwarning"
    output.release()
    output.feed("stdout", b"", 0.0)
    assert capsys.readouterr() == ("[worker3] early\n[worker3] not yet whole\n", "[worker3] warning\n")
    assert output.kept() == ""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_have_a_colour_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = []
    for rank in (0, 1):
        monkeypatch.setattr(sys, "stdout", _Terminal())
        output = WorkerOutput("w", rank)
        output.release()
        output.feed("stdout", b"hello\n", 0.0)
        written.append(sys.stdout.getvalue())
    assert written == ["\x1b[36m[w]\x1b[0m hello\n", "\x1b[32m[w]\x1b[0m hello\n"]


def test_no_colour_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", _Terminal())
    output = WorkerOutput("w", 0)
    output.release()
    output.feed("stdout", b"hello\n", 0.0)
    assert sys.stdout.getvalue() == "[w] hello\n"


def test_a_closed_output_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", None)
    output = WorkerOutput("w", 0)
    output.release()
    output.feed("stdout", b"hello\n", 0.0)
    output.feed("stderr", b"hello\n", 0.0)
    assert output.kept() == ""
