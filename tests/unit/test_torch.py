"""Names inside torch that gradwire relies on (`gradwire._torch`): each test fails by name when torch changes one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradwire import _torch

# -- used by wire -------------------------------------------------------------------------------------------------------


def test_is_functorch_wrapped_tensor() -> None:
    seen: list[bool] = []

    def note(row: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_functorch_wrapped_tensor(row))
        return row

    torch.vmap(note)(torch.ones(2, 2))
    assert seen == [True]
    assert not _torch.is_functorch_wrapped_tensor(torch.ones(2))


def test_is_functional_tensor() -> None:
    seen: list[bool] = []

    def note(value: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_functional_tensor(value) or _torch.is_functorch_wrapped_tensor(value))
        return value

    torch.func.functionalize(note)(torch.ones(2))
    assert seen == [True]
    assert not _torch.is_functional_tensor(torch.ones(2))


def test_neg_view() -> None:
    value = torch.ones(2)
    negative = _torch.neg_view(value)
    assert negative.is_neg()
    assert negative.tolist() == [-1.0, -1.0]
    assert negative.data_ptr() == value.data_ptr()


def test_coo_indices_and_coo_values() -> None:
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    assert not twice.is_coalesced()
    assert _torch.coo_indices(twice).tolist() == [[1, 1]]
    assert _torch.coo_values(twice).tolist() == [1.0, 2.0]


def test_privateuse1_backend_name() -> None:
    assert isinstance(_torch.privateuse1_backend_name(), str)


class Guarded(torch.Tensor):
    text = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("not to be called")


def test_disable_torch_function_subclass() -> None:
    value = torch.ones(2).as_subclass(Guarded)
    with pytest.raises(RuntimeError, match="not to be called"):
        value.sum()
    with _torch.DisableTorchFunctionSubclass():
        assert value.sum().item() == 2.0


def test_make_subclass() -> None:
    plain = torch.ones(2)
    made = _torch.make_subclass(Guarded, plain, True)
    with _torch.DisableTorchFunctionSubclass():
        assert type(made) is Guarded
        assert made.is_leaf
        assert made.requires_grad
        assert made.data_ptr() == plain.data_ptr()


def test_get_obj_state_and_set_obj_state() -> None:
    value, other = torch.ones(2), torch.ones(2)
    assert not _torch.get_obj_state(value)
    value.text = "kept"  # type: ignore[attr-defined]
    _torch.set_obj_state(other, _torch.get_obj_state(value))
    assert other.text == "kept"  # type: ignore[attr-defined]


def test_untyped_storage_of_and_make_typed_storage() -> None:
    untyped = torch.arange(3, dtype=torch.int32).untyped_storage()
    typed = _torch.make_typed_storage(untyped, torch.int32)
    assert typed.dtype is torch.int32
    assert _torch.untyped_storage_of(typed).data_ptr() == untyped.data_ptr()
