"""The current context follows the user's code, wherever that goes."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import current_context as ambient
from gradwire.autograd.current_context import current_context_id
from gradwire.errors import NoActiveContext, UnknownContext
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import context_of, engine_of, here, layer


def in_thread(function: Callable[[], Any], *, start_now: bool = True) -> threading.Thread:
    thread = threading.Thread(target=function, name="user-thread")
    if start_now:
        thread.start()
        thread.join(10)
    return thread


def context_here() -> int:
    """As a remote function: the context it runs in."""
    return current_context_id()


def context_in_a_thread() -> int:
    """As a remote function: the context of a thread that it starts."""
    seen: list[int] = []
    in_thread(lambda: seen.append(current_context_id()))
    return seen[0]


@rpc.functions.async_execution
def context_of_a_callback(name: str) -> Any:
    """As a remote function: the context of a callback, when an answer has come from a third worker."""
    return here().submit(name, context_here).then(lambda done: (done.wait(), current_context_id()))


@rpc.functions.async_execution
def layer_elsewhere(name: str, x: torch.Tensor) -> Any:
    return here().submit(name, layer, (x,)).then(lambda done: done.wait() * 2)


# -- in this process -------------------------------------------------------------------------------------------------


def test_none_outside(trio: list[Agent]) -> None:
    assert current_context_id() == 0
    with pytest.raises(NoActiveContext, match="Current thread doesn't have a valid autograd context"):
        gw.autograd._current_context()


def test_contexts_nest(trio: list[Agent]) -> None:
    with gw.autograd.context() as outer:
        assert current_context_id() == outer
        with gw.autograd.context() as inner:
            assert current_context_id() == inner != outer
            assert gw.autograd._current_context()._context_id() == inner
        assert current_context_id() == outer
        with pytest.raises(UnknownContext):
            gw.autograd._is_valid_context(inner)
        gw.autograd._is_valid_context(outer)
    assert current_context_id() == 0


def test_calls_belong_to_the_innermost_context(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as outer:
        first = rpc.rpc_sync("b", layer, args=(x,))
        with gw.autograd.context() as inner:
            second = rpc.rpc_sync("b", layer, args=(x * 2,))
            assert len(context_of(trio[0], inner).sends) == 1
            inner.backward(second.sum())
            of_inner = inner.gradients()[x]
        outer.backward(first.sum())
        of_outer = outer.gradients()[x]
        assert len(context_of(trio[0], outer).sends) == 1
    assert not torch.equal(of_inner, of_outer)


def test_context_ends_also_when_the_block_raises(trio: list[Agent]) -> None:
    with pytest.raises(KeyError), gw.autograd.context() as ctx:
        raise KeyError("on purpose")
    assert current_context_id() == 0
    with pytest.raises(UnknownContext, match="released on worker a"):
        gw.autograd.get_gradients(ctx)


def test_context_that_is_left_in_another_thread(trio: list[Agent]) -> None:
    """As a generator that is closed by the garbage collector may do; nothing is said of where it was before."""
    context = gw.autograd.context()
    entered: list[int] = []
    in_thread(lambda: entered.append(context.__enter__()))
    context.__exit__()
    assert current_context_id() == 0
    with pytest.raises(UnknownContext):
        gw.autograd._is_valid_context(entered[0])


# -- threads -----------------------------------------------------------------------------------------------------------


def test_thread_started_inside_runs_in_the_context(trio: list[Agent]) -> None:
    seen: list[int] = []
    with gw.autograd.context() as ctx:
        thread = in_thread(lambda: seen.append(current_context_id()), start_now=False)
        thread.start()
        thread.join(10)
        assert seen == [ctx]


def test_thread_started_outside_does_not(trio: list[Agent]) -> None:
    seen: list[int] = []
    go = threading.Event()
    thread = in_thread(lambda: seen.append(go.wait(10) and current_context_id()), start_now=False)
    thread.start()
    with gw.autograd.context():
        go.set()
        thread.join(10)
        in_thread_made_inside = threading.Thread(target=lambda: seen.append(current_context_id()), name="user-thread")
    in_thread_made_inside.start()
    in_thread_made_inside.join(10)
    assert seen == [0, 0]


def test_thread_leaves_the_context_of_its_starter_alone(trio: list[Agent]) -> None:
    def enter_another() -> None:
        gw.autograd.context().__enter__()

    with gw.autograd.context() as ctx:
        in_thread(enter_another)
        assert current_context_id() == ctx
    for context in list(contexts_on(trio[0])):
        gw.autograd._release_context(context)


def contexts_on(agent: Agent) -> list[int]:
    return [context.context_id for context in engine_of(agent).container]


def test_threads_of_the_users_own_kind_and_timers(trio: list[Agent]) -> None:
    seen: list[tuple[str, int]] = []

    class OwnThread(threading.Thread):
        def run(self) -> None:
            seen.append((self.name, current_context_id()))

    with gw.autograd.context() as ctx:
        threads = [OwnThread(name="own"), threading.Timer(0, lambda: seen.append(("timer", current_context_id())))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert sorted(seen) == [("own", ctx), ("timer", ctx)]
    assert all(not thread.is_alive() for thread in threads)


def test_calls_of_threads_are_recorded(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    parts: dict[str, torch.Tensor] = {}

    def call(name: str) -> None:
        parts[name] = rpc.rpc_sync(name, layer, args=(x,))

    with gw.autograd.context() as ctx:
        threads = [threading.Thread(target=call, args=(name,), name=f"calls-{name}") for name in ("b", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        ctx.backward((parts["b"] + parts["c"]).sum())
        found = ctx.gradients()[x]
    (expected,) = torch.autograd.grad((2 * layer(x)).sum(), x)
    assert torch.allclose(found, expected)


def test_pool_started_inside(trio: list[Agent]) -> None:
    with gw.autograd.context() as ctx, ThreadPoolExecutor(2) as pool:
        assert [future.result(10) for future in [pool.submit(current_context_id) for _ in range(4)]] == [ctx] * 4


def test_pool_started_before_can_be_told(trio: list[Agent]) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_context_id).result(10) == 0
        with gw.autograd.context() as ctx:
            assert pool.submit(current_context_id).result(10) == 0
            assert pool.submit(contextvars.copy_context().run, current_context_id).result(10) == ctx
        assert pool.submit(current_context_id).result(10) == 0


def test_thread_that_outlives_the_context_records_nothing(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    go = threading.Event()
    results: list[torch.Tensor] = []

    def call_late() -> None:
        assert go.wait(10)
        results.append(rpc.rpc_sync("b", layer, args=(x,)))

    with gw.autograd.context():
        thread = in_thread(call_late, start_now=False)
        thread.start()
    go.set()
    thread.join(10)
    assert results[0].is_leaf
    assert not contexts_on(trio[1])


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_asyncio_tasks_have_contexts_of_their_own(trio: list[Agent]) -> None:
    async def work(barrier: asyncio.Event, number: int) -> bool:
        with gw.autograd.context() as ctx:
            if number == 1:
                barrier.set()
            await asyncio.wait_for(barrier.wait(), 10)
            return current_context_id() == ctx

    async def main() -> tuple[list[bool], int]:
        barrier = asyncio.Event()
        with gw.autograd.context() as outer:
            done = await asyncio.gather(work(barrier, 0), work(barrier, 1))
            inherited = await asyncio.create_task(asyncio.to_thread(current_context_id))
            assert inherited == outer
            return list(done), current_context_id() - outer

    assert asyncio.run(main()) == ([True, True], 0)
    assert current_context_id() == 0


# -- callbacks of futures ------------------------------------------------------------------------------------------------


def test_callbacks_run_in_the_context_in_which_they_were_added(trio: list[Agent]) -> None:
    seen: list[int] = []
    with gw.autograd.context() as ctx:
        future = rpc.rpc_async("b", layer, args=(torch.ones(3),))
        chained = future.then(lambda done: current_context_id())
        future.add_done_callback(lambda done: seen.append(current_context_id()))
        assert chained.wait() == ctx
        wait_until(lambda: seen)
        assert seen == [ctx]
        assert chained.then(lambda done: (done.wait(), current_context_id())).wait() == (ctx, ctx)


def test_callback_added_outside_stays_outside(trio: list[Agent]) -> None:
    with gw.autograd.context():
        future = rpc.rpc_async("b", layer, args=(torch.ones(3),))
    assert future.then(lambda done: current_context_id()).wait() == 0


def test_calls_of_callbacks_are_recorded(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        first = rpc.rpc_async("b", layer, args=(x,))
        second = first.then(lambda done: rpc.rpc_sync("c", layer, args=(done.wait(),)))
        ctx.backward(second.wait().sum())
        found = ctx.gradients()[x]
    (expected,) = torch.autograd.grad(layer(layer(x)).sum(), x)
    assert torch.allclose(found, expected)


# -- on other workers ----------------------------------------------------------------------------------------------------


def test_called_functions_run_in_the_callers_context(trio: list[Agent]) -> None:
    assert rpc.rpc_sync("b", context_here) == 0
    with gw.autograd.context() as ctx:
        assert rpc.rpc_sync("b", context_here) == ctx
        assert rpc.rpc_sync("a", context_here) == ctx  # itself
        assert rpc.rpc_sync("b", context_in_a_thread) == ctx
        assert rpc.rpc_sync("b", context_of_a_callback, args=("c",)) == (ctx, ctx)
        with torch.no_grad():
            assert rpc.rpc_sync("b", context_here) == 0  # nothing is recorded, so nothing is to be freed there
    assert rpc.rpc_sync("b", context_here) == 0


def test_async_execution_is_recorded(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        value = rpc.rpc_sync("b", layer_elsewhere, args=("c", x))
        ctx.backward(value.sum())
        found = ctx.gradients()[x]
    (expected,) = torch.autograd.grad((layer(x) * 2).sum(), x)
    assert torch.allclose(found, expected)


def test_context_of_a_function_may_nest_inside_the_callers(trio: list[Agent]) -> None:
    def nest() -> tuple[int, int, int]:
        before = current_context_id()
        token = ambient.current_context.set(4711)
        inside = current_context_id()
        ambient.leave(token)
        return before, inside, current_context_id()

    with gw.autograd.context() as ctx:
        assert rpc.rpc_sync("b", nest) == (ctx, 4711, ctx)
