"""What people call, and what they are told when they call it wrongly: in PyTorch's words where PyTorch has some."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd.api import ContextId
from gradwire.config import Limits
from gradwire.errors import (
    AutogradError,
    BackwardFailed,
    ConfigurationError,
    NotInitialized,
    UnknownContext,
)
from gradwire.rpc import Agent
from gradwire.types import Trust
from gradwire.wire import serialization
from unit.autograd.layers import layer


def echo(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value


# -- contexts ----------------------------------------------------------------------------------------------------------


def test_needs_a_worker() -> None:
    assert gw.autograd.is_available()
    for use in (
        lambda: gw.autograd.context().__enter__(),
        lambda: gw.autograd.get_gradients(1),
        lambda: gw.autograd.explain(1),
        lambda: gw.autograd.backward(1, [torch.ones(())]),
        gw.autograd._get_max_id,
        gw.autograd._get_debug_info,
    ):
        with pytest.raises(NotInitialized):
            use()


def test_context_is_its_id(trio: list[Agent]) -> None:
    with gw.autograd.context() as ctx:
        assert isinstance(ctx, int)
        assert ctx >> 48 == 0
        assert {int(ctx): "found"}[ctx] == "found"
        assert ctx == gw.autograd._current_context()._context_id()
        assert json.dumps(ctx) == str(int(ctx))


def test_id_travels_as_a_number(trio: list[Agent]) -> None:
    with gw.autograd.context() as ctx:
        assert rpc.rpc_sync("b", echo, args=(ctx,)) == ("int", int(ctx))
        assert type(pickle.loads(pickle.dumps(ctx))) is int
        assert rpc.rpc_sync("b", echo, args=([ctx, {"id": ctx}],)) == ("list", [int(ctx), {"id": int(ctx)}])
        assert copy.copy(ctx) == ctx


@pytest.mark.parametrize("trust", ["code", "data"])
def test_the_id_travels_without_a_pickle(trust: Trust) -> None:
    limits = Limits()
    packed = serialization.pack(((ContextId(5),), {"other": ContextId(1 << 62)}), trust, limits)
    assert packed.codec == serialization.PLAIN
    ((first,), named) = serialization.unpack(packed.codec, packed.body, [], trust, limits)
    assert (first, named) == (5, {"other": 1 << 62})
    assert type(first) is type(named["other"]) is int


def test_methods_of_the_id(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).sum()
        ctx.backward(loss, retain_graph=True)
        ctx.backward([loss], mode="fast")
        (once,) = torch.autograd.grad(layer(x).sum(), x)
        assert torch.allclose(ctx.gradients()[x], 2 * once)
        assert str(ctx.explain()).startswith(f"context {int(ctx)}:")


@pytest.mark.parametrize("context_id", [0, -1, 4711, 1 << 63, ContextId(5)])
def test_unknown_context(trio: list[Agent], context_id: int) -> None:
    x = torch.ones((), requires_grad=True)
    words = f"Could not find autograd context with id: {int(context_id)}"
    for use in (
        lambda: gw.autograd.get_gradients(context_id),
        lambda: gw.autograd.explain(context_id),
        lambda: gw.autograd.backward(context_id, [x * 2]),
        lambda: gw.autograd.grad(context_id, [x * 2], [x]),
        lambda: gw.autograd._retrieve_context(context_id),
        lambda: gw.autograd._is_valid_context(context_id),
        lambda: gw.autograd._release_context(context_id),
    ):
        with pytest.raises(UnknownContext, match=words):
            use()


def test_released_context_says_where(trio: list[Agent]) -> None:
    with gw.autograd.context() as ctx:
        pass
    words = rf"context with id: {int(ctx)}\. It was released on worker a at test_api\.py:\d+, in test_released"
    with pytest.raises(RuntimeError, match=words):
        ctx.gradients()


def test_names_that_pytorch_offers_for_looking_inside(trio: list[Agent]) -> None:
    made = gw.autograd._new_context()
    context_id = made._context_id()
    assert gw.autograd._current_context() is made
    assert gw.autograd._retrieve_context(context_id) is made
    assert isinstance(made, gw.autograd.DistAutogradContext)
    gw.autograd._is_valid_context(context_id)
    assert gw.autograd._get_debug_info() == {"num_current_backward_passes": "0", "num_autograd_contexts": "1"}
    rpc.rpc_sync("b", layer, args=(torch.ones(3, requires_grad=True),))
    assert len(made._send_functions()) == len(made._recv_functions()) == 1
    assert made._known_worker_ids() == {1}
    gw.autograd._release_context(context_id)
    with pytest.raises(UnknownContext):
        gw.autograd._is_valid_context(context_id)
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        gw.autograd._current_context()
    assert gw.autograd._get_debug_info()["num_autograd_contexts"] == "0"
    assert context_id <= gw.autograd._get_max_id() == (1 << 48) - 1


# -- roots -------------------------------------------------------------------------------------------------------------


def make_roots() -> dict[str, Any]:
    x = torch.ones(3, requires_grad=True)
    return {
        "none": ([], "No tensors provided for gradient computation"),
        "no grad": ([(x * 2).sum().detach()], "requires_grad not set on root 0"),
        "second without grad": ([(x * 2).sum(), torch.ones(())], "requires_grad not set on root 1"),
        "no scalar": ([x * 2], r"root 0 of shape \(3,\) is not a scalar, all roots need to be scalar"),
        "leaf": ([torch.ones((), requires_grad=True)], "root 0 does not have a valid gradient function"),
        "no tensor": ([3.0], "root 0 is a float, not a tensor"),
    }


@pytest.mark.parametrize("case", list(make_roots()))
@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_what_cannot_be_a_root(trio: list[Agent], case: str, mode: Any) -> None:
    roots, words = make_roots()[case]
    with gw.autograd.context() as ctx:
        with pytest.raises(RuntimeError, match=words) as caught:
            gw.autograd.backward(ctx, roots, mode=mode)
        assert type(caught.value) is AutogradError
        with pytest.raises(AutogradError, match=words):
            gw.autograd.grad(ctx, roots, torch.ones(2, requires_grad=True), mode=mode)
        assert gw.autograd._get_debug_info()["num_current_backward_passes"] == "0"


def test_a_loss_from_a_call_outside_of_the_context_says_so(trio: list[Agent]) -> None:
    loss = rpc.rpc_sync("b", torch.sum, args=(torch.ones(3, requires_grad=True),))
    with (
        gw.autograd.context() as ctx,
        pytest.raises(AutogradError, match=r"made outside this context: move the call"),
    ):
        gw.autograd.backward(ctx, loss)


def test_gradients_must_fit_the_roots(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        with pytest.raises(AutogradError, match=r"the number of gradients \(2\) is not the number of roots \(1\)"):
            ctx.backward(x * 2, gradients=[torch.ones(3), torch.ones(3)])
        with pytest.raises(AutogradError, match=r"the gradient of root 0 has shape \(2,\), not \(3,\)"):
            ctx.backward(x * 2, gradients=torch.ones(2))
        ctx.backward([x * 2, (x * 3).sum()], gradients=[torch.ones(3), None])
        assert ctx.gradients()[x].tolist() == [5.0, 5.0, 5.0]


def test_inputs_must_require_grad(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        for inputs in ([torch.ones(3)], ["x"], [x, None]):
            with pytest.raises(AutogradError, match="inputs must be tensors on this worker that require grad"):
                ctx.backward((x * 2).sum(), inputs=inputs)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "soon", None])
def test_timeout_must_be_positive(trio: list[Agent], timeout: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx, pytest.raises(ConfigurationError, match="timeout must be a positive number"):
        ctx.backward((x * 2).sum(), timeout=timeout)


def test_timeout_may_be_infinite(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        hidden = x * 2
        loss = (rpc.rpc_sync("b", layer, args=(hidden,)) + hidden).sum()
        ctx.backward(loss, timeout=float("inf"))
        assert x in ctx.gradients()


def test_mode_must_be_known(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx, pytest.raises(ConfigurationError, match='"smart" or "fast", not \'slow\''):
        ctx.backward((x * 2).sum(), mode="slow")


# -- grad --------------------------------------------------------------------------------------------------------------


def test_grad_returns_what_it_finds(trio: list[Agent]) -> None:
    x, y, unused = (torch.ones(3, requires_grad=True) for _ in range(3))
    with gw.autograd.context() as ctx:
        loss = (rpc.rpc_sync("b", layer, args=(x,)) * y).sum()
        with pytest.raises(AutogradError, match="do not depend on input 2; pass allow_unused=True"):
            gw.autograd.grad(ctx, loss, [x, y, unused], retain_graph=True)
        found = gw.autograd.grad(ctx, loss, [x, y, unused], allow_unused=True)
        expected = torch.autograd.grad((layer(x) * y).sum(), [x, y])
        assert found[2] is None
        for got, want in zip(found, expected, strict=False):
            assert got is not None
            assert torch.allclose(got, want)
        assert ctx.gradients() == {}
        assert len(found) == 3


def test_second_pass_without_retain_graph_fails_as_in_one_process(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", layer, args=(x,)).square().sum()
        ctx.backward(loss)
        with pytest.raises(BackwardFailed, match="backward through the graph a second time"):
            ctx.backward(loss)
        (once,) = torch.autograd.grad(layer(x).square().sum(), x)
        assert torch.allclose(ctx.gradients()[x], once)


def test_tensor_of_another_context_is_refused(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context():
        foreign = rpc.rpc_sync("b", layer, args=(x,))
    with gw.autograd.context() as ctx:
        own = rpc.rpc_sync("b", layer, args=(x,))
        with pytest.raises(BackwardFailed, match=r"received from another worker in context .* detach it"):
            ctx.backward((own + foreign).sum())
        ctx.backward((rpc.rpc_sync("b", layer, args=(x,)) + foreign.detach()).sum())
        assert x in ctx.gradients()
