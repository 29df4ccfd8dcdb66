"""Shortcuts lead to workers that are connected; to others gradients take the long way, and a connection is tried."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd._backward_state import Introduction
from gradwire.autograd.engine import _Run
from gradwire.autograd.local_engine import Found
from gradwire.errors import ConnectFailed
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import engine_of, here
from unit.autograd.pipelines import call_in_turn, compare, note_letters, ways_of_gradients


def test_first_pass_takes_the_long_way_and_connects(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    _, b, c = trio
    x, letters, ways = torch.ones(3, requires_grad=True), note_letters(monkeypatch), []
    for _ in range(2):
        with gw.autograd.context() as ctx:
            ctx.backward(call_in_turn("bc", x).sum(), timeout=20)
            compare([b, c], ctx, x, 2)
        ways.append(" ".join(ways_of_gradients(letters)))
        letters.clear()
        wait_until(lambda: bool(c.peers.peer("b").lanes), 20.0, "that c has connected with b")
    assert ways == ["ac ca ab ba", "ac cb ba"]


def test_where_there_is_no_way_gradients_take_the_long_one(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    _, b, c = trio
    tried: list[Any] = []

    def refuse(*args: Any) -> None:
        tried.append(args)
        raise ConnectFailed("no route")

    monkeypatch.setattr(c.peers.peer("b"), "_connect", refuse)
    x, letters = torch.ones(3, requires_grad=True), note_letters(monkeypatch)
    for _ in range(3):
        with gw.autograd.context() as ctx:
            ctx.backward(call_in_turn("bc", x).sum(), timeout=20)
            compare([b, c], ctx, x, 2)
    wait_until(lambda: len(tried) == 1)
    assert ways_of_gradients(letters) == ["ac", "ca", "ab", "ba"] * 3


def test_answer_passed_on_beside_the_last_one(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of b has answered and is about to report when what c did not send by the shortcut has to be passed on."""
    b, runs, second = trio[1], list[_Run](), threading.Event()
    run = _Run.run

    def run_and_wait(self: _Run) -> Found:
        found = run(self)
        if self._pass.own == b.info.id:
            runs.append(self)
            if len(runs) == 1:
                assert second.wait(20)
            else:
                second.set()
        return found

    monkeypatch.setattr(_Run, "run", run_and_wait)
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", keep, args=(x,))
        ctx.backward(rpc.rpc_sync("b", add_doubled, args=(y,)).sum(), timeout=20)
        assert ctx.gradients()[x].tolist() == [2.0] * 3
        assert ctx.gradients()[y].tolist() == [1.0] * 3
    assert len(runs) == 2


KEPT: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> None:
    KEPT.append(x)


def add_doubled(y: torch.Tensor) -> torch.Tensor:
    doubled: torch.Tensor = here().call("c", torch.mul, (KEPT.pop(), 2))
    return doubled + y


def test_which_shortcuts_are_kept(trio: list[Agent]) -> None:
    a, b, c = trio
    c.call("b", torch.ones, (1,))
    home, there, away = (c.info.id, 1, 0, 1), (b.info.id, 2, 0, 1), (a.info.id, 3, 0, 1)
    offer = Introduction((), (7, 8, 9), ((7, (home, there)), (8, (there,)), (9, (there, away))))
    engine = engine_of(c)
    assert engine._trim(offer) == Introduction((), (7, 8, 9), offer.shortcuts[:2])
    engine.lost.add(b.info.id)
    assert engine._trim(offer) == Introduction((), (7, 8, 9))
    engine.lost.clear()
    wait_until(lambda: bool(c.peers.peer("a").lanes))
