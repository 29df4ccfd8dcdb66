"""What drivers ask of owners: called by name, with plain data, at every trust level."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.errors import ConfigurationError, NotExposed
from gradwire.optim.local import LocalOptimizer
from gradwire.rpc.functions import expose
from gradwire.rref.operations import find_value

MAKE = "gradwire.optim.make"
OPERATE = "gradwire.optim.operate"

_OPERATIONS = frozenset(
    (
        "add_groups",
        "describe",
        "is_finite",
        "load_named_state",
        "named_state",
        "norms",
        "remove_groups",
        "step",
        "zero_grad",
    )
)


def _make(optimizer_class: Any, groups: Any, args: Any, kwargs: Any) -> LocalOptimizer:
    """Makes an owner's part; a class of torch is called by its name."""
    if isinstance(optimizer_class, str):
        optimizer_class = getattr(torch.optim, optimizer_class, None)
    if not isinstance(optimizer_class, type):
        raise ConfigurationError("there is no such class of optimizers in torch.optim here")
    return LocalOptimizer(optimizer_class, groups, args, kwargs)


def _operate(rref_id: int, maker: Any, operation: str, *args: Any) -> Any:
    """Has an owner do one of the above."""
    optimizer = find_value(rref_id, maker)
    if operation not in _OPERATIONS or not isinstance(optimizer, LocalOptimizer):
        raise NotExposed(f"{operation!r} is nothing that optimizers do")
    return getattr(optimizer, operation)(*args)


for _function, _name in ((_make, MAKE), (_operate, OPERATE)):
    expose(_function, name=_name)
