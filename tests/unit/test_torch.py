"""What gradwire relies on of torch's private names: one test for each, so that a new release of torch fails by name."""

from __future__ import annotations

import torch

from gradwire import _torch

# -- used by rref -----------------------------------------------------------------------------------------------------


def test_cpp_list_refers_to_its_tensors_from_cpp() -> None:
    leaf = torch.ones(2, requires_grad=True)
    before = leaf._use_count()  # type: ignore[attr-defined]
    kept = _torch.CppList([leaf])
    assert leaf._use_count() == before + 1  # type: ignore[attr-defined]
    assert kept[0] is leaf


def test_storage_use_count_sees_views() -> None:
    value = torch.ones(4)
    storage = value.untyped_storage()
    assert _torch.storage_use_count(storage) == 2  # the tensor and the variable
    view = value[2:]
    assert _torch.storage_use_count(storage) == 3
    del view
    assert _torch.storage_use_count(storage) == 2
