"""What accelerators cost programs that have none."""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import gradwire as gw
from gradwire.cluster.api import Cluster
from gradwire.rpc import set_current_agent
from gradwire.testing import local_agents

_SOURCE = Path(gw.__file__).parent


def _train() -> None:
    for size in (1, 100_000, 100_000):
        x = torch.ones(size).requires_grad_()
        with gw.autograd.context() as ctx:
            for to in ("worker0", "worker1"):
                ctx.backward(gw.rpc.rpc_sync(to, torch.mul, args=(x, 2)).sum())
            assert torch.equal(ctx.gradients()[x], torch.full((size,), 4.0))


def _has_imported_it() -> Any:
    return "gradwire.wire.device_copies" in sys.modules


def test_programs_on_the_cpu_never_import_what_copies_to_devices() -> None:
    with Cluster.local(2) as cluster:
        cluster.workers[0].call(_train)
        assert [worker.call(_has_imported_it) for worker in cluster.workers] == [False, False]


def test_no_code_waits_for_a_whole_device_or_stream() -> None:
    found = [
        f"{path.relative_to(_SOURCE)}:{node.lineno}"
        for path in _SOURCE.rglob("*.py")
        if "synchronize" in (text := path.read_text())  # most need not be parsed
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "synchronize"
    ]
    assert found == []


_ON_THE_WAY = ("wire/tensors.py", "wire/devices.py", "rpc/codec.py")  # of tensors; what others enter depends on threads


def _count_calls(device_maps: dict[str, dict[str, str]]) -> dict[str, int]:
    """Return how often functions that see tensors are entered in a few steps, in all threads of two workers."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(_ON_THE_WAY):
            found[frame.f_code.co_name] += 1

    threading.setprofile(count)  # for threads that start from now on
    try:
        with local_agents(2, device_maps=device_maps) as (a, _):
            set_current_agent(a)
            _step()
            found.clear()
            sys.setprofile(count)
            for _ in range(5):
                _step()
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        set_current_agent(None)
    return dict(found)


def _step() -> None:
    x = torch.ones(3).requires_grad_()
    with gw.autograd.context() as ctx:
        ctx.backward(gw.rpc.rpc_sync("b", torch.mul, args=(x, 2)).sum())
        assert torch.equal(ctx.gradients()[x], torch.full((3,), 2.0))


def test_device_maps_cost_tensors_of_the_cpu_no_call_of_a_function() -> None:
    without = _count_calls({})
    assert without["describe"] >= 4 * 5
    assert "place" not in without
    assert _count_calls({name: {"cuda:0": "cuda:1"} for name in "ab"}) == without
