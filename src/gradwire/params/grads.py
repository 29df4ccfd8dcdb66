"""Gradients, dense or sparse: sums, norms and limits, and a lock on ``.grad`` of leaves.

Used by autograd, and by the optimizers of references and of shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, MutableMapping, Sequence
from typing import TypeVar

import torch

from gradwire import _interrupts
from gradwire.errors import OptimizerError

GradientTable = dict[torch.Tensor, torch.Tensor]
"""Gradients by leaf."""

K = TypeVar("K")


def add_gradient(
    table: MutableMapping[K, torch.Tensor], leaf: K, gradient: torch.Tensor, is_recorded: bool = False
) -> None:
    """Add a gradient to that of a leaf in a table, out of place: the old one may be in use elsewhere.

    `is_recorded` decides whether the sum is recorded, regardless of the grad mode of the thread.
    """
    num_known, known = len(table), table.setdefault(leaf, gradient)
    if len(table) > num_known:
        return
    with torch.set_grad_enabled(is_recorded):
        if known.layout is not torch.strided and gradient.layout is torch.strided:
            table[leaf] = gradient + known  # dense + sparse works, sparse + dense does not
        else:
            table[leaf] = known + gradient


def keep_apart(gradient: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """Return a gradient that shares no memory with those seen before, nor with itself: it may be changed in place."""
    if gradient.layout is not torch.strided or gradient.is_nested or not gradient.numel():
        return gradient
    address = gradient.data_ptr()
    if address in seen or 0 in gradient.stride():
        return gradient.clone(memory_format=torch.contiguous_format)
    seen.add(address)
    return gradient


def clamped(gradient: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the gradient with elements clamped to the limit and its negative; the original does not change."""
    if not gradient.is_sparse:
        return gradient.clamp(-limit, limit)
    whole = gradient.coalesce()  # torch does not clamp sparse tensors; entries of one position are added first
    return torch.sparse_coo_tensor(
        whole.indices(), whole.values().clamp(-limit, limit), whole.shape, is_coalesced=True, check_invariants=False
    )


def norm_of(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of one gradient; the neutral value if it has no elements, where torch cannot compute a maximum."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if not values.numel():
        return values.new_full((), float("inf") if norm_type < 0 else 0.0)
    found: torch.Tensor = torch.linalg.vector_norm(values, norm_type)
    return found


def are_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether no element is infinite or NaN. Synchronize once per device, not once per tensor."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        found = torch.isfinite(values).all()
        if not values.is_cpu:
            by_device.setdefault(values.device, []).append(found)
        elif not bool(found):
            return False
    return all(bool(torch.stack(found).all()) for found in by_device.values())


def total_norm(norms: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """Return the norm of all gradients from their norms, as `torch.nn.utils.clip_grad_norm_` computes it."""
    if not norms:
        return torch.tensor(0.0)
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat([norm.reshape(1) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise OptimizerError(
            f"The total norm of order {norm_type} for gradients is non-finite ({float(total)}), so it cannot be "
            f"clipped; pass error_if_nonfinite=False to clip them anyway"
        )
    return total


def clip_factor(total: torch.Tensor, max_norm: float) -> float:
    return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))


_changed = threading.Condition()  # guards `_users`
_users: dict[int, int] = {}  # which thread uses `.grad`, by id of the leaf


class GradClaim:
    """A lock on ``.grad`` of some leaves, all at once, so no two claims wait for each other. Reentrant in a thread."""

    __slots__ = ("_leaves", "_taken")

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._leaves = list(leaves)
        self._taken: set[int] = set()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        own, wanted = threading.get_ident(), set(map(id, self._leaves))
        until = time.monotonic() + timeout if timeout >= 0 else None
        with _changed:
            while any(_users[item] != own for item in wanted & _users.keys()):
                left_s = None if until is None else until - time.monotonic()
                if not blocking or (left_s is not None and left_s <= 0):
                    return False
                _interrupts.wait(_changed, left_s)
            self._taken = wanted - _users.keys()
            _users.update(dict.fromkeys(self._taken, own))
        return True

    def release(self) -> None:
        """Release the lock, except for leaves that an outer claim of this thread holds."""
        with _changed:
            for item in self._taken:
                del _users[item]
            self._taken = set()
            _changed.notify_all()

    @property
    def is_nested(self) -> bool:
        """Whether an outer claim of this thread holds one of the leaves."""
        with _changed:
            return any(_users.get(id(leaf)) == threading.get_ident() for leaf in self._leaves)
