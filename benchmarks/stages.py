"""What an echo costs, stage by stage, with both sides in one thread over a socket pair.

    python benchmarks/stages.py

No thread waits, so times come back within a few percent. Each figure is the lower quartile of the best of many short blocks,
in microseconds: the machine at its quietest. It is for comparing two versions of the code, not for saying how long a call
takes; between processes there is waiting, too.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # works without an installed package, too

from gradwire.config import GIB, KIB, Limits
from gradwire.rpc.codec import Codec
from gradwire.transports.shared_memory import BorrowedSlots
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.transports.unix import UnixChannel
from gradwire.types import WorkerInfo
from gradwire.wire.messages import Call, Reply

STAGES = ("pack call", "send", "read", "load call", "pack reply", "send", "read", "load reply")
NUM_BLOCKS, NUM_CALLS = 20, 300
SIZES = {"64 B": 64, "4 KiB": 4 * KIB, "256 KiB": 256 * KIB}


class End:
    """One side of the connection."""

    def __init__(self, sock: socket.socket) -> None:
        slots = BorrowedSlots(GIB)
        self.connection = StreamConnection(
            UnixChannel(sock, slots), StreamOptions(), slots=slots, label="a socket pair"
        )
        self.connection.decoder.accept = frozenset({Call, Reply})
        self.codec = Codec("caller", "code", Limits(), [])
        self.info = WorkerInfo("peer", 0)


def time_call(driver: End, server: End, tensor: torch.Tensor) -> list[int]:
    """Nanoseconds of each stage."""
    ticks = [time.perf_counter_ns()]
    name, packed = driver.codec.pack_call(torch.neg, (tensor,), {}, "server", True)
    ticks.append(time.perf_counter_ns())
    call = Call(1, name, 60.0, packed.codec, len(packed.body))
    driver.connection.send(call, packed.body, packed.tensors)
    ticks.append(time.perf_counter_ns())
    frame = server.connection.receive(time.monotonic() + 10.0)
    ticks.append(time.perf_counter_ns())
    _function, args, _kwargs = server.codec.load_call(frame, frame.message, server.info)
    ticks.append(time.perf_counter_ns())
    packed = server.codec.pack(args[0], "driver", True)
    ticks.append(time.perf_counter_ns())
    server.connection.send(Reply(1, packed.codec, len(packed.body)), packed.body, packed.tensors)
    ticks.append(time.perf_counter_ns())
    frame = driver.connection.receive(time.monotonic() + 10.0)
    ticks.append(time.perf_counter_ns())
    result = driver.codec.load(frame, frame.message, driver.info, name)
    ticks.append(time.perf_counter_ns())
    assert result.shape == tensor.shape
    return [after - before for before, after in itertools.pairwise(ticks)]


def lower_quartiles(driver: End, server: End, tensor: torch.Tensor) -> list[float]:
    """Microseconds of each stage in one block."""
    rounds = [time_call(driver, server, tensor) for _ in range(NUM_CALLS)]
    return [sorted(times)[NUM_CALLS // 4] / 1000 for times in zip(*rounds, strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    driver, server = map(End, socket.socketpair())
    print("us".ljust(9), "total", *STAGES, sep="  ")
    for name, num_bytes in SIZES.items():
        tensor = torch.zeros(num_bytes // 4)
        best = min((lower_quartiles(driver, server, tensor) for _ in range(NUM_BLOCKS)), key=sum)
        cells = [f"{value:{len(stage)}.1f}" for stage, value in zip(STAGES, best, strict=True)]
        print(name.ljust(9), f"{sum(best):5.1f}", *cells, sep="  ")


if __name__ == "__main__":
    main()
