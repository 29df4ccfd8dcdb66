"""Three workers in one process; the test acts as the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gradwire.rpc import Agent, set_current_agent


@pytest.fixture
def trio(make_agents: Callable[..., list[Agent]]) -> Iterator[list[Agent]]:
    """Workers ``a``, ``b`` and ``c``; what a test calls of `gradwire.autograd` and `gradwire.rpc`, it does as ``a``."""
    agents = make_agents(3)
    set_current_agent(agents[0])
    yield agents
    set_current_agent(None)
