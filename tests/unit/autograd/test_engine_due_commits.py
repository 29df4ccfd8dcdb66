"""Commits that no worker waits for are told with what is sent next, and in any case soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import engine as engine_module
from gradwire.errors import RpcTimeout
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import context_of, num_contexts, through, weight

NEVER_S = 600.0


@pytest.fixture
def sent(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Notices: the sender, the receiver and the name of each."""
    noted: list[tuple[str, str, str]] = []

    def note(agent: Agent, send: Callable[..., None]) -> Callable[..., None]:
        def send_noted(to: str, name: str, *args: Any) -> None:
            noted.append((agent.info.name, to, name))
            send(to, name, *args)

        return send_noted

    for agent in trio:
        monkeypatch.setattr(agent.notices, "send", note(agent, agent.notices.send))
    return noted


def run_pass(ctx: Any, way: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    ctx.backward(rpc.rpc_sync("b", through, args=(x, way)).sum(), timeout=20)


def commits(sent: list[tuple[str, str, str]]) -> list[str]:
    return [to for _, to, name in sent if name == "autograd.commit"]


def test_the_end_of_a_context_tells_of_the_commit(
    trio: list[Agent], sent: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And workers that wait for it then ask no other worker about the pass."""
    monkeypatch.setattr(engine_module, "_OWE_S", NEVER_S)
    with gw.autograd.context() as ctx:
        run_pass(ctx, ["c"])
        assert context_of(trio[2], ctx).has_undecided_pass
    rpc.rpc_sync("c", len, args=((),))
    wait_until(lambda: not num_contexts(trio), 20.0, "that the context has ended everywhere")
    assert {name for _, _, name in sent} <= {"autograd.propagate", "autograd.report", "autograd.release"}


def test_a_wait_for_a_commit_that_times_out_names_the_rank(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_OWE_S", NEVER_S)
    with gw.autograd.context() as ctx:
        run_pass(ctx, ["c"])
        with pytest.raises(
            RpcTimeout, match=r"timed out after 0\.01 s waiting for rank 0, which started a backward pass"
        ):
            context_of(trio[2], ctx).wait_gradients(0.01)


def test_a_call_to_any_worker_comes_after_the_commit(
    trio: list[Agent], sent: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_OWE_S", NEVER_S)
    with gw.autograd.context() as ctx:
        run_pass(ctx, [])
        assert commits(sent) == []
        with torch.no_grad():  # whether or not the call is recorded
            rpc.rpc_sync("c", len, args=((),))
        assert commits(sent) == ["b"]
        assert weight in context_of(trio[1], ctx).wait_gradients(20.0)


def test_the_next_pass_begins_after_the_commit(
    trio: list[Agent], sent: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_OWE_S", NEVER_S)
    with gw.autograd.context() as ctx:
        x = torch.ones(3, requires_grad=True)
        loss = rpc.rpc_sync("b", through, args=(x, [])).sum()
        ctx.backward(loss, retain_graph=True, timeout=20)
        ctx.backward(loss, timeout=20)
        names = [name.removeprefix("autograd.") for sender, _, name in sent if sender == "a"]
        assert names == ["propagate", "commit", "propagate"]
        rpc.rpc_sync("b", len, args=((),))
        wait_until(lambda: len(context_of(trio[1], ctx).ended_passes) == 2, 10.0, "the second commit")


def test_the_clock_tells_of_a_commit_when_nothing_else_does(
    trio: list[Agent], sent: list[tuple[str, str, str]]
) -> None:
    with gw.autograd.context() as ctx:
        run_pass(ctx, ["c"])
        assert all(context_of(agent, ctx).wait_gradients(20.0) for agent in trio)
        assert sorted(commits(sent)) == ["b", "c"]


def test_a_worker_that_leaves_tells_of_its_commits(
    trio: list[Agent], sent: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_OWE_S", NEVER_S)
    with gw.autograd.context() as ctx:
        run_pass(ctx, [])
        assert commits(sent) == []
        trio[0].close()
        assert commits(sent) == ["b"]
