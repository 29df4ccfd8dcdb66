"""What a called function raises is printed on its worker while compat is installed, and only then."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from gradwire import compat
from gradwire.rpc.agent import Agent

MakeAgents = Callable[..., list[Agent]]


def fail() -> None:
    raise ValueError("on purpose")


def test_failures_are_printed_between_install_and_uninstall(
    make_agents: MakeAgents, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("gradwire.failures")
    before = logger.level, logger.propagate, list(logger.handlers)
    first, second = make_agents(2)
    compat.install()
    compat.install()
    try:
        with pytest.raises(ValueError, match="on purpose"):
            first.call(second.info.name, fail)
    finally:
        compat.uninstall()
        compat.uninstall()
    printed = capsys.readouterr().err
    assert f"on worker {second.info.name}" in printed
    assert "ValueError: on purpose" in printed
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    with pytest.raises(ValueError, match="on purpose"):
        first.call(second.info.name, fail)
    assert "on purpose" not in capsys.readouterr().err
