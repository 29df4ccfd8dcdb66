"""What may be registered for a torch function."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwire.shard import ChunkShardingSpec, dispatch
from gradwire.shard.sharded_tensor import custom_sharded_op_impl
from gradwire.shard.sharding_spec import custom_sharding_spec_op


def for_all() -> Callable[..., Any]:
    return custom_sharded_op_impl(torch.cumsum)


def for_chunks() -> Callable[..., Any]:
    return custom_sharding_spec_op(ChunkShardingSpec, torch.cumsum)


@pytest.mark.parametrize("register", [for_all, for_chunks])
@pytest.mark.parametrize("wrong", [lambda types: None, lambda types, args, kwargs, process_group, more: None])
def test_a_function_that_cannot_be_called_is_refused_at_once(
    register: Callable[[], Callable[..., Any]], wrong: Callable[..., Any]
) -> None:
    with pytest.raises(TypeError, match=r"expects signature: \(types, args, kwargs, process_group\)"):
        register()(wrong)
    assert torch.cumsum not in dispatch._custom


def test_defaults_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_custom", {})

    @custom_sharded_op_impl(torch.cumsum)
    def cumsum(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> str:
        return "called"

    assert dispatch.dispatch(torch.cumsum, (), (), {}, None, None) == "called"


def test_ctrl_c_ends_an_implementation_of_the_program(deferring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_custom", {})
    went_on = []

    @custom_sharded_op_impl(torch.cumsum)
    def cumsum(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)

    with pytest.raises(KeyboardInterrupt):
        dispatch.dispatch(torch.cumsum, (), (), {}, None, None)
    assert not went_on
