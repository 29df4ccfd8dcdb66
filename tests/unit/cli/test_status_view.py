"""How people may name a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from rich.table import Table

from gradwire.cli.console import make_console, say
from gradwire.cli.status_view import find_socket

_PATHS = [Path(f"/run/gradwire/{name}.sock") for name in ("train-12", "train-123", "eval-7")]


@pytest.mark.parametrize(
    ("wanted", "found"), [("train-12", "train-12"), ("eval", "eval-7"), ("123", "train-123"), ("7", "eval-7")]
)
def test_a_cluster_is_found_by_name_beginning_or_pid(wanted: str, found: str) -> None:
    assert find_socket(wanted, _PATHS).name == f"{found}.sock"


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("train", "'train' matches train-12 and train-123; name one of them"),
        ("other", "no cluster matches 'other'; open clusters: train-12, train-123, eval-7"),
    ],
)
def test_a_name_that_fits_none_or_several_is_an_error_that_shows_them(
    wanted: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught:
        find_socket(wanted, _PATHS)
    assert caught.value.exit_code == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("text", ["train[/nope]", "a :warning: [red]"])
def test_what_is_printed_is_not_read_as_markup(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("program")
    table.add_row(text)
    make_console().print(table)
    say(text)
    assert capsys.readouterr().out.count(text) == 2


def test_without_any_cluster_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        find_socket("train", [])
    assert "you have no open clusters on this machine" in capsys.readouterr().err
