"""How functions that work element by element reach the parts of their operands.

Operands are sharded tensors, plain tensors that are the same for everybody (replicated), and plain values. The first sharded
operand that has the size of the result leads: the result is divided as it is, and the others are brought to where its parts
are. Dtypes and errors come from the same function of tensors without elements (`probe`), so they are known here, before
anything is done anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradwire.shard.dispatch import Implementation, unsupported
from gradwire.shard.engines import Part
from gradwire.shard.layouts import Layout
from gradwire.shard.ops._broadcasting import broadcast, lift, restrict
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
        operands: The tensors among the arguments.
        size: Of the result.
        result: What it returns for tensors without elements; tells the dtype, and whether there will be a gradient.
        leader: The operand as which the result is divided.

    Raises:
        RuntimeError: It is called in a way that sharded tensors do not know, or sizes do not fit.
        Exception: What the function raises for operands of these dtypes.
    """

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if kwargs.get("out") is not None:
            raise unsupported(func, "it cannot write to out=")
        self.func, self.args, self.kwargs = func, list(args), {k: v for k, v in kwargs.items() if k != "out"}
        self.operands = [item for item in (*self.args, *self.kwargs.values()) if isinstance(item, torch.Tensor)]
        sharded = [item for item in self.operands if isinstance(item, ShardedTensor)]
        self._check(sharded)
        self.result = func(*map(probe, self.args), **{name: probe(item) for name, item in self.kwargs.items()})
        self.size = torch.Size(broadcast(*map(size_of, self.operands)))
        same = [item for item in sharded if size_of(item) == self.size]
        self.leader = same[0] if same else max(sharded, key=lambda item: size_of(item).numel())

    def _check(self, sharded: Sequence[ShardedTensor]) -> None:
        for item in (*self.args, *self.kwargs.values()):
            if isinstance(item, list | tuple) and any(isinstance(element, torch.Tensor) for element in item):
                raise unsupported(self.func, "it takes no lists of tensors")
        if any(item._engine != sharded[0]._engine for item in sharded[1:]):
            raise unsupported(
                self.func, "All distributed tensors should use the same ProcessGroup if used together in an op"
            )

    def run(self, layout: Layout, size: Sequence[int]) -> list[Part]:
        """Runs it on the parts of a result of that layout and size."""
        engine = self.leader._engine
        keywords = [name for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)]
        values = [*self.args, *(self.kwargs[name] for name in keywords)]
        columns = [align(value, self.leader, layout, size) for value in values]
        constants = {name: value for name, value in self.kwargs.items() if name not in keywords}
        return engine.run(call, layout, *columns, name=_names[self.func], keywords=keywords, constants=constants)


def input_first(implementation: Implementation) -> Implementation:
    """For functions whose tensor may be given as ``input=``: the implementation gets it as the first argument."""

    @functools.wraps(implementation)
    def with_input(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        return implementation(func, args, kwargs)

    return with_input


def size_of(value: torch.Tensor) -> torch.Size:
    """Of a tensor; quicker than asking the tensor itself if it is sharded."""
    return value._metadata.size if isinstance(value, ShardedTensor) else value.size()


def probe(value: Any, longest: int = 0) -> Any:
    """A small tensor that behaves as another one would; other values are left as they are.

    It has the same number of dimensions, dtype and need of a gradient. Functions of it are quick, draw no random numbers if
    it has no elements, and raise what they would raise.

    Args:
        value: Any argument of a function.
        longest: What dimensions that are longer become.
    """
    if not isinstance(value, torch.Tensor):
        return value
    size = [min(longest, length) for length in size_of(value)]
    with torch.enable_grad():  # a clone must not be a leaf
        found = torch.zeros(size, dtype=value.dtype, requires_grad=value.requires_grad)
        return found.clone() if found.requires_grad and not value.is_leaf else found


def align(value: Any, leader: ShardedTensor, layout: Layout, size: Sequence[int]) -> list[Any]:
    """An operand as a column: what each part of a result of that layout and size needs of it."""
    engine = leader._engine
    if isinstance(value, ShardedTensor):
        return list(engine.move(value._parts, value._layout, restrict(layout, size, size_of(value)), value._like))
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
    layout = lift(leader._layout, size_of(leader), size)
    made = derive(leader, layout, planned.run(layout, size), size, planned.result)
    if made._batch is None and size_of(leader) == size:
        others = [item for item in planned.operands if isinstance(item, ShardedTensor) and size_of(item) == size]
        made._batch = next((item._batch for item in others if item._batch is not None), None)
    return made


def derive(
    leader: ShardedTensor, layout: Layout, parts: Sequence[Part], size: Sequence[int], result: torch.Tensor
) -> ShardedTensor:
    """What was made of sharded tensors; `result` tells its dtype and whether it has a gradient."""
    if layout is leader._layout:
        made = leader._with_parts(parts, result.dtype)
        note_gradient(made, result.requires_grad, not result.requires_grad)
        return made
    return from_layout(leader._engine, layout, parts, size, leader._like.to(result.dtype), result.requires_grad)


def pointwise_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A function that changes its first argument. It is done everywhere when this returns."""
    tensor = args[0] if args else None
    if not isinstance(tensor, ShardedTensor):
        raise unsupported(func, "it would change a plain tensor; use full_tensor()")
    planned = Call(func, args, kwargs)
    if planned.size != size_of(tensor):
        raise unsupported(func, f"the result has size {list(planned.size)}, the tensor {list(size_of(tensor))}")
    engine = tensor._engine
    engine.settle()
    engine.settle(planned.run(tensor._layout, planned.size))
    note_gradient(tensor, planned.result.requires_grad, planned.result.is_leaf)
    return tensor


def note_gradient(tensor: ShardedTensor, requires_grad: bool, is_leaf: bool) -> None:
    """Tells a tensor whether its parts have a gradient, and whether they are leaves: of references nobody can tell."""
    metadata = tensor._metadata
    properties = replace(metadata.tensor_properties, requires_grad=requires_grad)
    tensor._metadata = replace(metadata, tensor_properties=properties)
    tensor._is_result = not is_leaf
