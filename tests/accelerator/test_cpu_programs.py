"""What accelerators cost programs that have none."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch

import gradwire as gw
from gradwire.cluster.api import Cluster

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
        if "synchronize" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "synchronize"
    ]
    assert found == []
