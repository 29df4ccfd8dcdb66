"""Arguments are captured when the call is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rpc import handlers

SIZES = [16, 256 << 10, 8 << 20]


def _agents(make_agents: Any, way: str) -> tuple[Any, str]:
    transports = ("unix",) if way == "self" else (way,)
    first, _second = make_agents("a", "b", transports=transports, num_worker_threads=1)
    return first, "a" if way == "self" else "b"


@pytest.mark.parametrize("way", ["unix", "tcp", "inproc", "self"])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_tensor_changed_after_the_call_arrives_unchanged(make_agents: Any, way: str, num_bytes: int) -> None:
    agent, to = _agents(make_agents, way)
    blocker = agent.submit(to, handlers.wait_gate)  # the only thread is busy, so the calls below wait over there
    values = [torch.full((num_bytes // 4,), float(number)) for number in range(3)]
    futures = []
    for value in values:
        futures.append(agent.submit(to, handlers.total, (value,)))
        value.fill_(-1.0)
    handlers.gate.set()
    assert [future.wait() for future in futures] == [number * (num_bytes // 4) for number in range(3)]
    assert blocker.wait() is True


@pytest.mark.parametrize("way", ["unix", "tcp", "self"])
def test_list_changed_after_the_call_arrives_unchanged(make_agents: Any, way: str) -> None:
    agent, to = _agents(make_agents, way)
    value: list[Any] = [1, {"x": [2]}]
    future = agent.submit(to, handlers.echo, (value,))
    value[1]["x"].append(3)
    value.append(4)
    assert future.wait() == [1, {"x": [2]}]


@pytest.mark.parametrize("way", ["unix", "tcp", "self"])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_result_is_independent_of_what_the_callee_keeps(make_agents: Any, way: str, num_bytes: int) -> None:
    agent, to = _agents(make_agents, way)
    value = torch.arange(num_bytes // 4, dtype=torch.int32)
    agent.call(to, handlers.note, (value,))
    first = agent.call(to, handlers.what_was_seen)[0]
    first.fill_(0)
    second = agent.call(to, handlers.what_was_seen)[0]
    assert torch.equal(second, value)
