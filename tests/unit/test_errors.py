"""Errors carry a link to their section of the documentation, apart from their message."""

from __future__ import annotations

import copy
import pickle
import sys
import traceback
from pathlib import Path

import pytest

from gradwire.errors import DOCS_URL, ConfigurationError, GradwireError, UnknownWorker, WorkerLost

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
LINK = f"{DOCS_URL}errors.html#workerlost"


def test_message_is_the_message_alone() -> None:
    error = WorkerLost("worker a is lost", "a")
    traceback.format_exception(error)
    assert (str(error), error.args) == ("worker a is lost", ("worker a is lost",))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks show notes from Python 3.11 on")
def test_traceback_ends_with_the_link() -> None:
    printed = traceback.format_exception(WorkerLost("worker a is lost", "a"))
    assert printed[-1] == f"See {LINK}\n"


def test_error_that_is_not_printed_pays_nothing() -> None:
    assert vars(UnknownWorker("no worker b")) == {}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="add_note is there from Python 3.11 on")
def test_notes_of_the_program_come_after_it() -> None:
    error = WorkerLost("worker a is lost", "a")
    error.add_note("while training")
    assert error.__notes__ == [f"See {LINK}", "while training"]
    assert WorkerLost("another", "a").__notes__ == [f"See {LINK}"]


def test_copies_have_it_once() -> None:
    error = UnknownWorker("no worker b")
    traceback.format_exception(error)
    for copied in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert copied.__notes__ == [f"See {DOCS_URL}errors.html#unknownworker"]


def test_class_of_a_program_points_to_its_base() -> None:
    class TooBusy(WorkerLost):
        pass

    assert TooBusy("worker a is lost").docs_url == LINK


def test_url_is_that_of_the_project() -> None:
    urls = [line for line in PROJECT.read_text().splitlines() if line.startswith("Documentation = ")]
    assert urls in ([], [f'Documentation = "{DOCS_URL}"'])
    assert ConfigurationError("x").docs_url.startswith(DOCS_URL)
    assert GradwireError("x").docs_url == f"{DOCS_URL}errors.html#gradwireerror"
