"""Filling objects with a saved state that fits them, where they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradwire.checkpoint._pieces import put
from gradwire.checkpoint._tree import Node, decode, items_of
from gradwire.checkpoint.objects import Part, module_state
from gradwire.checkpoint.reading import TensorReader
from gradwire.checkpoint.sharded import decode_state
from gradwire.errors import CheckpointError
from gradwire.optim import LocalOptimizer
from gradwire.shard import ShardedTensor
from gradwire.shard.sharded_optim import ShardedOptimizer

Filled = tuple[Part, Node, dict[str, Any] | None]
"""A part, the saved state of its object, and the versions of its modules."""


def fill_stateful(parts: Sequence[Filled], reader: TensorReader) -> None:
    """Loads what has a `load_state_dict` of its own and is no module. If one refuses, all are put back.

    Raises:
        CheckpointError: An object's `load_state_dict` raised.
    """
    undo: list[Callable[[], Any]] = []
    for part, node, _ in parts:
        if isinstance(part.value, nn.Module | torch.Tensor):
            continue
        try:
            _fill_stateful(part, node, reader, undo)
        except Exception as error:
            for put_back in reversed(undo):
                put_back()
            text = f"{type(part.value).__name__} did not take its state: {type(error).__name__}: {error}"
            raise CheckpointError(f"'{part.path}' was not loaded: {text}") from error


def fill_tensors(parts: Sequence[Filled], reader: TensorReader) -> None:
    """Loads modules and tensors, which are known to fit."""
    for part, node, metadata in parts:
        if isinstance(part.value, nn.Module):
            _fill_module(part, node, metadata, reader)
        elif isinstance(part.value, torch.Tensor):
            put(part.value, node, reader.mapped)


def _fill_stateful(part: Part, node: Node, reader: TensorReader, undo: list[Callable[[], Any]]) -> None:
    value = part.value
    if isinstance(value, LocalOptimizer):
        saved = items_of(node) or {}
        state = {name: decode(saved[name], reader.copied, reader.mapped) for name in part.names if name in saved}
        before = value.named_state()
        undo.append(lambda: value.load_named_state(before))
        value.load_named_state(state)
    else:
        before = value.state_dict()
        undo.append(lambda: value.load_state_dict(before))
        value.load_state_dict(_decode(value, node, reader))


def _decode(value: Any, node: Node, reader: TensorReader) -> Any:
    if isinstance(value, ShardedOptimizer):
        return decode_state(value, node, reader)
    return decode(node, reader.copied, reader.mapped)


def _fill_module(part: Part, node: Node, metadata: dict[str, Any] | None, reader: TensorReader) -> None:
    """Copies straight from the mapped file into the parameters."""
    module, saved = part.value, items_of(node) or {}
    state: Any = OrderedDict()
    for name, target in module_state(module, part.is_own_only).items():
        if part.prefix + name in saved and not isinstance(target, ShardedTensor):
            read = reader.mapped if isinstance(target, torch.Tensor) else reader.copied
            state[name] = decode(saved[part.prefix + name], read, reader.mapped)
    # Torch would replace parameters instead of filling them if the metadata told it to.
    saved_versions = {
        key: {name: value for name, value in item.items() if name != "assign_to_params_buffers"}
        for key, item in (metadata or {}).items()
    }
    versions = {key[len(part.prefix) :]: item for key, item in saved_versions.items() if key.startswith(part.prefix)}
    versions.setdefault("", saved_versions.get(part.prefix.rstrip("."), {}))
    state._metadata = versions
    if part.is_own_only:
        errors: list[str] = []
        module._load_from_state_dict(state, "", versions[""], False, [], [], errors)
        if errors:
            raise RuntimeError("; ".join(errors))
    else:
        module.load_state_dict(state, strict=False)
