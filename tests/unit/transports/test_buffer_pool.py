"""Private buffers that are used again."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from gradwire.transports.buffer_pool import BufferPool
from gradwire.transports.shared_memory import PAGE

MIB = 1 << 20
DEADLINE_S = 60.0


@contextlib.contextmanager
def eager_collector() -> Iterator[None]:
    """The collector runs at nearly every allocation, also those under the locks of the arena and the pool."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def drop_in_cycle(value: object) -> None:
    cycle = [value]
    cycle.append(cycle)


def test_buffers_are_freed_inside_calls_of_the_pool() -> None:
    pool = BufferPool(64 * MIB, smallest=PAGE)
    with eager_collector():
        for _ in range(100):
            drop_in_cycle(pool.allocate(PAGE))
    gc.collect()
    statistics = pool.statistics()
    assert (statistics.num_lent, statistics.num_idle) == (0, statistics.num_created)
    assert statistics.num_created < 20


# The pool


def test_small_buffers_are_plain() -> None:
    assert type(BufferPool(MIB).allocate(1000)) is bytearray
    assert BufferPool(MIB).allocate(0) == bytearray()


def test_a_freed_buffer_is_used_again() -> None:
    pool = BufferPool(4 * MIB)
    first = torch.frombuffer(pool.allocate(300_000), dtype=torch.uint8)
    address, view = first.data_ptr(), first[100:]
    del first
    assert pool.statistics().num_lent == 1
    del view
    assert pool.statistics().num_idle == 1
    second = torch.frombuffer(pool.allocate(400_000), dtype=torch.uint8)
    assert (second.data_ptr(), second.numel()) == (address, 400_000)


def test_buffers_in_use_are_apart() -> None:
    pool = BufferPool(4 * MIB)
    held = [torch.frombuffer(pool.allocate(MIB), dtype=torch.uint8).fill_(index) for index in range(4)]
    assert [int(each.sum()) // MIB for each in held] == [0, 1, 2, 3]


def test_the_pool_keeps_no_more_than_its_limit() -> None:
    pool = BufferPool(2 * MIB)
    held = [pool.allocate(MIB) for _ in range(5)]
    held.clear()
    statistics = pool.statistics()
    assert (statistics.num_idle, statistics.bytes_idle, statistics.num_created) == (2, 2 * MIB, 5)
    assert len(pool.allocate(8 * MIB)) == 8 * MIB  # larger than the limit: made, and not kept
    assert pool.statistics().bytes_idle <= 2 * MIB


def test_a_closed_pool_keeps_nothing() -> None:
    pool = BufferPool(8 * MIB)
    held = torch.frombuffer(pool.allocate(MIB), dtype=torch.uint8).fill_(3)
    drop_in_cycle(pool.allocate(MIB))
    gc.collect()
    pool.close()
    pool.close()
    assert int(held.sum()) == 3 * MIB
    del held
    assert pool.statistics().bytes_idle == 0


def test_memory_that_the_system_does_not_have() -> None:
    with pytest.raises(MemoryError, match="bytes"):
        BufferPool(MIB).allocate(1 << 55)


def test_the_pool_serves_many_threads() -> None:
    pool, wrong = BufferPool(4 * MIB, smallest=PAGE), []

    def work(seed: int) -> None:
        held: list[torch.Tensor] = []
        for index in range(150):
            value = (seed * 50 + index) % 256
            held.append(torch.frombuffer(pool.allocate(PAGE << (index % 3)), dtype=torch.uint8).fill_(value))
            if len(held) > 3:
                oldest, expected = held.pop(0), (value - 3) % 256
                wrong.extend([seed] if not bool((oldest == expected).all()) else [])

    threads = [threading.Thread(target=work, args=(seed,), name=f"gradwire-test-pool{seed}") for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert pool.statistics().num_lent == 0
