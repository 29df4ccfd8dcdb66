"""What can be filled from a checkpoint: its state, and whether a saved state fits it.

An object is split into *parts*, one for each worker that has something of it. Everything here but `split` runs where the
part is.

    RemoteModule, RRef              one part, on the owner
    nn.Module                       one part, here; if RemoteModules are inside of it, one more for each
    a ShardedTensor, also inside    one part for each shard, where it is (`gradwire.checkpoint.stateful`)
    DistributedOptimizer            one part on each owner; options of its groups stay here
    anything with a state_dict      one part, here
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from gradwire.checkpoint.index import DTYPES, NAMES, TensorEntry
from gradwire.checkpoint.safetensors_io import TensorReader
from gradwire.checkpoint.tree import (
    MAX_DEPTH,
    SHARDED,
    Node,
    assemble,
    bodies,
    decode,
    dict_node,
    form_of,
    is_covered,
    is_tensor,
    items_of,
    join,
    region_of,
    sharded_node,
    tag_of,
)
from gradwire.errors import CannotSave, ConfigurationError
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer, LocalOptimizer
from gradwire.optim.parameters import PartOf
from gradwire.params import snapshots as sharing
from gradwire.rref import RRef
from gradwire.shard import ShardedTensor
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.layout import Box
from gradwire.shard.sharded_optim import ShardedOptimizer
from gradwire.shard.torch_optimizer import Form, state_problem

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
    groups = [item._backend._group for item in find_sharded(state) if isinstance(item._backend, GroupBackend)]
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


MODULE: Final = "module"
TENSOR: Final = "tensor"
OPTIMIZER: Final = "optimizer"
STATEFUL: Final = "stateful"


@dataclass(frozen=True, slots=True)
class Part:
    """Something of an object that one worker has.

    Attributes:
        path: Of the object.
        prefix: What the part's keys have in front of them in the object's state.
        value: The part itself, or a reference to it.
        is_own_only: Of a module, only what is directly in it: its submodules are parts of their own.
        names: Of an optimizer, the parameters that it has on that worker.
    """

    path: str
    prefix: str
    value: Any
    is_own_only: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """What is saved of a part."""

    kind: str
    type_name: str
    values: Any
    metadata: dict[str, Any] | None = None


# -- on the worker that saves or loads ------------------------------------------------------------------------------


def is_object(value: Any) -> bool:
    """Whether it is filled when it is loaded, and not just a value."""
    if isinstance(value, RRef | nn.Module | torch.optim.Optimizer):
        return True
    has_both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has_both and not isinstance(value, type)


def split(path: str, value: Any) -> list[Part]:
    """The parts of an object."""
    if isinstance(value, DistributedOptimizer):
        names: dict[str, list[str]] = {}
        for name, rref in value.named_parameters():
            names.setdefault(rref.owner_name(), []).append(name)
        below = join(path, "state")
        return [
            Part(below, "", rref, names=tuple(names.get(rref.owner_name(), ()))) for rref in value.remote_optimizers
        ]
    if isinstance(value, nn.Module):
        return list(_split_module(path, "", value))
    return [Part(path, "", value)]


def _split_module(path: str, prefix: str, module: nn.Module) -> Iterator[Part]:
    if isinstance(module, RemoteModule):
        yield Part(path, prefix, module.get_module_rref())
    elif not any(isinstance(item, RemoteModule) for item in module.modules()):
        yield Part(path, prefix, module)
    else:
        yield Part(path, prefix, module, is_own_only=True)
        for name, child in module.named_children():
            yield from _split_module(path, f"{prefix}{name}.", child)


# -- where the part is: saving --------------------------------------------------------------------------------------


def state_of(part: Part) -> State:
    """What is to be saved of a part.

    Raises:
        CannotSave: It has no state that can be saved.
    """
    value = part.value
    type_name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, LocalOptimizer):
        return State(OPTIMIZER, type_name, dict(value.named_state()))
    if isinstance(value, nn.Module):
        state = module_state(value, part.is_own_only)
        values = {part.prefix + name: item for name, item in state.items()}
        versions = {(part.prefix + name).rstrip("."): dict(item) for name, item in state._metadata.items()}
        return State(MODULE, type_name, values, versions)
    if isinstance(value, torch.Tensor):
        return State(TENSOR, type_name, value)
    if is_object(value):
        return State(STATEFUL, type_name, value.state_dict())
    raise CannotSave(
        f"'{part.path}' is a reference to a {type_name}, which has no state_dict; only references to tensors, modules and "
        "what has state_dict and load_state_dict can be saved"
    )


def module_state(module: nn.Module, is_own_only: bool) -> Any:
    """The state dict of a module, or of what is directly in it."""
    keep_vars = _holds_shards(module)  # sharded ones themselves, not others that share their memory
    if not is_own_only:
        return module.state_dict(keep_vars=keep_vars)
    found: Any = OrderedDict()
    found._metadata = {"": {"version": module._version}}
    module._save_to_state_dict(found, "", keep_vars)
    return found


def _holds_shards(module: nn.Module) -> bool:
    return next(find_sharded(module), None) is not None


def may_hold_shards(part: Part) -> bool:
    """Whether sharded tensors may be in the state of a part that is here."""
    value = part.value
    if isinstance(value, nn.Module):
        return _holds_shards(value)
    return is_object(value) and not isinstance(value, LocalOptimizer)


def sharded_state(part: Part) -> dict[str, ShardedTensor]:
    """The sharded tensors in a module that is here, by their keys in the object's state."""
    if not isinstance(part.value, nn.Module):
        return {}
    state = module_state(part.value, part.is_own_only)
    return {part.prefix + name: item for name, item in state.items() if isinstance(item, ShardedTensor)}


def locks_itself(part: Part) -> bool:
    """Whether its state must be taken before parameters stand still: an optimizer that steps locks itself, then them."""
    return isinstance(part.value, LocalOptimizer)


@contextlib.contextmanager
def standing_still(parts: Sequence[Part]) -> Iterator[None]:
    """Nobody steps the parameters of those parts meanwhile."""
    with sharing.standing_still(_parameters_of(parts)):
        yield


@contextlib.contextmanager
def changing(parts: Sequence[Part]) -> Iterator[None]:
    """Nobody else changes the parameters of those parts meanwhile; contexts under way keep the values that they saw."""
    with sharing.stepping(_parameters_of(parts), ()), torch.no_grad():
        yield


def _parameters_of(parts: Sequence[Part]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for part in parts:
        if isinstance(part.value, nn.Module):
            parameters = part.value.parameters(recurse=not part.is_own_only)
            found += [item for item in parameters if not isinstance(item, ShardedTensor)]  # shards are other parts
        elif isinstance(part.value, torch.Tensor) and part.value.requires_grad:
            found.append(part.value)
    return found


# -- where the part is: does it fit? --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a saved state fits a part.

    Attributes:
        claimed: The keys that the part takes; None if it takes all.
        missing: Keys that the part wants and the checkpoint does not have.
        problems: What does not fit, one line each.
    """

    claimed: tuple[str, ...] | None = None
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def fit(part: Part, node: Node, entries: Mapping[str, TensorEntry], is_strict: bool) -> Fit:
    """Compares a part with what was saved. Changes nothing.

    Args:
        part: What is to be filled.
        node: The saved state of the whole object.
        entries: Of the tensors in it.
        is_strict: Whether dtypes must be the same.
    """
    value = part.value
    if isinstance(value, LocalOptimizer):
        return Fit(problems=_fit_local_optimizer(part, value, node, entries))
    if isinstance(value, nn.Module):
        return _fit_module(part, node, entries, is_strict)
    if isinstance(value, torch.Tensor):
        problem = compare(part.path, value, node, entries, is_strict)
        return Fit((), problems=(problem,) if problem else ())
    if isinstance(value, torch.optim.Optimizer):
        return Fit(problems=_fit_optimizer(part, node, entries))
    if is_object(value):
        return Fit(problems=_uncovered(part.path, node, entries))
    return Fit(problems=(f"'{part.path}' is a reference to a {type(value).__name__}, which cannot be filled",))


def _fit_module(part: Part, node: Node, entries: Mapping[str, TensorEntry], is_strict: bool) -> Fit:
    saved = items_of(node)
    if saved is None:
        return Fit(problems=(f"'{part.path}' was not saved as a module",))
    claimed, missing, problems = [], [], []
    for name, target in module_state(part.value, part.is_own_only).items():
        key = part.prefix + name
        if isinstance(target, ShardedTensor):
            continue  # its shards are parts of their own
        if key not in saved:
            missing.append(key)
            continue
        claimed.append(key)
        if isinstance(target, torch.Tensor) and not nn.parameter.is_lazy(target):
            problem = compare(join(part.path, key), target, saved[key], entries, is_strict)
            problems += [problem] if problem else []
        else:
            problems += _uncovered(join(part.path, key), saved[key], entries)
    return Fit(tuple(claimed), tuple(missing), tuple(problems))


def compare(where: str, target: torch.Tensor, node: Node, entries: Mapping[str, TensorEntry], is_strict: bool) -> str:
    """Why a saved value does not fit a tensor; empty if it does."""
    if not is_tensor(node):
        return f"'{where}' was not saved as a tensor"
    dtype, shape = form_of(node, entries)
    if tuple(target.shape) != shape:
        return f"'{where}' has shape {list(shape)} in the checkpoint and {list(target.shape)} here"
    if is_strict and NAMES.get(target.dtype) != dtype:
        return f"'{where}' is {dtype} in the checkpoint and {str(target.dtype).removeprefix('torch.')} here"
    return ""


def _uncovered(where: str, node: Node, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Tensors in pieces that are compared with nothing must be all there: otherwise they could be of any size."""
    if all(is_covered(body, entries) for body in bodies(node)):
        return ()
    return (f"'{where}' has a sharded tensor in the checkpoint of which parts are missing",)


# -- optimizers: the state of each parameter is compared with the parameter -----------------------------------------


def _fit_local_optimizer(
    part: Part, optimizer: LocalOptimizer, node: Node, entries: Mapping[str, TensorEntry]
) -> tuple[str, ...]:
    saved = items_of(node) or {}
    forms = {name: _forms(saved[name], entries) for name in part.names if name in saved}
    return tuple(f"'{part.path}': {problem}" for problem in optimizer.state_problems(forms))


def _fit_optimizer(part: Part, node: Node, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    saved = items_of(node) or {}
    groups = saved.get("param_groups")
    if not isinstance(groups, list):
        return (f"'{part.path}' was not saved as an optimizer of one process",)
    keys = [_items((items_of(group) or {}).get("params")) for group in groups]
    sizes = [len(found) for found in keys]
    if isinstance(part.value, ShardedOptimizer):
        here = [[item.value for item in group] for group in part.value._groups]  # param_groups have this rank's parts
    else:
        here = [group["params"] for group in part.value.param_groups]
    if sizes != [len(group) for group in here]:
        counts = [len(group) for group in here]
        return (f"'{part.path}' has groups of {sizes} parameters in the checkpoint and {counts} here",)
    if isinstance(part.value, ShardedOptimizer):
        return ()  # it goes by names, and compares before it loads
    state, kind = items_of(saved.get("state")) or {}, type(part.value)
    problems = []
    for key, parameter in zip(itertools.chain(*keys), itertools.chain(*here), strict=True):
        for name, form in _forms(state.get(key), entries).items():
            problem = state_problem(kind, parameter, name, form)
            problems += [f"'{part.path}': state {name!r} of parameter {key} {problem}"] if problem else []
    return tuple(problems)


def _items(node: Node) -> list[Any]:
    """The keys of the parameters of a group: numbers, or names."""
    found = decode(node, lambda name: name)
    return list(found) if isinstance(found, list | tuple) else []


def _forms(node: Node, entries: Mapping[str, TensorEntry]) -> dict[str, Form]:
    """What of a saved state is compared with the parameter that it is for."""
    found: dict[str, Form] = {}
    for key, item in (items_of(node) or {}).items():
        if is_tensor(item):
            dtype, shape = form_of(item, entries)
            found[str(key)] = shape, DTYPES[dtype].is_complex
        else:
            found[str(key)] = (tag_of(item) or "").removeprefix("$") or type(item).__name__
    return found
