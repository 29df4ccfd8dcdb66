"""Whoever began a pass or made a context dies: everybody else drops the one and frees the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from autograd_faults.worlds import BOUND_S, CLEAN, go_on, wait_for_file
from gradwire.testing import wait_until
from rpc.fixtures import init_source
from rpc.puppets import Puppet, PuppetError

Workers = Callable[..., list[Puppet]]
SETUP = "import torch, gradwire as gw\nfrom autograd_faults import tasks\nx = torch.ones(3, dtype=torch.float64)"
FORWARD = (
    "ctx = gw.autograd.context().__enter__()\nx.requires_grad_()\ny = rpc.rpc_sync('w1', tasks.through, args=(x, {}))"
)


def set_up(puppets: Sequence[Puppet]) -> None:
    for puppet in puppets:
        puppet.do(SETUP)


def wait_clean(puppets: Sequence[Puppet], timeout_s: float = BOUND_S) -> None:
    for puppet in puppets:
        try:
            wait_until(lambda puppet=puppet: puppet.do("tasks.counts()") == CLEAN, timeout_s, "that all is freed")  # type: ignore[misc]
        except TimeoutError as error:
            raise AssertionError(f"{error}; still there: {puppet.do('tasks.left()')}") from error


def check_works(puppet: Puppet, way: list[str]) -> None:
    """A fresh forward and backward equals one process."""
    source = (
        "with gw.autograd.context() as fresh:\n"
        "    leaf = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)\n"
        f"    loss = rpc.rpc_sync({way[0]!r}, tasks.through, args=(leaf, {way[1:]!r})).sum()\n"
        "    fresh.backward(loss, timeout=20)\n"
        "    found = fresh.gradients()[leaf]\n"
        f"torch.allclose(found, tasks.expected({len(way)}, leaf)[0], rtol=1e-12)"
    )
    assert puppet.do(source) is True


def has_worked(puppet: Puppet, way: list[str]) -> bool:
    """As `check_works`, where a worker may still be taken for dead."""
    try:
        check_works(puppet, way)
    except PuppetError as error:
        if error.kind not in ("WorkerLost", "BackwardFailed", "UnknownContext"):
            raise
        return False
    return True


def test_root_dies_in_the_middle(workers: Workers, tmp_path: Path) -> None:
    root, second, third = workers(3)
    set_up([root, second, third])
    root.do(FORWARD.format(f"['w2'], 'holds', {str(tmp_path)!r}"))
    root.start("ctx.backward(y.sum())")
    wait_for_file(tmp_path)
    assert second.do("tasks.counts()")[:2] == third.do("tasks.counts()")[:2] == (1, 1)
    root.kill()
    wait_clean([second, third])  # also where the run of the local engine has not ended
    go_on(tmp_path)
    wait_clean([second, third])
    check_works(second, ["w2"])


@pytest.mark.parametrize("is_middle_killed", [False, True], ids=["the creator", "the creator and its only link"])
def test_creator_of_a_context_dies(workers: Workers, is_middle_killed: bool) -> None:
    """The last in the chain has never talked to it."""
    creator, second, third, fourth = workers(4)
    set_up([creator, second, third, fourth])
    creator.do(FORWARD.format("['w2', 'w3']"))
    context_id = creator.do("int(ctx)")
    assert [puppet.do("tasks.counts()")[0] for puppet in (second, third, fourth)] == [1, 1, 1]
    left = [third, fourth]
    if is_middle_killed:
        for puppet in (creator, second):
            puppet.signal(9)
    else:
        creator.kill()
        left = [second, third, fourth]
    wait_clean(left)
    where = fourth.do(f"tasks.where_released({context_id})")
    assert "which made it" in where
    with pytest.raises(PuppetError, match=r"It was released because (worker|rank)") as caught:
        fourth.do(f"gw.autograd.get_gradients({context_id})")
    assert caught.value.kind == "UnknownContext"
    check_works(third, ["w3"])


def test_creator_leaves_in_good_order(workers: Workers) -> None:
    creator, second, third = workers(3)
    set_up([creator, second, third])
    creator.do(FORWARD.format("['w2']"))
    creator.do("rpc.shutdown(graceful=False)")
    wait_clean([second, third])
    check_works(second, ["w2"])


def test_root_that_is_not_the_creator_dies(workers: Workers, tmp_path: Path) -> None:
    """The pass is dropped; the context lives on, with its creator."""
    creator, root, third = workers(3)
    set_up([creator, root, third])
    creator.do("ctx = gw.autograd.context().__enter__()\nx.requires_grad_(); None")
    creator.do("kept = rpc.rpc_sync('w2', tasks.layer, args=(x,))")
    source = "call = rpc.rpc_async('w1', tasks.run_pass, args=(int(ctx), x.detach(), ['w2'], {!r}))"
    creator.do(source.format(str(tmp_path)))
    wait_for_file(tmp_path)
    assert third.do("tasks.counts()")[:2] == (1, 1)
    root.kill()
    with pytest.raises(PuppetError) as caught:
        creator.do("call.wait()")
    assert (caught.value.kind, caught.value.fields["worker"]) == ("WorkerLost", "w1")
    wait_until(lambda: third.do("tasks.counts()")[:2] == (1, 0), BOUND_S, "that the pass is dropped")
    go_on(tmp_path)
    assert third.do("tasks.num_gradients(tasks.only_context())") == 0
    creator.do("ctx.backward(kept.sum(), timeout=20)")
    assert creator.do("torch.allclose(ctx.gradients()[x], tasks.expected(1, x)[0])") is True
    creator.do("gw.autograd._release_context(ctx)")
    wait_clean([creator, third])
    check_works(creator, ["w2"])


def test_participant_is_restarted(workers: Workers, make_puppets: Callable[[int], list[Puppet]], meeting: str) -> None:
    """The new one knows nothing of the context, and says so; it frees what it was told of."""
    first, second, third = workers(3)
    set_up([first, second, third])
    first.do(FORWARD.format("['w2']"))
    second.kill()
    (new,) = make_puppets(1)
    new.do(init_source(1, 3, meeting))
    set_up([new])
    assert first.do("rpc.rpc_sync('w1', h.pid)") == new.pid
    with pytest.raises(PuppetError) as caught:
        first.do("ctx.backward(y.sum(), timeout=20)")
    assert caught.value.kind == "BackwardFailed"
    assert caught.value.fields["worker"] == "w1"
    assert "was this worker restarted?" in caught.value.text
    assert first.do("ctx.gradients()") == {}
    check_works(first, ["w1", "w2"])
    first.do("gw.autograd._release_context(ctx)")
    wait_clean([first, new, third])
    check_works(new, ["w2", "w0"])


def test_creator_is_restarted(workers: Workers, make_puppets: Callable[[int], list[Puppet]], meeting: str) -> None:
    """Its contexts are freed, and its new ones have other ids: nobody takes one for the other."""
    first, second, third = workers(3)
    set_up([first, second, third])
    second.do("ctx = gw.autograd.context().__enter__()\nx.requires_grad_(); None")
    second.do("rpc.rpc_sync('w2', tasks.through, args=(x, ['w0'])); None")
    old_id = second.do("int(ctx)")
    second.kill()
    (new,) = make_puppets(1)
    new.do(init_source(1, 3, meeting))
    set_up([new])
    assert new.do("rpc.rpc_sync('w2', h.pid)") == third.pid
    wait_clean([first, third])
    new_id = new.do("with gw.autograd.context() as ctx: pass\nint(ctx)")
    assert new_id != old_id
    assert new_id >> 48 == old_id >> 48 == 1
    check_works(new, ["w2", "w0"])


def test_worker_that_does_not_read_a_large_gradient(workers: Workers) -> None:
    """Without shared memory, half of it is on the way when the deadline comes; the end of the context waits for nobody."""
    first, second = workers(2, transports=("tcp",))
    set_up([first, second])
    first.do("big = torch.ones(6_000_000, requires_grad=True)\nctx = gw.autograd.context().__enter__()")
    first.do("loss = rpc.rpc_sync('w1', torch.mul, args=(big, 2.0)); gradient = torch.ones(6_000_000)")
    second.signal(19)  # SIGSTOP
    started = time.monotonic()
    with pytest.raises(PuppetError) as caught:
        first.do("ctx.backward(loss, gradients=gradient, timeout=0.5)")
    assert caught.value.kind == "BackwardFailed"
    first.do("gw.autograd._release_context(ctx)")
    assert time.monotonic() - started < BOUND_S
    second.signal(18)  # SIGCONT
    wait_clean([first, second], 5.0)
    # A connection that was cut off in the middle of a message ends both ways: each takes the other for dead, for a moment.
    wait_until(lambda: has_worked(first, ["w1"]), 10.0, "that they know each other again")
    wait_clean([first, second], 5.0)
