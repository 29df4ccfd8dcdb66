"""Sharded tensors in a save or a load: their shards, and those of an optimizer's state, wherever they are.

A shard is saved like any tensor, by the worker or rank that has it. What belongs together is joined in the index
(`gradwire.checkpoint._pieces`), so that a tensor can be loaded however it is divided then, or in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gradwire.checkpoint._index import TensorEntry
from gradwire.checkpoint._pieces import SHARDED, assemble, form_of, is_tensor, region_of, sharded_node
from gradwire.checkpoint._tree import MAX_DEPTH, Node, decode, dict_node, items_of
from gradwire.checkpoint.reading import TensorReader
from gradwire.errors import ConfigurationError
from gradwire.optim.parts import PartOf
from gradwire.shard import ShardedTensor
from gradwire.shard._geometry import Box
from gradwire.shard.group_engine import GroupEngine
from gradwire.shard.sharded_optim import ShardedOptimizer

Entries = Mapping[str, TensorEntry]


def shards_of(tensor: ShardedTensor) -> list[tuple[Box, Any]]:
    """The shards with elements that this process handles: its own in a process group, all of them over RPC workers."""
    return [(box, part) for box, part in zip(tensor._boxes(), tensor._parts, strict=True) if box.num_elements]


def find_sharded(value: Any, depth: int = 0) -> Iterator[ShardedTensor]:
    """All sharded tensors in a state, also in modules and sharded optimizers."""
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        for item in items if depth <= MAX_DEPTH else ():  # deeper ones are refused elsewhere, with a reason
            yield from find_sharded(item, depth + 1)
    elif isinstance(value, nn.Module):
        for module in value.modules():
            yield from find_sharded([*module._parameters.values(), *module._buffers.values()])
            yield from (item for item in vars(module).values() if isinstance(item, ShardedTensor))
    elif isinstance(value, ShardedOptimizer):
        yield from find_sharded(value.named_params)


def group_of(state: Any, given: Any) -> Any:
    """The process group whose ranks save or load together; None if this process does it alone.

    Args:
        state: What is to be saved or filled.
        given: The group that the user has named, or None.

    Raises:
        ConfigurationError: There are sharded tensors of another group.
    """
    groups = [item._engine._group for item in find_sharded(state) if isinstance(item._engine, GroupEngine)]
    group = given if given is not None or not groups else groups[0]
    if any(item is not group for item in groups):
        raise ConfigurationError(
            "there are sharded tensors of different process groups; use a checkpoint of its own for each group"
        )
    return group


# -- state of optimizers, as nodes ---------------------------------------------------------------------------------------


def join_states(states: Mapping[str, Node], parts: Mapping[str, PartOf], entries: Entries) -> dict[str, Node]:
    """State by the names of whole parameters, from that of their parts.

    Args:
        states: By the names of parameters or of parts.
        parts: What parts are parts of, by their names.
        entries: Of all tensors.
    """
    found = {name: node for name, node in states.items() if name not in parts}
    pieces: dict[str, dict[str, list[tuple[PartOf, Node]]]] = {}
    for name, node in states.items():
        if name in parts:
            values = pieces.setdefault(parts[name].whole, {})
            for key, item in (items_of(node) or {}).items():
                values.setdefault(key, []).append((parts[name], item))
    for name, values in pieces.items():
        found[name] = dict_node({key: _join(items, entries) for key, items in values.items()})
    return found


def _join(items: list[tuple[PartOf, Node]], entries: Entries) -> Node:
    """A tensor in pieces; of what does not have the size of the parts (a number of steps), the first."""
    forms = [form_of(node, entries) if is_tensor(node) else ("", None) for _, node in items]
    if any(shape != part.box.sizes for (part, _), (_, shape) in zip(items, forms, strict=True)):
        return items[0][1]
    return sharded_node(forms[0][0], items[0][0].size, [(node["$tensor"], part.box.offsets) for part, node in items])


def divide_states(states: Mapping[str, Node], parts: Mapping[str, PartOf], entries: Entries) -> dict[str, Node]:
    """State by the names of parts, from that of whole parameters."""
    wholes = {part.whole for part in parts.values()}
    found = {name: node for name, node in states.items() if name not in wholes}
    for name, part in parts.items():
        if part.whole in states:
            saved = items_of(states[part.whole]) or {}
            found[name] = dict_node({key: _divide(node, part, entries) for key, node in saved.items()})
    return found


def _divide(node: Node, part: PartOf, entries: Entries) -> Node:
    if is_tensor(node) and form_of(node, entries)[1] == part.size:
        return region_of(node, part.box, entries)
    return node


def decode_state(optimizer: ShardedOptimizer, node: Node, reader: TensorReader) -> Any:
    """The saved state of a sharded optimizer; what is as large as a sharded parameter is divided like it."""
    saved = dict(items_of(node) or {})
    by_key = items_of(saved.pop("state", None)) or {}
    state = decode(dict_node(saved), reader.copied, reader)
    names = _names(state.get("param_groups", ()))
    state["state"] = {
        key: {
            name: _decode_like(optimizer.named_params.get(names.get(key, "")), item, reader)
            for name, item in (items_of(values) or {}).items()
        }
        for key, values in by_key.items()
    }
    return state


def _names(groups: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """The names of parameters by the keys of their state: numbers in torch's form, else the names themselves."""
    pairs = (zip(group["params"], group.get("param_names") or group["params"], strict=True) for group in groups)
    return {key: str(name) for items in pairs for key, name in items}


def _decode_like(like: torch.Tensor | None, node: Node, reader: TensorReader) -> Any:
    if isinstance(like, ShardedTensor) and is_tensor(node) and reader.form_of(node)[1] == tuple(like.size()):
        return _read_like(like, node, reader)
    return decode(node, reader.copied, reader)


def _read_like(like: ShardedTensor, node: Node, reader: TensorReader) -> ShardedTensor:
    dtype = getattr(torch, reader.form_of(node)[0])
    parts = []
    for box in like._boxes():
        region = reader.region_of(node, box)
        if SHARDED in region:
            parts.append(assemble(region[SHARDED], reader))
        else:
            parts.append(reader.copied(region["$tensor"]))
    with torch.no_grad():
        return like._with_parts(parts, dtype)
