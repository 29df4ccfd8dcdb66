"""What is decided but has not begun yet is no stall."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd.engine import _Run
from gradwire.autograd.local_engine import Found
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import engine_of, layer


def count_probes(root: Agent, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every probe of a root that is over."""
    prober = engine_of(root).prober
    probe, found = prober.probe, []

    def count(*args: Any) -> Any:
        found.append(probe(*args))
        return found[-1]

    monkeypatch.setattr(prober, "probe", count)
    return found


def test_run_that_waits_for_a_thread(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = trio
    probes = count_probes(a, monkeypatch)
    run = _Run.run

    def run_late(self: _Run) -> Found:
        if self._pass.own == b.info.id:
            wait_until(lambda: len(probes) >= 4, 10.0, "that the root has asked four times")
        return run(self)

    monkeypatch.setattr(_Run, "run", run_late)
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,)).sum(), mode="fast", timeout=20)
        assert len(probes) >= 4
        assert probes[2][b.info.id].num_running == 1
        assert x in ctx.gradients()
