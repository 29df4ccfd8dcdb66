"""`make explore` prints what it does, and how to do it again; and without it every run has the same examples."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import explore
from explore import Command

TESTS = Path(explore.__file__).parent
MEANT_TO_DIFFER = {"integration/cluster/tasks.py"}  # workers that are forked must not have the same random numbers


def right(seed: int) -> Command:
    return Command(("-c", "pass"))


def wrong(seed: int) -> Command:
    return Command(("-c", f"raise SystemExit('went wrong with {seed}')"), {"SOME_SETTING": "a b"})


def endless(seed: int) -> Command:
    return Command(("-c", "import time; time.sleep(600)"))


def test_findings_are_printed_with_the_command_that_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.explore((right, wrong, endless), 4.0, 5) == 1
    text = capsys.readouterr().out
    assert "again: make explore EXPLORE_SECONDS=4 EXPLORE_SEED=5" in text
    assert "went wrong with" in text
    assert "again: SOME_SETTING='a b' .venv/bin/python -c" in text


def test_what_finds_nothing_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.explore((right,), 0.3, 5) == 0
    assert "0 with a finding" in capsys.readouterr().out


def test_round_that_is_cut_off_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.explore((endless,), 0.3, 5) == 0
    assert "0 rounds" in capsys.readouterr().out


def test_round_that_does_not_end_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explore, "_ROUND_S", 0.5)
    assert explore.explore((endless,), 3.0, 5) == 1
    assert "did not end within 0.5 s" in capsys.readouterr().out


def test_the_same_seed_makes_the_same_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    first = []
    for _ in range(2):
        explore.explore((wrong,), 0.2, 7)
        first.append([line for line in capsys.readouterr().out.splitlines() if "round 0" in line])
    assert first[0] == first[1]


@pytest.mark.parametrize("kind", explore.KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_names_files_that_exist_and_its_seed(kind: explore.Kind) -> None:
    command = kind(123)
    assert "123" in str(command)
    files = [argument for argument in command.arguments if argument.startswith("tests/")]
    assert all((TESTS.parent / file).exists() for file in files)


# -- without it ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("GRADWIRE_HYPOTHESIS" in os.environ, reason="other examples were asked for")
def test_hypothesis_has_the_same_examples_each_time() -> None:
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.derandomize
    assert hypothesis.settings.default.database is None


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def test_all_dice_have_a_seed() -> None:
    """`random.Random()` and the functions of `random` itself would be others each time."""
    found = []
    for path in sorted(set(TESTS.rglob("*.py")) - {TESTS / name for name in MEANT_TO_DIFFER}):
        for call in calls(path):
            function = call.func
            if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
                continue
            if function.value.id == "random" and not (function.attr == "Random" and call.args):
                found.append(f"{path.relative_to(TESTS)}:{call.lineno}: random.{function.attr}")
    assert found == []
