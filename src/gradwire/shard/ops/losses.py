"""Losses: a function of each element, then their sum or mean, which is a plain tensor, the same for everybody."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.nn import functional

from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.ops._operands import offer, pointwise


def _loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(func).bind(*args, **kwargs)
    reduction = bound.arguments.get("reduction", "mean")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if bound.arguments.get("size_average") is not None or bound.arguments.get("reduce") is not None:
        raise unsupported(func, "size_average and reduce are old names; use reduction=")
    given = {name: value for name, value in bound.arguments.items() if name not in ("size_average", "reduce")}
    values = pointwise(func, (given.pop("input"), given.pop("target")), {**given, "reduction": "none"})
    if reduction == "none":
        return values
    if reduction == "batchmean":
        return values.sum() / values.size(0)
    return getattr(values, reduction)()


NAMES = """
    binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss
    soft_margin_loss
"""
for _name in NAMES.split():
    implements(offer(f"functional.{_name}", getattr(functional, _name)))(_loss)
