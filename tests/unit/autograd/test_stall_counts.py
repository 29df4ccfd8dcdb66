"""What is decided but has not begun yet is no stall."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import worker
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import layer


def count_probes(root: Agent, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every probe of a root that is over."""
    prober = worker.of(root).engine.prober
    probe, found = prober.probe, []

    def count(*args: Any) -> Any:
        found.append(probe(*args))
        return found[-1]

    monkeypatch.setattr(prober, "probe", count)
    return found


def test_run_that_waits_for_a_thread(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = trio
    probes = count_probes(a, monkeypatch)
    engine = worker.of(b).engine
    run = engine._run

    def run_late(*args: Any) -> None:
        wait_until(lambda: len(probes) >= 4, 10.0, "that the root has asked four times")
        run(*args)

    monkeypatch.setattr(engine, "_run", run_late)
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,)).sum(), mode="fast", timeout=20)
        assert len(probes) >= 4
        assert probes[2][b.info.id].num_running == 1
        assert x in ctx.gradients()
