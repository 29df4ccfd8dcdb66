"""What is measured, in which round sizes, and the bars to pass."""

from __future__ import annotations

import contextlib
import functools
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from peers import memory_bytes, noop

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: What ``--only`` matches.
        operation: ``noop``, ``echo``, ``async`` or ``rref``.
        num_bytes: Size of the tensor that is echoed.
        num_calls: Timed calls in a round; a fifth of them more (and 3 at least) come before it untimed.
        torch: The peer that is the measure.
        gradwire: The peer that is measured.
        beside: A third peer: the floor, or the same with TLS.
        bar: torch's time divided by gradwire's must be at least this.
        floor_bar: gradwire's time divided by the floor's must be at most this.
    """

    name: str
    operation: str
    num_bytes: int
    num_calls: int
    torch: str
    gradwire: str
    beside: str | None
    bar: int
    floor_bar: int | None = None

    @property
    def roles(self) -> dict[str, str]:
        return {role: name for role in ("torch", "gradwire", "beside") if (name := getattr(self, role))}

    @property
    def peers(self) -> list[str]:
        return list(self.roles.values())


LOCAL, TCP = ("TorchRpc", "Gradwire"), ("TorchRpcTcp", "GradwireTcp")

CASES = [
    Case("no-op", "noop", 0, 300, *LOCAL, "Floor", 4, floor_bar=3),
    Case("64 B", "echo", 64, 300, *LOCAL, "Floor", 4),
    Case("4 KiB", "echo", 4 << 10, 300, *LOCAL, "Floor", 4),
    Case("256 KiB", "echo", 256 << 10, 200, *LOCAL, "BulkFloor", 4),
    Case("4 MiB", "echo", 4 * MIB, 60, *LOCAL, "BulkFloor", 2),
    Case("64 MiB", "echo", 64 * MIB, 5, *LOCAL, "BulkFloor", 4),
    Case("async no-ops", "async", 0, 2000, *LOCAL, None, 4),
    Case("RRef create + fetch", "rref", 64, 200, *LOCAL, None, 4),
    Case("tcp no-op", "noop", 0, 300, *TCP, "GradwireTls", 3),
    Case("tcp 64 B", "echo", 64, 300, *TCP, "GradwireTls", 3),
    Case("tcp 4 KiB", "echo", 4 << 10, 300, *TCP, "GradwireTls", 3),
    Case("tcp 64 MiB", "echo", 64 * MIB, 5, *TCP, "GradwireTls", 1),
]


def _call_of(peer: Any, operation: str, tensor: torch.Tensor) -> Callable[[], Any]:
    if operation == "echo":
        return functools.partial(peer.echo, tensor)
    return peer.create_and_fetch if operation == "rref" else peer.noop


def time_round(peer: Any, case: Case, round_no: int) -> float:
    """Seconds per call in one short burst (the median call; for ``async`` the mean)."""
    if case.operation == "async":
        peer.async_noops(case.num_calls // 5)
        start = time.perf_counter()
        peer.async_noops(case.num_calls)
        return (time.perf_counter() - start) / case.num_calls
    tensor = torch.arange(case.num_bytes // 4, dtype=torch.int32).add_(round_no)  # new values: no round sees old bytes
    call = _call_of(peer, case.operation, tensor)
    num_warm = max(3, case.num_calls // 5)
    times = []
    for _ in range(num_warm + case.num_calls):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    if case.operation == "echo" and (result.data_ptr() == tensor.data_ptr() or not torch.equal(result, tensor)):
        raise AssertionError(f"{case.name}: the echo is not what was sent")
    if case.operation == "rref" and not torch.equal(result, torch.ones(16)):
        raise AssertionError(f"{case.name}: not the value that was made")
    return median(times[num_warm:])


def reference_memory(peer: Any, num_references: int) -> dict[str, int]:
    """Bytes that so many live references add to the process that has them and to the owner's."""

    def make(number: int) -> list[Any]:
        made = [peer.rpc.remote("server", noop) for _ in range(number)]
        for item in made:
            item.to_here()
        return made

    make(num_references // 10)
    before = memory_bytes()["rss"], peer.call(memory_bytes)["rss"]
    kept = make(num_references)
    after = memory_bytes()["rss"], peer.call(memory_bytes)["rss"]
    assert len(kept) == num_references
    return {"here": after[0] - before[0], "owner": after[1] - before[1]}


def echo_memory(peer: Any, num_calls: int, num_warm: int) -> dict[str, dict[str, int]]:
    """Memory of driver and server, shared memory included, after a warm-up and again after many echoes of 1 MiB."""
    tensor = torch.ones(MIB // 4)
    found = {}
    for name, num in (("first", num_warm), ("last", num_calls)):
        for _ in range(num):
            peer.echo(tensor)
        here, there = memory_bytes(), peer.call(memory_bytes)
        found[name] = {
            f"{side} {kind}": n for side, m in (("driver", here), ("server", there)) for kind, n in m.items()
        }
    return found


def idle_peers(_peer: Any, num_peers: int) -> int:
    """Bytes that so many open, unused connections add to a process which holds both ends of each."""
    from gradwire.transports.stream import StreamOptions
    from gradwire.transports.unix import UnixTransport

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        transport = UnixTransport(Path(folder), StreamOptions())
        listener = closing.enter_context(contextlib.closing(transport.listen("bench")))
        before = memory_bytes()["rss"]
        for _ in range(num_peers):
            closing.enter_context(contextlib.closing(transport.connect(listener.uri, time.monotonic() + 10)))
            accepted = listener.accept_nowait()
            if accepted is None:
                raise AssertionError("the listener did not see the connection")
            closing.enter_context(contextlib.closing(accepted))
        return memory_bytes()["rss"] - before
