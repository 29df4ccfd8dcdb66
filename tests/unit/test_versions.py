"""What workers compare before they work together."""

from __future__ import annotations

import platform

import pytest
import torch

import gradwire
from gradwire.types import Trust
from gradwire.versions import Versions, find_conflict, own_versions

HERE = Versions("3.11.9", "2.13.0+cpu", "0.1.0")


def test_this_process_s_versions() -> None:
    assert own_versions() == Versions(platform.python_version(), str(torch.__version__), gradwire.__version__)


@pytest.mark.parametrize(
    ("there", "trust", "words"),
    [
        (HERE, "code", None),
        (Versions("3.11.0", "2.13.1", "0.1.0"), "code", None),
        (Versions("3.11.9", "2.13.0.dev20260101", "0.1.0"), "code", None),
        (Versions("3.10.9", "2.12.0", "0.1.0"), "data", None),
        (
            Versions("3.11.9", "2.13.0+cpu", "0.1.1"),
            "data",
            "worker a runs gradwire 0.1.0, but worker b runs gradwire 0.1.1",
        ),
        (Versions("3.1.9", "2.13.0+cpu", "0.1.0"), "code", "Python 3.11.9, but worker b runs Python 3.1.9"),
        (Versions("3.11.9", "2.1.0", "0.1.0"), "code", "torch 2.13.0+cpu, but worker b runs torch 2.1.0"),
        (Versions("", "", "0.1.0"), "code", "but worker b runs Python "),
    ],
)
def test_conflicts_name_both_workers_and_both_versions(there: Versions, trust: Trust, words: str | None) -> None:
    found = find_conflict("a", HERE, "b", there, trust)
    assert found is None if words is None else words in (found or "")
