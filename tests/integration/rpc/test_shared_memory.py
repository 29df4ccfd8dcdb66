"""Workers that have no room for shared memory, or no memory at all, are not lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rpc.puppets import Puppet, PuppetError

Workers = Callable[..., list[Puppet]]

LIMITS = {
    "descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
    "file size": "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))",
}


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("limited", [0, 1])
def test_a_worker_without_room_for_shared_memory_is_not_lost(workers: Workers, kind: str, limited: int) -> None:
    puppets = workers(2)
    first, second = puppets
    assert first.do("rpc.rpc_sync('w1', os.getpid)") == second.pid
    puppets[limited].do(f"import resource\n{LIMITS[kind]}")
    for number in range(3):  # the first message would bring shared memory, the next would use it
        result = f"rpc.rpc_sync('w1', torch.neg, args=(torch.full((1 << 18,), {number}.0),))"
        assert first.do(f"torch.equal({result}, torch.full((1 << 18,), -{number}.0))")
    assert first.do("rpc.rpc_sync('w1', os.getpid)") == second.pid


LITTLE_MEMORY = (
    "import resource\nin_use = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
    "resource.setrlimit(resource.RLIMIT_AS, (in_use + (40 << 20), -1))"
)


@pytest.mark.parametrize("limited", [0, 1])
def test_a_worker_without_memory_for_a_message_says_so_and_goes_on(workers: Workers, limited: int) -> None:
    puppets = workers(2)
    first, second = puppets
    assert first.do("rpc.rpc_sync('w1', os.getpid)") == second.pid
    puppets[limited].do(LITTLE_MEMORY)
    large = "torch.empty, args=(1 << 26,)" if limited == 0 else "len, args=(torch.empty(1 << 26),)"
    for _ in range(2):
        with pytest.raises(
            PuppetError, match=r"is out of memory for the (arguments|result) of .*268,435,456 bytes"
        ) as caught:
            first.do(f"rpc.rpc_sync('w1', {large})")
        assert caught.value.kind == "ResourceExhausted"
        assert first.do("rpc.rpc_sync('w1', os.getpid)") == second.pid
