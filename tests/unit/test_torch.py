"""The private names of torch in `gradwire._torch` are what gradwire relies on: a test for each, which fails by its name."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from gradwire import _torch

# -- used by optim ---------------------------------------------------------------------------------------------------------


def test_set_grad_enabled() -> None:
    _torch.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        _torch.set_grad_enabled(True)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("when", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_hooks_of_optimizers_are_in_tables_of_these_names(when: str) -> None:
    """`DistributedOptimizer` inherits the tables, and calls what is in them."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)

    def hook(*_: Any) -> None: ...

    getattr(optimizer, f"register_{when}_hook")(hook)
    assert list(getattr(optimizer, f"_optimizer_{when}_hooks").values()) == [hook]


def test_profile_hook_step_runs_the_hooks_around_a_step() -> None:
    seen = []

    class Optimizer(torch.optim.SGD):
        def _step(self) -> None:
            seen.append("step")

        _step_watched = torch.optim.Optimizer.profile_hook_step(_step)

    optimizer = Optimizer([torch.ones(1)], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer._step_watched()
    assert seen == ["before", "step", "after"]


# -- used by nn ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("forward_pre", "_forward_pre_hooks"),
        ("forward", "_forward_hooks"),
        ("full_backward_pre", "_backward_pre_hooks"),
        ("full_backward", "_backward_hooks"),
    ],
)
def test_hooks_of_modules_are_in_tables_of_these_names(kind: str, table: str) -> None:
    module = torch.nn.ReLU()
    getattr(module, f"register_{kind}_hook")(lambda *_: None)
    assert len(getattr(module, table)) == 1


# -- used by compat --------------------------------------------------------------------------------------------------------


def test_wait_for() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(3)
    assert _torch.wait_for(future) == 3


def test_call_when_done() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    seen: list[Any] = []
    _torch.call_when_done(future, lambda done: seen.append(_torch.wait_for(done)))
    future.set_result(3)
    _torch.call_when_done(future, lambda done: seen.append(_torch.wait_for(done)))
    assert seen == [3, 3]


def test_is_profiler_enabled() -> None:
    assert not _torch.is_profiler_enabled()
    with torch.autograd.profiler_legacy.profile():
        assert _torch.is_profiler_enabled()


def test_find_builtin() -> None:
    assert _torch.find_builtin(torch.add) == "aten::add"
    assert _torch.find_builtin(test_find_builtin) is None


def test_qualified_name() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.warns(DeprecationWarning, match="torch.jit"):
        script = torch.jit.script(double)
    assert _torch.qualified_name(script).startswith("__torch__.")
    assert _torch.qualified_name(script).endswith("double")


def test_end_event_with() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    with torch.autograd.profiler_legacy.profile() as profile:
        event = torch.autograd.profiler.record_function("event")
        event.__enter__()
        ended = _torch.end_event_with(event, future)
        assert not ended.done()
        future.set_result(3)
        assert ended.wait() == 3
    assert "event" in [item.name for item in profile.function_events]


def test_node_class() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    result = Double.apply(torch.ones(1, requires_grad=True))  # type: ignore[no-untyped-call]
    assert type(result.grad_fn) is _torch.node_class(Double)
    assert result.grad_fn.name() == _torch.node_class(Double).__name__


def test_distributed_rpc() -> None:
    found = _torch.distributed_rpc()
    assert isinstance(found, types.ModuleType)
    assert found._is_current_rpc_agent_set() is False
    assert callable(found._set_profiler_node_id)
