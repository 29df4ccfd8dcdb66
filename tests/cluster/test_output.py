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
    ],
)
def test_a_line_is_shown_as_a_terminal_would(printed: bytes, shown: str) -> None:
    assert LineBuffer().feed(printed) == [shown]


def test_a_line_without_end_comes_in_pieces() -> None:
    buffer = LineBuffer()
    pieces = buffer.feed(b"x" * 200_000)
    assert len(pieces) == 3
    assert sum(map(len, pieces)) + len(buffer.finish()[0]) == 200_000


def test_lines_are_kept_back_until_the_worker_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    output = WorkerOutput("worker3", 3)
    output.feed("stdout", b"early\nnot yet whole")
    output.feed("stderr", b"warning\n")
    assert capsys.readouterr() == ("", "")
    assert output.kept() == "early\nwarning"
    output.release()
    output.feed("stdout", b"")
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
        output.feed("stdout", b"hello\n")
        written.append(sys.stdout.getvalue())
    assert written == ["\x1b[36m[w]\x1b[0m hello\n", "\x1b[32m[w]\x1b[0m hello\n"]


def test_no_colour_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", _Terminal())
    output = WorkerOutput("w", 0)
    output.release()
    output.feed("stdout", b"hello\n")
    assert sys.stdout.getvalue() == "[w] hello\n"


def test_a_closed_output_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", None)
    output = WorkerOutput("w", 0)
    output.release()
    output.feed("stdout", b"hello\n")
    output.feed("stderr", b"hello\n")
    assert output.kept() == ""
