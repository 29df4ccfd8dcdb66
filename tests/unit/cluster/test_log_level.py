"""Who may set the log level of a worker, and what is checked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import MakeAgents
from gradwire.cluster.log_level import LOG_LEVEL, serve_log_level, tell_level
from gradwire.errors import AuthenticationFailed, DecodeError


@pytest.fixture(autouse=True)
def _unchanged_logger() -> Iterator[None]:
    logger = logging.getLogger("gradwire")
    before = logger.level, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]


def test_the_driver_sets_the_level(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3)
    serve_log_level(b, "a")
    tell_level(a, ["b", "c"], logging.INFO)
    assert logging.getLogger("gradwire").level == logging.INFO
    with pytest.raises(AuthenticationFailed, match="only a may set the log level of this worker, not c"):
        c.ask("b", LOG_LEVEL, (10,), 5.0).wait()


@pytest.mark.parametrize("level", [0, 51, "debug", None, 1.5, True])
def test_levels_are_checked(make_agents: MakeAgents, level: Any) -> None:
    a, b = make_agents(2)
    serve_log_level(b, "a")
    with pytest.raises(DecodeError):
        a.ask("b", LOG_LEVEL, (level,), 5.0).wait()
