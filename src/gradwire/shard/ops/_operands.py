"""How functions that work element by element reach the parts of their operands.

Operands are sharded tensors, plain tensors that are the same for everybody (replicated), and plain values. The first sharded
operand that has the size of the result leads: the result is divided as it is, and the others are brought to where its parts
are. Sizes, dtypes and errors come from the same function of tensors without data (`probe`), so they are known here, before
anything is done anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradwire.shard.dispatch import unsupported
from gradwire.shard.engines import Part
from gradwire.shard.layouts import Layout
from gradwire.shard.ops._broadcasting import lift, restrict
from gradwire.shard.tensor import ShardedTensor, from_layout

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""What is run where the parts are, by the names under which it is sent there."""

_names: dict[Callable[..., Any], str] = {}


def offer(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function be run where parts are."""
    FUNCTIONS[name] = function
    _names.setdefault(function, name)
    return function


def call(*values: Any, name: str, keywords: Sequence[str], constants: dict[str, Any]) -> Any:
    """Runs one of `FUNCTIONS`; the last values are its keyword arguments `keywords`."""
    num = len(values) - len(keywords)
    return FUNCTIONS[name](*values[:num], **dict(zip(keywords, values[num:], strict=True)), **constants)


class Call:
    """A function of operands, and how to run it on their parts.

    Args:
        func: One of `FUNCTIONS`.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Attributes:
        result: What it would return, without data; it tells size, dtype and whether there will be a gradient.
        leader: The operand as which the result is divided.
        layout: Of the result.

    Raises:
        RuntimeError: It is called in a way that sharded tensors do not know.
        Exception: What the function raises for operands of these sizes and dtypes.
    """

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if kwargs.get("out") is not None:
            raise unsupported(func, "it cannot write to out=")
        self.func, self.args, self.kwargs = func, list(args), {k: v for k, v in kwargs.items() if k != "out"}
        self.operands = [item for item in (*self.args, *self.kwargs.values()) if isinstance(item, torch.Tensor)]
        self._check()
        self.result = self._probe()

    def _probe(self) -> Any:
        try:
            return self.func(*map(probe, self.args), **{name: probe(item) for name, item in self.kwargs.items()})
        except NotImplementedError as error:
            raise unsupported(self.func, "what it returns cannot be told without the data") from error

    def _check(self) -> None:
        for item in (*self.args, *self.kwargs.values()):
            if isinstance(item, list | tuple) and any(isinstance(element, torch.Tensor) for element in item):
                raise unsupported(self.func, "it takes no lists of tensors")
        sharded = [item for item in self.operands if isinstance(item, ShardedTensor)]
        if any(item._engine != sharded[0]._engine for item in sharded):
            raise unsupported(self.func, "one operand is in another process group, or on RPC workers")

    @property
    def size(self) -> torch.Size:
        """Of the result."""
        found: torch.Size = self.result.size()
        return found

    @property
    def leader(self) -> ShardedTensor:
        """The first sharded operand that has the size of the result; else the largest."""
        sharded = [item for item in self.operands if isinstance(item, ShardedTensor)]
        return next((item for item in sharded if item.size() == self.size), max(sharded, key=torch.numel))

    def run(self, layout: Layout, size: Sequence[int]) -> list[Part]:
        """Runs it on the parts of a result of that layout and size."""
        engine = self.leader._engine
        keywords = [name for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)]
        values = [*self.args, *(self.kwargs[name] for name in keywords)]
        columns = [align(value, self.leader, layout, size) for value in values]
        constants = {name: value for name, value in self.kwargs.items() if name not in keywords}
        return engine.run(call, layout, *columns, name=_names[self.func], keywords=keywords, constants=constants)


def probe(value: Any) -> Any:
    """A tensor of the same size, dtype and need of a gradient without data; other values are left as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.enable_grad():  # a clone must not be a leaf
        found = torch.empty(value.size(), dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
        return found if value.is_leaf else found.clone()


def align(value: Any, leader: ShardedTensor, layout: Layout, size: Sequence[int]) -> list[Any]:
    """An operand as a column: what each part of a result of that layout and size needs of it."""
    engine = leader._engine
    if isinstance(value, ShardedTensor):
        return list(engine.move(value._parts, value._layout, restrict(layout, size, value.size()), value._like))
    if isinstance(value, torch.Tensor):
        return list(engine.divide(value, restrict(layout, size, value.size())))
    return [value] * len(engine.numbers(layout))


def pointwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each element."""
    planned = Call(func, args, kwargs)
    if planned.result is NotImplemented:  # of operators
        return planned.result
    if not isinstance(planned.result, torch.Tensor):
        raise unsupported(func, "it returns no tensor when it is called like this")
    leader, size = planned.leader, planned.size
    layout = lift(leader._layout, leader.size(), size)
    parts = planned.run(layout, size)
    made = derive(leader, layout, parts, planned.result)
    if made._batch is None and leader.size() == size:
        others = [item for item in planned.operands if isinstance(item, ShardedTensor) and item.size() == size]
        made._batch = next((item._batch for item in others if item._batch is not None), None)
    return made


def derive(leader: ShardedTensor, layout: Layout, parts: Sequence[Part], result: torch.Tensor) -> ShardedTensor:
    """What was made of sharded tensors; `result` is the same without data."""
    if layout == leader._layout and result.size() == leader.size():
        made = leader._with_parts(parts, result.dtype)
        note_gradient(made, result.requires_grad, not result.requires_grad)
        return made
    like = leader._like.to(result.dtype)
    return from_layout(leader._engine, layout, parts, result.size(), like, result.requires_grad)


def pointwise_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A function that changes its first argument. It is done everywhere when this returns."""
    tensor = args[0] if args else None
    if not isinstance(tensor, ShardedTensor):
        raise unsupported(func, "it would change a plain tensor; use full_tensor()")
    planned = Call(func, args, kwargs)
    if planned.size != tensor.size():
        raise unsupported(func, f"the result has size {list(planned.size)}, the tensor {list(tensor.size())}")
    engine = tensor._engine
    engine.settle()
    engine.settle(planned.run(tensor._layout, tensor.size()))
    note_gradient(tensor, planned.result.requires_grad, planned.result.is_leaf)
    return tensor


def note_gradient(tensor: ShardedTensor, requires_grad: bool, is_leaf: bool) -> None:
    """Tells a tensor whether its parts have a gradient, and whether they are leaves: of references nobody can tell."""
    metadata = tensor._metadata
    properties = replace(metadata.tensor_properties, requires_grad=requires_grad)
    tensor._metadata = replace(metadata, tensor_properties=properties)
    tensor._is_result = not is_leaf
