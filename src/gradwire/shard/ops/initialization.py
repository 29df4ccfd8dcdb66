"""`torch.nn.init` for sharded tensors. Others of its functions are made of these, or of methods of tensors.

Fans are those of the whole tensor, not of a part. Random numbers are drawn where each part is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import init

from gradwire.shard.dispatch import implements
from gradwire.shard.tensor import ShardedTensor


def _read(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardedTensor, dict[str, Any]]:
    found = {**kwargs, **dict(zip(["tensor", *names.split()], args, strict=False))}
    tensor = found.pop("tensor")
    return tensor, {name: value for name, value in found.items() if value is not None}


@implements(init.uniform_)
@torch.no_grad()
def _uniform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, options = _read("a b generator", args, kwargs)
    return tensor.uniform_(options.pop("a", 0.0), options.pop("b", 1.0), **options)


@implements(init.normal_)
@torch.no_grad()
def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, options = _read("mean std generator", args, kwargs)
    return tensor.normal_(options.pop("mean", 0.0), options.pop("std", 1.0), **options)


@implements(init.constant_)
@torch.no_grad()
def _constant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, options = _read("val", args, kwargs)
    return tensor.fill_(options["val"])


@implements(init.kaiming_uniform_)
@torch.no_grad()
def _kaiming_uniform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, options = _read("a mode nonlinearity generator", args, kwargs)
    if not tensor.numel():
        return tensor
    fan = init._calculate_correct_fan(tensor, options.pop("mode", "fan_in"))
    gain = init.calculate_gain(options.pop("nonlinearity", "leaky_relu"), options.pop("a", 0))
    bound = math.sqrt(3.0) * gain / math.sqrt(fan)
    return tensor.uniform_(-bound, bound, **options)
