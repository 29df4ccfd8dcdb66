"""What happens to gradients: kept apart, added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

GradientTable = dict[torch.Tensor, torch.Tensor]
K = TypeVar("K")


def keep_apart(gradient: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """A gradient that shares no memory with those seen before, nor with itself, so that it may be changed in place."""
    if gradient.layout is not torch.strided or gradient.is_nested or not gradient.numel():
        return gradient
    address = gradient.data_ptr()
    if address in seen or 0 in gradient.stride():
        return gradient.clone(memory_format=torch.contiguous_format)
    seen.add(address)
    return gradient


def add_gradient(table: dict[K, torch.Tensor], leaf: K, gradient: torch.Tensor, is_recorded: bool = False) -> None:
    """Adds to what a table has for a leaf, out of place: others may hold what was there.

    The sum is recorded or not, whatever the grad mode of the thread that happens to add.
    """
    num_known, known = len(table), table.setdefault(leaf, gradient)
    if len(table) > num_known:
        return
    with torch.set_grad_enabled(is_recorded):
        if known.layout is not torch.strided and gradient.layout is torch.strided:
            table[leaf] = gradient + known  # dense + sparse works, sparse + dense does not
        else:
            table[leaf] = known + gradient


def sum_by_origin(
    targets: Sequence[torch.Tensor | tuple[int, int]],
    gradients: Sequence[torch.Tensor | None],
    is_recorded: bool = False,
) -> dict[int, dict[int, torch.Tensor]]:
    """The gradients of tensors that came in messages, by the message and the tensor's number there; others are left out."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient is not None and isinstance(target, tuple):
            message_id, number = target
            add_gradient(found.setdefault(message_id, {}), number, gradient, is_recorded)
    return found
