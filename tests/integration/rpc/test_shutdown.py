"""Leaving: in good order, in a hurry, and without a word."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import quick_python
from gradwire.rpc import Agent
from rpc import handlers
from rpc.fixtures import init_source
from rpc.puppets import Nursery, Puppet, PuppetError, environment, is_alive, wait_until

Workers = Callable[..., list[Puppet]]


def _folders(nursery: Nursery) -> list[str]:
    return [item for item in os.listdir(nursery.folder) if item.startswith("gradwire-")]


def test_graceful_waits_for_the_others(workers: Workers) -> None:
    first, second = workers(2)
    first.start("rpc.shutdown()")
    assert not wait_until(first.has_answered, 0.5)
    assert second.do("rpc.rpc_sync('w0', operator.add, args=(1, 2))") == 3
    second.do("rpc.shutdown()")
    first.result()
    assert first.do("rpc._is_current_rpc_agent_set()") is False


def test_graceful_waits_for_calls_under_way(workers: Workers) -> None:
    first, second = workers(2)
    first.do("f = rpc.rpc_async('w1', h.wait_gate, args=(20,))")
    second.do("assert h.entered.acquire(timeout=10)")
    first.start("rpc.shutdown(); f.wait()")
    second.start("threading.Timer(0.5, h.open_gate).start(); rpc.shutdown()")
    assert first.result() is True
    second.result()


def test_calls_made_by_calls_under_way_end_too(workers: Workers) -> None:
    first, second, third = workers(3)
    first.do("f = rpc.rpc_async('w1', h.pass_on, args=('w2', h.pass_on, 'w0', h.echo, 5))")
    for puppet in (first, second, third):
        puppet.start("rpc.shutdown()")
    for puppet in (first, second, third):
        puppet.result()
    assert first.do("f.wait()") == 5


def test_timeout_bounds_it_and_says_who_is_missing(workers: Workers) -> None:
    first, second = workers(2)
    started = time.monotonic()
    with pytest.raises(PuppetError, match="w1") as caught:
        first.do("rpc.shutdown(timeout=0.5)")
    assert caught.value.kind == "RpcTimeout"
    assert time.monotonic() - started < 15.0
    assert first.do("rpc._is_current_rpc_agent_set()") is False
    second.do("rpc.shutdown(graceful=False)")


@pytest.mark.parametrize("killed", [0, 1])
def test_dead_worker_is_named_and_not_waited_for(workers: Workers, killed: int) -> None:
    puppets = workers(3)
    for puppet in puppets:
        puppet.do("[rpc.rpc_sync(rank, operator.add, args=(1, 2)) for rank in range(3)]")
        puppet.do("import io, logging; out = io.StringIO(); logging.getLogger('gradwire').addHandler(logging.StreamHandler(out))")  # fmt: skip  # noqa: E501
    dead = puppets.pop(killed)
    dead.kill()
    started = time.monotonic()
    for puppet in puppets:
        puppet.start("rpc.shutdown()")
    for puppet in puppets:
        puppet.result()
    assert time.monotonic() - started < 15.0
    assert all(f"w{killed}" in puppet.do("out.getvalue()") for puppet in puppets)


@pytest.mark.parametrize(("waiting", "killed"), [(0, 2), (1, 2), (1, 0), (2, 0), (2, 1)])
def test_a_worker_that_restarts_while_another_one_waits_takes_part(
    workers: Workers, make_puppets: Callable[[int], list[Puppet]], meeting: str, waiting: int, killed: int
) -> None:
    puppets = workers(3)
    puppets[waiting].start("rpc.shutdown()")
    puppets[killed].kill()
    (puppets[killed],) = make_puppets(1)
    puppets[killed].do(init_source(killed, 3, meeting))
    (other,) = {0, 1, 2} - {waiting, killed}
    puppets[other].start("rpc.shutdown()")
    assert not wait_until(lambda: puppets[waiting].has_answered() or puppets[other].has_answered(), 0.5)
    puppets[killed].do("rpc.shutdown()")
    for number in (waiting, other):
        puppets[number].result()


def test_workers_that_died_without_a_connection_are_not_waited_for(workers: Workers) -> None:
    """Rank 0, which would collect, and rank 2, which rank 1 never called."""
    puppets = workers(3)
    puppets[2].kill()
    puppets[0].kill()
    puppets[1].do("rpc.shutdown()")


def test_not_graceful_leaves_at_once(workers: Workers) -> None:
    first, second = workers(2)
    second.do("f = rpc.rpc_async('w0', h.wait_gate)")
    first.do("assert h.entered.acquire(timeout=10); rpc.shutdown(graceful=False)")
    with pytest.raises(PuppetError, match="has shut down") as caught:
        second.do("f.wait()")
    assert caught.value.kind == "WorkerLost"
    with pytest.raises(PuppetError) as caught:
        second.do("rpc.rpc_sync('w0', operator.add, args=(1, 2))")
    assert caught.value.kind == "WorkerLost"


def test_twice(workers: Workers) -> None:
    first, second = workers(2)
    for puppet in (first, second):
        puppet.start("rpc.shutdown()")
    for puppet in (first, second):
        puppet.result()
        with pytest.raises(PuppetError, match="init_rpc") as caught:
            puppet.do("rpc.shutdown()")
        assert caught.value.kind == "NotInitialized"


def test_close_twice_and_from_two_threads(pair: list[Agent]) -> None:
    pair[0].close()
    pair[0].close()
    assert pair[0].wait_closed(1.0)
    assert pair[0].is_closed


def test_close_from_inside_a_call(pair: list[Agent]) -> None:
    """A worker that is told to end by a call ends."""
    pair[0].submit("b", _close_b)
    assert wait_until(lambda: pair[1].is_closed)
    assert pair[1].wait_closed(20.0)


def _close_b() -> None:
    handlers.agents["b"].close()


def test_close_with_a_function_that_never_ends(pair: list[Agent]) -> None:
    future = pair[0].submit("b", handlers.wait_gate)
    assert handlers.entered.acquire(timeout=10)
    started = time.monotonic()
    pair[1].close()
    assert time.monotonic() - started < 8.0
    with pytest.raises(ConnectionError, match="shut down"):
        future.wait()


def test_process_that_ends_without_shutdown_leaves_nothing(workers: Workers, nursery: Nursery) -> None:
    before = set(_folders(nursery))
    first, second = workers(2)
    first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))")
    first.leave()
    assert wait_until(lambda: len(set(_folders(nursery)) - before) == 1)
    with pytest.raises(PuppetError) as caught:
        second.do("rpc.rpc_sync('w0', operator.add, args=(1, 2))")
    assert caught.value.kind == "WorkerLost"
    second.leave()
    assert set(_folders(nursery)) == before


SCRIPT = """
import sys, torch
from gradwire import rpc
def scale(x):
    return x * 3
if __name__ == "__main__":
    rank = int(sys.argv[1])
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.RpcOptions(init_method=sys.argv[2]))
    if rank == 0:
        print(rpc.rpc_sync("w1", scale, args=(torch.ones(2),)).tolist(), flush=True)
    if sys.argv[3] == "shutdown":
        rpc.shutdown()
    else:
        rpc._barrier()
        raise ValueError("ends without shutdown")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["shutdown", "raise"])
def test_script_of_two_processes(tmp_path: Path, meeting: str, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tempfile.mkdtemp(prefix="gws-", dir="/tmp")
    command = [sys.executable, str(script)]
    popen = subprocess.Popen if end == "raise" else quick_python.Popen
    processes = [
        popen(
            [*command, str(rank), meeting, end],
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert outputs[0][0] == "[3.0, 3.0]\n", outputs
    assert [process.returncode for process in processes] == [0 if end == "shutdown" else 1] * 2, outputs
    assert os.listdir(folder) == []
    os.rmdir(folder)


FORK = """
import select
child = os.fork()
if child == 0:
    r, w = os.pipe()
    import gc; gc.collect()
    os.read(r, 1) if select.select([r], [], [], 30)[0] else None
    os._exit(0)
child
"""


def test_forked_child_does_not_keep_connections_open(workers: Workers) -> None:
    """The child outlives its parent; the others must notice the parent's end all the same."""
    first, second = workers(2)
    first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))")
    second.do("rpc.rpc_sync('w0', operator.add, args=(1, 2)); f = rpc.rpc_async('w0', h.wait_gate)")
    child = first.do(FORK)
    try:
        started = time.monotonic()
        first.kill()
        with pytest.raises(PuppetError) as caught:
            second.do("f.wait()")
        assert caught.value.kind == "WorkerLost"
        assert time.monotonic() - started < 10.0
        assert is_alive(child)
    finally:
        os.kill(child, 9)


def test_forked_child_is_no_worker_and_does_not_disturb(workers: Workers) -> None:
    first, _second = workers(2)
    first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))")
    source = """
r, w = os.pipe()
child = os.fork()
if child == 0:
    try:
        rpc.rpc_sync('w1', operator.add, args=(1, 2))
    except BaseException as error:
        os.write(w, type(error).__name__.encode())
    import gc
    files = [open(os.devnull) for _ in range(20)]
    gc.collect()
    try:
        [os.fstat(file.fileno()) for file in files]
    except OSError:
        os.write(w, b' lost a descriptor')
    os._exit(0)
os.close(w)
text = b''
while (piece := os.read(r, 100)):
    text += piece
os.close(r); os.waitpid(child, 0)
text
"""
    assert first.do(source) == b"NotInitialized"
    assert first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))") == 3
