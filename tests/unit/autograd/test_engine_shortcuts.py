"""What a worker only passes on: its gradient goes straight to where it came from, and is the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.errors import BackwardFailed
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.layers import context_of, layer, num_contexts
from unit.autograd.pipelines import Letter, call_in_turn, compare, expected, note_letters, ways_of_gradients


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> list[Letter]:
    return note_letters(monkeypatch)


@pytest.fixture(autouse=True)
def connected(trio: list[Agent]) -> None:
    """Shortcuts are taken to workers that are connected: here, all are."""
    for agent in trio[1:]:
        for other in trio:
            if other is not agent:
                agent.call(other.info.name, layer, (torch.ones(3),))


class AfterOffers(torch.autograd.Function):
    """Its backward lasts until all workers have the caller's offers: the gradient from here might be there first."""

    have_arrived: Callable[[], bool]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        wait_until(AfterOffers.have_arrived, 20.0, "the offers of a")
        return gradient


def layer_after_offers(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = AfterOffers.apply(layer(x))  # type: ignore[no-untyped-call]
    return result


def has_heard_from(sender: Agent, agent: Agent, ctx: int) -> bool:
    """Whether a worker has handled a message of the pass that is under way from another one."""
    passes = list(context_of(agent, ctx).passes.values())
    return any(sender.info.id in current.snapshot(agent.info.name, str).peers for current in passes)


@pytest.mark.parametrize(
    ("way", "gradients"),
    [("b", "ab ba"), ("bc", "ac cb ba"), ("bb", "ab ba"), ("bcbc", "ac cb bc cb ba"), ("bbcc", "ac cb ba")],
)
def test_gradients_go_straight_to_the_worker_before(
    trio: list[Agent], letters: list[Letter], monkeypatch: pytest.MonkeyPatch, way: str, gradients: str
) -> None:
    x = torch.ones(3, requires_grad=True)
    others = [agent for agent in trio if agent.info.name in way]
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync(way[-1], layer_after_offers, args=(call_in_turn(way[:-1], x),)).sum()

        def have_arrived() -> bool:
            return all(has_heard_from(trio[0], other, ctx) for other in others)

        monkeypatch.setattr(AfterOffers, "have_arrived", have_arrived, raising=False)
        ctx.backward(loss, timeout=40)
        compare(others, ctx, x, len(way))
    assert ways_of_gradients(letters) == gradients.split()
    wait_until(lambda: not num_contexts(trio))


def hold_first_message(agent: Agent, to: str, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Keeps back the first message of a pass to a worker until this one writes there again; returns what is kept."""
    send, held, num_held = agent.notices.send, list[Callable[[], None]](), itertools.count()

    def send_late(peer: str, name: str, *args: Any, **options: Any) -> None:
        if peer == to and name == "autograd.propagate" and next(num_held) == 0:
            held.append(partial(send, peer, name, *args, **options))
            return
        while peer == to and held:
            held.pop()()
        send(peer, name, *args, **options)

    monkeypatch.setattr(agent.notices, "send", send_late)
    return held


@pytest.mark.parametrize(("way", "gradients"), [("bcbc", "ac cb ba ac cb ba"), ("bbcc", "ac cb ba ab ba")])
def test_offer_that_comes_after_the_answer_changes_nothing(
    trio: list[Agent], letters: list[Letter], monkeypatch: pytest.MonkeyPatch, way: str, gradients: str
) -> None:
    """The gradient from c makes b join first: b answers the caller, which passes that on."""
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = call_in_turn(way, x).sum()
        held = hold_first_message(trio[0], "b", monkeypatch)
        ctx.backward(loss, timeout=20)
        compare(trio[1:], ctx, x, len(way))
    assert ways_of_gradients(letters) == gradients.split()
    assert not held
    wait_until(lambda: not num_contexts(trio))


def test_a_long_way_is_not_deep(trio: list[Agent], letters: list[Letter]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(call_in_turn("b" * 400, x).sum(), timeout=60)
        compare([trio[1]], ctx, x, 400)
    assert ways_of_gradients(letters) == ["ab", "ba"]


def test_several_tensors_of_several_messages(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)

    def loss_of(call: Callable[..., Any]) -> torch.Tensor:
        left, right = call("b", split, x)
        third = call("c", layer, x)
        joined: torch.Tensor = call("c", join, right, third, right)
        return (joined * call("b", layer, left)).sum()

    with gw.autograd.context() as ctx:
        ctx.backward(loss_of(lambda to, function, *args: rpc.rpc_sync(to, function, args=args)), timeout=20)
        found = ctx.gradients()[x]
    (wanted,) = torch.autograd.grad(loss_of(lambda _, function, *args: function(*args)), x)
    assert torch.allclose(found, wanted)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return layer(x), torch.sin(x)


def join(one: torch.Tensor, other: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
    return one * other + third


def test_gradients_of_two_leaves_share_no_memory(trio: list[Agent]) -> None:
    """On the way from one call to the one before nothing is copied by travelling."""
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        hidden = rpc.rpc_sync("b", shifted, args=(x, "one"))
        ctx.backward(rpc.rpc_sync("b", shifted, args=(hidden, "other")).sum(), timeout=20)
        table = context_of(trio[1], ctx).wait_gradients(5.0)
        table[SHIFTS["one"]].mul_(2)
        assert table[SHIFTS["other"]].tolist() == [1.0] * 3
        assert ctx.gradients()[x].tolist() == [1.0] * 3


SHIFTS = {name: torch.zeros(3, requires_grad=True) for name in ("one", "other")}


def shifted(x: torch.Tensor, name: str) -> torch.Tensor:
    return x + SHIFTS[name]


@pytest.mark.parametrize("to", "bc")
@pytest.mark.parametrize("name", ["sparse", "both", "complex"])
def test_gradients_of_all_kinds(trio: list[Agent], to: str, name: str) -> None:
    weight = WEIGHTS[name]
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync(to, use, args=(rpc.rpc_sync("b", weight_of, args=(name,)), name)), timeout=20)
        found = context_of(trio[1], ctx).wait_gradients(5.0)[weight]
    (wanted,) = torch.autograd.grad(use(weight, name), weight)
    assert found.layout is wanted.layout
    assert torch.allclose(found.to_dense(), wanted.to_dense())


WEIGHTS = {
    "sparse": torch.ones(5, 2, requires_grad=True),
    "both": torch.ones(5, 2, requires_grad=True),
    "complex": torch.ones(3, dtype=torch.cfloat, requires_grad=True),
}


def weight_of(name: str) -> torch.Tensor:
    return WEIGHTS[name]


def use(x: torch.Tensor, name: str) -> torch.Tensor:
    if name == "complex":
        return (x * (2 + 1j)).abs().sum()
    found = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), x, sparse=True).sum()
    return found if name == "sparse" else found + (x * 3).sum()


def test_passes_side_by_side(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = call_in_turn("bcbbc", x).sum()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: ctx.backward(loss, retain_graph=True, timeout=20), range(4)))
        assert torch.allclose(ctx.gradients()[x], 4 * expected(5)[0])


# -- somebody wants to see what passes -----------------------------------------------------------------------------------


def watch_by_hook(hidden: torch.Tensor, seen: list[torch.Tensor]) -> None:
    hidden.register_hook(seen.append)  # type: ignore[no-untyped-call]


def watch_by_keeping(hidden: torch.Tensor, seen: list[torch.Tensor]) -> None:
    hidden.retain_grad()


@pytest.mark.parametrize("watch", [watch_by_hook, watch_by_keeping])
def test_who_watches_after_it_was_passed_on_sees_it(
    trio: list[Agent], letters: list[Letter], watch: Callable[[torch.Tensor, list[torch.Tensor]], None]
) -> None:
    x, seen = torch.ones(3, requires_grad=True), list[torch.Tensor]()
    with gw.autograd.context() as ctx:
        hidden = call_in_turn("b", x)
        loss = call_in_turn("c", hidden).sum()
        watch(hidden, seen)
        ctx.backward(loss, timeout=20)
        compare(trio[1:], ctx, x, 2)
    local = layer(x.detach()).detach().requires_grad_()
    (wanted,) = torch.autograd.grad(layer(local).sum(), local)
    found = seen[0] if seen else hidden.grad
    assert found is not None
    assert torch.allclose(found, wanted)
    assert ways_of_gradients(letters) == ["ac", "ca", "ab", "ba"]


def test_what_is_asked_for_is_not_passed_by(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        hidden = call_in_turn("b", x)
        (found,) = gw.autograd.grad(ctx, [call_in_turn("c", hidden).sum()], [hidden])
    local = layer(x.detach()).detach().requires_grad_()
    assert torch.allclose(found, torch.autograd.grad(layer(local).sum(), local)[0])


def test_gradients_of_gradients(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        (first,) = gw.autograd.grad(ctx, [call_in_turn("bcb", x).sum()], [x], create_graph=True)
        (second,) = gw.autograd.grad(ctx, [first.square().sum()], [x])
    value = layer(layer(layer(x)))
    (wanted,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    assert torch.allclose(second, torch.autograd.grad(wanted.square().sum(), x)[0])


# -- what goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (lambda worker, message, *_: (worker, message, 1, 1), "a shortcut to tensors that message"),
        (lambda worker, message, *_: (worker, message, 0, 2), "got 2 for 1 tensors"),
        (lambda worker, message, *_: (worker, message, 0, 1 << 40), "a shortcut to tensors that message"),
        (lambda worker, message, *rest: (worker, message + 1000, *rest), "which this worker did not send to rank 0"),
        (lambda *route: route, "does not fit message"),
    ],
    ids=["number", "too many", "far too many", "message", "one more"],
)
@pytest.mark.parametrize("way", ["bc", "bb"])
def test_wrong_shortcut_fails_the_pass(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch, way: str, route: Callable[..., Any], words: str
) -> None:
    x = torch.ones(3, requires_grad=True)
    send = trio[0].notices.send

    def send_changed(to: str, name: str, note: Any, *args: Any, **options: Any) -> Any:
        if name == "autograd.propagate" and note.introduction is not None and note.introduction.shortcuts:
            ((message, routes),) = note.introduction.shortcuts
            changed = tuple(route(*item) for item in routes) * (2 if "fit" in words else 1)
            introduction = msgspec.structs.replace(note.introduction, shortcuts=((message, changed),))
            note = msgspec.structs.replace(note, introduction=introduction)
        return send(to, name, note, *args, **options)

    with gw.autograd.context() as ctx:
        loss = call_in_turn(way, x).sum()
        monkeypatch.setattr(trio[0].notices, "send", send_changed)
        with pytest.raises(BackwardFailed, match=words):
            ctx.backward(loss, timeout=20)
        assert not ctx.gradients()
    wait_until(lambda: not num_contexts(trio))
