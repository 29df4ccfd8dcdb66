"""Ten thousand calls leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rpc.puppets import Puppet

USAGE = """
def usage():
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd")), threading.active_count()
"""

NUM_WORKER_THREADS = 16  # the default

CALLS = """
import random
def calls(number, seed):
    dice = random.Random(seed)
    pending = []
    for step in range(number):
        value = torch.full((dice.choice([1 << 8, 1 << 12, 1 << 14, 1 << 16, 1 << 18]),), float(step))
        pending.append((step, len(value), rpc.rpc_async("w1", h.echo, args=(value,))))
        if len(pending) == 16:
            for sent, size, future in pending:
                result = future.wait()
                assert len(result) == size and result[0] == sent and result[-1] == sent
            pending.clear()
    return number
"""


@pytest.mark.slow
@pytest.mark.parametrize("transports", [("unix",), ("tcp",)])
def test_ten_thousand_calls_leave_memory_and_descriptors_flat(
    workers: Callable[..., list[Puppet]], transports: tuple[str, ...]
) -> None:
    puppets = workers(2, transports=transports)
    for puppet in puppets:
        puppet.do(USAGE + CALLS)
    puppets[0].do("calls(2000, 1)", 60.0)  # pools are warm now
    before = [puppet.do("usage()") for puppet in puppets]
    assert puppets[0].do("calls(10000, 2)", 100.0) == 10000
    after = [puppet.do("usage()") for puppet in puppets]
    for (old_mib, old_files, old_threads), (new_mib, new_files, new_threads) in zip(before, after, strict=True):
        assert new_mib - old_mib < 64, (before, after)
        assert new_files <= old_files + 8, (before, after)
        assert new_threads <= max(old_threads, NUM_WORKER_THREADS) + 4, (before, after)  # so many may stay
