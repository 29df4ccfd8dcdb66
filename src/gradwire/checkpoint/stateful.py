"""Objects that are saved and filled: their state, whether a saved state fits them, and loading it.

An object is split into *parts*, one for each worker that holds some of it. `split` runs on the worker that saves or loads,
everything else on the worker that holds the part.

    RemoteModule, RRef              one part, on the owner
    nn.Module                       one part, here; if RemoteModules are inside it, one more for each
    a ShardedTensor, also inside    one part for each shard, where it is
    DistributedOptimizer            one part on each owner; options of its groups stay here
    anything with a state_dict      one part, here
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from gradwire import _torch
from gradwire._interrupts import interruptible
from gradwire.checkpoint import tree
from gradwire.checkpoint.index import DTYPES, NAMES
from gradwire.checkpoint.safetensors_io import TensorReader, stored
from gradwire.checkpoint.tree import Entries, Node, decode, dict_node, form_of, is_tensor, items_of, join, region_of
from gradwire.errors import CannotSave, CheckpointError, ConfigurationError
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer, LocalOptimizer, parameters
from gradwire.optim.parameters import PartOf
from gradwire.optim.state_dict import NamedState
from gradwire.rref import RRef
from gradwire.shard import ShardedTensor
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.layout import Box
from gradwire.shard.sharded_optim import ShardedOptimizer
from gradwire.shard.torch_optimizer import Form, beside, state_problem
from gradwire.types import is_class


class PartState(msgspec.Struct, frozen=True):
    """The state of a part: values on the worker that holds it, and nodes in the report on it."""

    kind: str  # module, tensor, optimizer or stateful
    type_name: str
    state: Any
    metadata: Any  # of a module, the versions of it and its submodules


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an object that one worker holds."""

    path: str  # of the object
    prefix: str  # prefix of the part's keys in the object's state
    value: Any  # the part itself, or a reference to it
    is_own_only: bool = False  # of a module, only its own tensors: its submodules are other parts
    names: tuple[str, ...] = ()  # of an optimizer, the parameters that it has on that worker
    state: PartState | None = None  # the state to save, if it is already known


def is_object(value: Any) -> bool:
    """Return whether a value is an object that a load fills."""
    if isinstance(value, RRef | nn.Module | torch.optim.Optimizer):
        return True
    has_both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has_both and not is_class(value)


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def split(path: str, value: Any) -> list[Part]:
    if isinstance(value, DistributedOptimizer):
        names: dict[str, list[str]] = {}
        for name, rref in value.named_parameters():
            names.setdefault(rref.owner_name(), []).append(name)
        return [
            Part(join(path, "state"), "", rref, names=tuple(names.get(rref.owner_name(), ())))
            for rref in value.remote_optimizers
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


# -- sharded tensors in objects -------------------------------------------------------------------------------------------


def shards_of(tensor: ShardedTensor) -> list[tuple[Box, Any]]:
    """Return the shards with elements that this process handles: its own in a process group, all over RPC workers."""
    return [(box, part) for box, part in zip(tensor._boxes(), tensor._parts, strict=True) if box.num_elements]


def find_sharded(value: Any, depth: int = 0) -> Iterator[ShardedTensor]:
    """Yield all sharded tensors in a state, also in modules and sharded optimizers."""
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        for item in items if depth <= tree.MAX_DEPTH else ():  # deeper ones are refused elsewhere, with an error
            yield from find_sharded(item, depth + 1)
    elif isinstance(value, nn.Module):
        for module in value.modules():
            yield from find_sharded(_torch.own_tensors(module))
            yield from (item for item in vars(module).values() if isinstance(item, ShardedTensor))
    elif isinstance(value, ShardedOptimizer):
        yield from find_sharded(value.named_params)


def group_of(state: Any, given: Any) -> Any:
    """Return the process group whose ranks save or load a state together; None if this process does it alone."""
    groups = [item._backend._group for item in find_sharded(state) if isinstance(item._backend, GroupBackend)]
    group = given if given is not None or not groups else groups[0]
    if any(item is not group for item in groups):
        raise ConfigurationError(
            "the sharded tensors are in different process groups; save one checkpoint for each group"
        )
    return group


def _has_sharded(module: nn.Module) -> bool:
    return next(find_sharded(module), None) is not None


def may_hold_shards(part: Part) -> bool:
    if isinstance(part.value, nn.Module):
        return _has_sharded(part.value)
    return is_object(part.value) and not isinstance(part.value, LocalOptimizer)


def sharded_state(part: Part) -> dict[str, ShardedTensor]:
    """Return the sharded tensors in a module that is here, by their keys in the object's state."""
    if not isinstance(part.value, nn.Module):
        return {}
    state = _module_state(part)
    return {part.prefix + name: item for name, item in state.items() if isinstance(item, ShardedTensor)}


# -- the state of a part --------------------------------------------------------------------------------------------------


def state_of(part: Part) -> PartState:
    value, name = part.value, type_name(part.value)
    if isinstance(value, LocalOptimizer):
        return PartState("optimizer", name, dict(value.named_state()), None)
    if isinstance(value, nn.Module):
        state = _module_state(part)
        values = {part.prefix + key: item for key, item in state.items()}
        versions = {(part.prefix + key).rstrip("."): dict(item) for key, item in _torch.metadata_of(state).items()}
        return PartState("module", name, values, versions)
    if isinstance(value, torch.Tensor):
        return PartState("tensor", name, value, None)
    if is_object(value):
        return PartState("stateful", name, _run(value.state_dict), None)
    raise CannotSave(
        f"'{part.path}' is a reference to a {name}, which has no state_dict; only references to tensors, modules and "
        "objects with state_dict and load_state_dict can be saved"
    )


def _module_state(part: Part) -> Any:
    keep_vars = _has_sharded(part.value)  # the sharded tensors themselves, not aliases of their memory
    if part.is_own_only:
        return _torch.own_state_dict(part.value, keep_vars)
    return _run(part.value.state_dict, keep_vars=keep_vars)


@interruptible  # user code, which may take long
def _run(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


def parameters_of(parts: Sequence[Part]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for part in parts:
        if isinstance(part.value, nn.Module):
            parameters = part.value.parameters(recurse=not part.is_own_only)
            found += [item for item in parameters if not isinstance(item, ShardedTensor)]  # shards are other parts
        elif isinstance(part.value, torch.Tensor) and part.value.requires_grad:
            found.append(part.value)
    return found


# -- comparison ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    claimed: tuple[str, ...] | None = None  # the keys that the part loads; None for all
    missing: tuple[str, ...] = ()  # keys of the part that the checkpoint does not have
    problems: tuple[str, ...] = ()  # one line for each mismatch


def fit(part: Part, node: Node, entries: Entries, is_strict: bool) -> Fit:
    """Compare a part with the saved state of its object, with `is_strict` also dtypes. Change nothing."""
    value = part.value
    if isinstance(value, LocalOptimizer):
        saved = items_of(node) or {}
        forms = {name: _forms(saved[name], entries) for name in part.names if name in saved}
        return Fit(problems=tuple(f"'{part.path}': {problem}" for problem in value.state_problems(forms)))
    if isinstance(value, nn.Module):
        return _fit_module(part, node, entries, is_strict)
    if isinstance(value, torch.Tensor):
        problem = compare(part.path, value, node, entries, is_strict)
        return Fit((), problems=(problem,) if problem else ())
    if isinstance(value, torch.optim.Optimizer):
        return Fit(problems=tuple(_optimizer_problems(part, node, entries)))
    if is_object(value):
        return Fit(problems=_uncovered(part.path, node, entries))
    return Fit(problems=(f"'{part.path}' is a reference to a {type(value).__name__}, which cannot be filled",))


def _fit_module(part: Part, node: Node, entries: Entries, is_strict: bool) -> Fit:
    saved = items_of(node)
    if saved is None:
        return Fit(problems=(f"'{part.path}' was not saved as a module",))
    claimed, missing, problems = [], [], []
    for name, target in _module_state(part).items():
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


def compare(where: str, target: torch.Tensor, node: Node, entries: Entries, is_strict: bool) -> str:
    """Return why a saved value does not fit a tensor; empty if it does."""
    if not is_tensor(node):
        return f"'{where}' was not saved as a tensor"
    dtype, shape = form_of(node, entries)
    if tuple(target.shape) != shape:
        return f"'{where}' has shape {list(shape)} in the checkpoint and {list(target.shape)} here"
    if is_strict and NAMES.get(target.dtype) != dtype:
        return f"'{where}' is {dtype} in the checkpoint and {str(target.dtype).removeprefix('torch.')} here"
    return ""


def _uncovered(where: str, node: Node, entries: Entries) -> tuple[str, ...]:
    """Return a problem if pieces of a tensor without a target are missing: it could have any size."""
    if all(tree.is_covered(body, entries) for body in tree.bodies(node)):
        return ()
    return (f"'{where}' is a sharded tensor in the checkpoint, and some of its shards are missing",)


def _optimizer_problems(part: Part, node: Node, entries: Entries) -> Iterator[str]:
    saved = items_of(node) or {}
    groups = saved.get("param_groups")
    if not isinstance(groups, list):
        yield f"'{part.path}' was not saved as an optimizer of one process"
        return
    keys = [decode((items_of(group) or {}).get("params")) for group in groups]  # numbers, or names
    keys = [found if isinstance(found, list | tuple) else () for found in keys]
    is_sharded = isinstance(part.value, ShardedOptimizer)
    if is_sharded:
        here = [[item.value for item in group] for group in part.value._groups]  # param_groups have this rank's parts
    else:
        here = [group["params"] for group in part.value.param_groups]
    sizes, counts = [len(found) for found in keys], [len(group) for group in here]
    if sizes != counts:
        yield f"'{part.path}' has groups of {sizes} parameters in the checkpoint and {counts} here"
        return
    if is_sharded:
        return  # it goes by names, and compares before it loads
    state = items_of(saved.get("state")) or {}
    for key, parameter in zip(itertools.chain(*keys), itertools.chain(*here), strict=True):
        for name, form in _forms(state.get(key), entries).items():
            if problem := state_problem(type(part.value), parameter, name, form):
                yield f"'{part.path}': state {name!r} of parameter {key} {problem}"


def _forms(node: Node, entries: Entries) -> dict[str, Form]:
    """Return what of a saved state is compared with the parameter that it is for."""
    found: dict[str, Form] = {}
    for key, item in (items_of(node) or {}).items():
        if is_tensor(item):
            dtype, shape = form_of(item, entries)
            found[str(key)] = shape, DTYPES[dtype].is_complex
        else:
            found[str(key)] = (tree.tag_of(item) or "").removeprefix("$") or type(item).__name__
    return found


# -- loading --------------------------------------------------------------------------------------------------------------

Filled = tuple[Part, Node, dict[str, Any] | None]
"""A part, the saved state of its object, and the versions of its modules."""


def fill_stateful(parts: Sequence[Filled], reader: TensorReader) -> None:
    """Load objects with a `load_state_dict` of their own that are not modules. If one refuses, put all back."""
    with contextlib.ExitStack() as undo:
        for part, node, _ in parts:
            if isinstance(part.value, nn.Module | torch.Tensor):
                continue
            try:
                _fill_object(part, node, reader, undo)
            except CheckpointError:
                raise
            except Exception as error:
                text = f"{type(part.value).__name__} rejected its state: {type(error).__name__}: {error}"
                raise CheckpointError(f"'{part.path}' was not loaded: {text}") from error
        undo.pop_all()


def _fill_object(part: Part, node: Node, reader: TensorReader, undo: contextlib.ExitStack) -> None:
    value = part.value
    if isinstance(value, LocalOptimizer):
        saved = items_of(node) or {}
        # One parameter after the other: the host holds the state of one of them at a time if they are on a device.
        state = {name: value.placed(name, reader.decode(saved[name])) for name in part.names if name in saved}
        undo.callback(value.load_named_state, value.named_state())
        value.load_named_state(state)
    else:
        undo.callback(value.load_state_dict, _run(value.state_dict))
        decode = _decode_state if isinstance(value, ShardedOptimizer) else _decode_beside
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        _run(value.load_state_dict, decode(value, node, reader) if is_optimizer else reader.decode(node))


def fill_tensors(parts: Sequence[Filled], reader: TensorReader) -> None:
    """Load modules and tensors, which are known to fit."""
    for part, node, metadata in parts:
        if isinstance(part.value, nn.Module):
            _fill_module(part, node, metadata or {}, reader)
        elif isinstance(part.value, torch.Tensor):
            tree.put(part.value, node, reader)


def _fill_module(part: Part, node: Node, metadata: dict[str, Any], reader: TensorReader) -> None:
    """Read from the files straight into the parameters, where the module copies from the state that it is given."""
    saved, copied = items_of(node) or {}, _copied_names(part)
    failures: list[CheckpointError] = []
    state: OrderedDict[str, Any] = OrderedDict()
    for name, target in _module_state(part).items():
        item = saved.get(part.prefix + name)
        if part.prefix + name not in saved or isinstance(target, ShardedTensor):
            continue
        if name in copied and isinstance(target, torch.Tensor) and is_tensor(item):
            dtype, shape = form_of(item, reader.entries)
            state[name] = stored(shape, DTYPES[dtype], functools.partial(tree.put, node=item, source=reader), failures)
        else:
            state[name] = reader.decode(item)
    # Torch would replace parameters instead of filling them if the metadata told it to.
    saved_versions = {
        key: {name: value for name, value in item.items() if name != "assign_to_params_buffers"}
        for key, item in metadata.items()
    }
    versions = {key[len(part.prefix) :]: item for key, item in saved_versions.items() if key.startswith(part.prefix)}
    versions.setdefault("", saved_versions.get(part.prefix.rstrip("."), {}))
    _torch.set_metadata(state, versions)
    try:
        if part.is_own_only:
            _run(_torch.load_own_state_dict, part.value, state, versions[""])
        else:
            _run(part.value.load_state_dict, state, strict=False)
    except RuntimeError as error:
        if failures:  # torch has made a line of text of it
            raise failures[0] from error
        raise


def _copied_names(part: Part) -> set[str]:
    """Return the names of what torch's own code loads: it copies from tensors of a state, and keeps none of them."""
    if not part.is_own_only and not _torch.is_method_of_module(part.value, "load_state_dict"):
        return set()
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in part.value.named_modules(remove_duplicate=False)
        if _torch.is_method_of_module(module, _torch.LOAD_OWN_STATE_DICT)
        for name in _torch.own_tensors(module)
    }


def _decode_beside(optimizer: torch.optim.Optimizer, node: Node, reader: TensorReader) -> Any:
    """Return the saved state of an optimizer, that of each parameter on the device of the parameter."""
    saved = dict(items_of(node) or {})
    by_key = items_of(saved.pop("state", None)) or {}
    found = reader.decode(dict_node(saved))
    keys = itertools.chain.from_iterable(group["params"] for group in found["param_groups"])
    params = dict(
        zip(keys, itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups), strict=False)
    )
    found["state"] = {}
    for key, item in by_key.items():
        values = reader.decode(item)
        found["state"][key] = beside(params[key], values) if key in params else values
    return found


# -- state of optimizers with sharded parameters --------------------------------------------------------------------------


def _decode_state(optimizer: ShardedOptimizer, node: Node, reader: TensorReader) -> Any:
    """Return the saved state of a sharded optimizer; what is as large as a sharded parameter is divided like it."""
    saved = dict(items_of(node) or {})
    by_key = items_of(saved.pop("state", None)) or {}
    state = reader.decode(dict_node(saved))
    names: dict[Any, str] = {}  # by the keys of their state: numbers in torch's form, else the names themselves
    for group in state.get("param_groups", ()):
        names.update(zip(group["params"], map(str, group.get("param_names") or group["params"]), strict=True))
    state["state"] = {
        key: {
            name: _decode_like(optimizer.named_params.get(names.get(key, "")), item, reader)
            for name, item in (items_of(values) or {}).items()
        }
        for key, values in by_key.items()
    }
    return state


def _decode_like(like: torch.Tensor | None, node: Node, reader: TensorReader) -> Any:
    if (
        not isinstance(like, ShardedTensor)
        or not is_tensor(node)
        or form_of(node, reader.entries)[1] != tuple(like.size())
    ):
        return reader.decode(node)
    parts = [reader.decode(region_of(node, box, reader.entries)) for box in like._boxes()]
    with torch.no_grad():
        return like._with_parts(parts, DTYPES[form_of(node, reader.entries)[0]])


def join_states(states: Mapping[str, Node], parts: Mapping[str, PartOf], entries: Entries) -> dict[str, Node]:
    """Return state by the names of whole parameters, from that of parameters and of parts."""
    join_values = functools.partial(_join, entries=entries)
    return _convert(states, parts, lambda state: parameters.join_states(state, parts, join_values))


def _join(items: Sequence[tuple[PartOf, Node]], entries: Entries) -> Node:
    """Return a tensor in pieces; of what does not have the size of the parts (a number of steps), the first."""
    forms = [form_of(node, entries) if is_tensor(node) else ("", None) for _, node in items]
    if any(shape != part.box.sizes for (part, _), (_, shape) in zip(items, forms, strict=True)):
        return items[0][1]
    return tree.sharded_node(
        forms[0][0], items[0][0].size, [(node["$tensor"], part.box.offsets) for part, node in items]
    )


def divide_states(states: Mapping[str, Node], parts: Mapping[str, PartOf], entries: Entries) -> dict[str, Node]:
    """Return state by the names of parts, from that of whole parameters."""
    cut = functools.partial(_divide, entries=entries)
    wholes = {part.whole for part in parts.values()}
    return _convert(states, wholes, lambda state: parameters.divide_states(state, parts, cut))


def _divide(node: Node, part: PartOf, entries: Entries) -> Node:
    if is_tensor(node) and form_of(node, entries)[1] == part.size:
        return region_of(node, part.box, entries)
    return node


def _convert(
    states: Mapping[str, Node], names: Container[str], convert: Callable[[NamedState], NamedState]
) -> dict[str, Node]:
    """Convert the states of some parameters, and keep the others as they are."""
    converted = convert({name: items_of(node) or {} for name, node in states.items() if name in names})
    kept = {name: node for name, node in states.items() if name not in names}
    return kept | {name: dict_node(values) for name, values in converted.items()}
