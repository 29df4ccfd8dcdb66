"""Keeps two threads that use one leaf tensor from stopping each other for ever.

Torch makes a leaf's gradient accumulator when the leaf is used in a graph. It does so under a lock of the tensor, and if
only Python refers to the tensor, it waits for the GIL meanwhile. Indexing, ``.T``, ``repr`` and custom functions want that
lock while they have the GIL. So if one thread computes ``weight * 2`` and another ``weight.T``, both can stop, and the whole
process with them (torch 2.13). A tensor that something in C++ refers to is safe.

Workers run calls side by side, and what a reference refers to is there to be used by several: so whoever keeps a value has
C++ refer to its leaves, too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ATOMS: Final = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MOST_ITEMS: Final = 1000  # of an object or container that are looked at
_KeptInCpp: Any = getattr(torch._C, "ScriptList", list)


def may_have_leaves(value: Any) -> bool:
    """Whether it is worth looking for some, now and later."""
    return type(value) not in _ATOMS


def keep_leaves(value: Any) -> Any:
    """Something that refers to the leaves of a tensor, a module, or an object or container that has such, from C++.

    Objects and containers are looked at one level deep, and no further than their first thousand items.
    """
    if type(value) is torch.Tensor and not value.requires_grad:  # most are
        return None
    leaves = [leaf for leaf in _leaves_of(value) if type(leaf) in _PLAIN and leaf.requires_grad and leaf.is_leaf]
    if not leaves:
        return None
    kept = _KeptInCpp(leaves)
    for leaf in leaves:
        with contextlib.suppress(RuntimeError):  # not of every layout
            leaf.view_as(leaf)  # lets go of the GIL: whoever is making the accumulator right now has made it after this
    return kept


def _leaves_of(value: Any) -> Iterator[torch.Tensor]:
    """Asks types, not values: looking at a proxy or a lazy object could make it do something."""
    for item in itertools.chain((value,), itertools.islice(_items_of(value), _MOST_ITEMS)):
        if type(item) in _PLAIN:
            yield item
        elif issubclass(type(item), torch.nn.Module):
            with contextlib.suppress(Exception):  # it may not be ready to be looked at, or elsewhere
                yield from list(item.parameters())


def _items_of(value: Any) -> Iterator[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        return iter(list(dict.values(value)))
    if issubclass(kind, list):
        return list.__iter__(value)
    if issubclass(kind, tuple):
        return tuple.__iter__(value)
    return iter(list(object.__getattribute__(value, "__dict__").values()) if kind.__dictoffset__ else ())
