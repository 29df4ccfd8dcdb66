"""Keeps two threads that use one leaf tensor from stopping each other for ever.

Torch makes a leaf's gradient accumulator when the leaf is first used in a graph. It does so under a lock of the tensor, and
may wait for the GIL meanwhile. Indexing, ``.T``, ``repr`` and custom functions want that lock while they have the GIL. So if
one thread computes ``weight * 2`` and another ``weight.T``, both can stop, and the whole process with them (torch 2.13; in
torch 2.8 accumulators need no GIL). A leaf whose accumulator exists already is safe.

Workers run calls side by side, and what a reference refers to is there to be used by several: so whoever keeps a value keeps
the accumulators of its leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ATOMS: Final = frozenset((bool, int, float, complex, str, bytes, type(None)))


def keep_accumulators(value: Any) -> Any:
    """Something that keeps accumulators alive: those of a tensor, a module, or an object or container that has some.

    It keeps no memory of the tensors. Objects and containers are looked at one level deep.
    """
    kind = type(value)
    if kind in _PLAIN:
        return _keep_of(value) if value.requires_grad else None
    if kind in _ATOMS:
        return None
    try:
        return [_keep_of(leaf) for leaf in _leaves_of(value)] or None
    except Exception:  # a module that is not ready to be looked at, say; whoever uses it will hear of it
        return None


def _leaves_of(value: Any) -> Iterable[torch.Tensor]:
    """Asks types, not values: looking at a proxy or a lazy object could make it do something."""
    for item in (value, *_items_of(value)):
        if issubclass(type(item), torch.nn.Module):
            yield from item.parameters()
        elif type(item) in _PLAIN:
            yield item


def _items_of(value: Any) -> Iterable[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))
    if issubclass(kind, list | tuple):
        return list(value)
    return list(object.__getattribute__(value, "__dict__").values()) if kind.__dictoffset__ else ()


def _keep_of(leaf: torch.Tensor) -> torch.Tensor | None:
    if type(leaf) not in _PLAIN or not (leaf.requires_grad and leaf.is_leaf) or leaf.layout is not torch.strided:
        return None
    with torch.enable_grad():  # operations that let go of the GIL; the clone is a tensor of its own, without elements
        return (leaf.narrow(0, 0, 0) if leaf.dim() else leaf).clone()
