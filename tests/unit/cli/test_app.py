"""The commands, beside their documentation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import gradwire
import gradwire_command
from gradwire.cli.app import app

_PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "command-line.md").read_text()


def commands(group: Any, path: str = "gradwire") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_the_documentation_has_every_command_and_no_other() -> None:
    table = re.findall(r"^\| \[`(gradwire [a-z ]+)`\]\(#([a-z-]+)\)", _PAGE, re.MULTILINE)
    assert [name for name, _ in table] == list(COMMANDS)
    headings = {line[3:].replace(" ", "-") for line in _PAGE.splitlines() if line.startswith("## ")}
    assert {anchor for _, anchor in table} == headings


def test_options_in_the_documentation_exist() -> None:
    known = {option for command in COMMANDS.values() for param in command.params for option in param.opts}
    known |= {option for command in COMMANDS.values() for param in command.params for option in param.secondary_opts}
    known |= {"--help", "--version", "--install-completion"}
    known |= {"--epochs"}  # of the program that is run
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", _PAGE)) <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_what_it_does(name: str) -> None:
    done = CliRunner().invoke(app, [*name.split()[1:], "--help"])
    assert done.exit_code == 0
    assert name in done.output
    assert len((COMMANDS[name].help or "").split("\n")[0]) > 20


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if "Example" in (command.help or "")])
def test_examples_in_the_help_name_the_command(name: str) -> None:
    lines = re.findall(r"^  (gradwire .*)$", COMMANDS[name].help, re.MULTILINE)
    assert lines
    assert all(line.startswith(name) for line in lines)


def test_the_version_is_the_package_s() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"gradwire {gradwire.__version__}\n")


def test_wrong_usage_is_two() -> None:
    assert CliRunner().invoke(app, ["keys", "init"]).exit_code == 2
    assert CliRunner().invoke(app, ["status", "--nonsense"]).exit_code == 2


def test_ctrl_c_before_the_command_has_begun_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradwire.cli.main", press)
    monkeypatch.setitem(sys.modules, "gradwire_command", gradwire_command)
    with pytest.raises(SystemExit) as caught:
        gradwire_command.main()
    assert caught.value.code == 130
