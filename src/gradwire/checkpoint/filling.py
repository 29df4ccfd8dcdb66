"""Filling objects with a saved state that fits them, where they are."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradwire.checkpoint._dtypes import DTYPES
from gradwire.checkpoint._pieces import is_tensor, put
from gradwire.checkpoint._tree import Node, decode, items_of
from gradwire.checkpoint.objects import Part, module_state
from gradwire.checkpoint.reading import TensorReader
from gradwire.checkpoint.sharded import decode_state
from gradwire.checkpoint.stored_tensor import stored
from gradwire.errors import CheckpointError
from gradwire.optim import LocalOptimizer
from gradwire.shard import ShardedTensor
from gradwire.shard.sharded_optim import ShardedOptimizer

Filled = tuple[Part, Node, dict[str, Any] | None]
"""A part, the saved state of its object, and the versions of its modules."""


def fill_stateful(parts: Sequence[Filled], reader: TensorReader) -> None:
    """Loads what has a `load_state_dict` of its own and is no module. If one refuses, all are put back.

    Raises:
        CheckpointError: An object's `load_state_dict` raised, or its state could not be read.
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
            if isinstance(error, CheckpointError):
                raise
            text = f"{type(part.value).__name__} did not take its state: {type(error).__name__}: {error}"
            raise CheckpointError(f"'{part.path}' was not loaded: {text}") from error


def fill_tensors(parts: Sequence[Filled], reader: TensorReader) -> None:
    """Loads modules and tensors, which are known to fit."""
    for part, node, metadata in parts:
        if isinstance(part.value, nn.Module):
            _fill_module(part, node, metadata, reader)
        elif isinstance(part.value, torch.Tensor):
            put(part.value, node, reader)


def _fill_stateful(part: Part, node: Node, reader: TensorReader, undo: list[Callable[[], Any]]) -> None:
    value = part.value
    if isinstance(value, LocalOptimizer):
        saved = items_of(node) or {}
        state = {name: decode(saved[name], reader.copied, reader) for name in part.names if name in saved}
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
    return decode(node, reader.copied, reader)


def _fill_module(part: Part, node: Node, metadata: dict[str, Any] | None, reader: TensorReader) -> None:
    """Read from the files straight into the parameters, where the module copies from the state that it is given."""
    module, saved = part.value, items_of(node) or {}
    copied = _copied_names(part)
    failures: list[CheckpointError] = []
    state: Any = OrderedDict()
    for name, target in module_state(module, part.is_own_only).items():
        if part.prefix + name not in saved or isinstance(target, ShardedTensor):
            continue
        item = saved[part.prefix + name]
        if name in copied and isinstance(target, torch.Tensor) and is_tensor(item):
            dtype, shape = reader.form_of(item)
            fill = functools.partial(put, node=item, source=reader)
            state[name] = stored(shape, DTYPES[dtype], fill, failures)
        else:
            state[name] = decode(item, reader.copied, reader)
    # Torch would replace parameters instead of filling them if the metadata told it to.
    saved_versions = {
        key: {name: value for name, value in item.items() if name != "assign_to_params_buffers"}
        for key, item in (metadata or {}).items()
    }
    versions = {key[len(part.prefix) :]: item for key, item in saved_versions.items() if key.startswith(part.prefix)}
    versions.setdefault("", saved_versions.get(part.prefix.rstrip("."), {}))
    state._metadata = versions
    try:
        if part.is_own_only:
            errors: list[str] = []
            module._load_from_state_dict(state, "", versions[""], False, [], [], errors)
            if errors:
                raise RuntimeError("; ".join(errors))
        else:
            module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        if failures:  # torch has made a line of text of it
            raise failures[0] from error
        raise


def _copied_names(part: Part) -> set[str]:
    """Return the names of what torch's own code loads: it copies from tensors of a state, and keeps none of them."""
    if not part.is_own_only and not _is_torchs(part.value, "load_state_dict"):
        return set()
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in part.value.named_modules(remove_duplicate=False)
        if _is_torchs(module, "_load_from_state_dict")
        for name in (*module._parameters, *module._buffers)
    }


def _is_torchs(module: nn.Module, method: str) -> bool:
    return getattr(getattr(module, method), "__func__", None) is getattr(nn.Module, method)
