"""Shards tensors, parameters and whole modules.

Everything is checked before anything is changed; in a process group all ranks agree first. Then parameters are divided one
after the other, and each original is freed before the next one's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gradwire._interrupts import interruptible
from gradwire._torch import default_process_group
from gradwire.shard.apply_plan import (
    Steps,
    check_module,
    divide_parameters,
    prepare,
    read_parameter,
    read_plan,
    run_sharders,
    send_lacking,
    slots_of_tensors,
    specs_in,
)
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.placement import current_process_group
from gradwire.shard.sharding_plan import ShardingPlan
from gradwire.shard.sharding_spec import ChunkShardingSpec, ShardingSpec
from gradwire.shard.tensor import ShardedTensor

__all__ = ["_shard_tensor", "load_with_process_group", "shard_module", "shard_parameter"]


@interruptible  # the method may be that of a class of the program
def _shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None
) -> ShardedTensor:
    """Divide a tensor with the method `shard` of the spec.

    Raises:
        TypeError: `sharding_spec` is not a `ShardingSpec`.
        ValueError: The tensor is not contiguous, cannot be divided like this, or is different on some ranks.
        RuntimeError: There is no process group, or this process is not an RPC worker.
    """
    if not isinstance(sharding_spec, ShardingSpec):
        raise TypeError(f"sharding_spec must be a ShardingSpec, not {type(sharding_spec).__name__}")
    return sharding_spec.shard(tensor, src_rank, process_group)


def shard_parameter(
    module: nn.Module, param_name: str, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None
) -> None:
    """Replace a parameter, or a buffer, by a sharded tensor of the same values.

    Args:
        module: Has the parameter. If submodules have it, too, they get the sharded one, too.
        param_name: Its name, without dots.
        sharding_spec: How to divide it: among the ranks of a process group, each of which calls this, or among RPC workers.
        src_rank: The rank in the group whose values count. The others' may be on the ``meta`` device.
        process_group: The ranks; None for the default group.

    Raises:
        AttributeError: The module has no such parameter.
        TypeError: `sharding_spec` is not a `ShardingSpec`.
        ValueError: The parameter is not a contiguous tensor, cannot be divided like this, or ranks want different things.
        RuntimeError: There is no process group, or this process is not an RPC worker.
    """

    def read() -> Steps:
        check_module(module)
        if not isinstance(sharding_spec, ShardingSpec):
            raise TypeError(f"Only `ShardingSpec` is supported to shard '{param_name}', not {sharding_spec!r}")
        if "." in param_name:
            raise AttributeError(
                f"{type(module).__name__} has no attribute `{param_name}`; pass the submodule that has it"
            )
        return Steps([read_parameter(module, param_name, sharding_spec, slots_of_tensors(module))])

    divide_parameters(prepare(module, read, [sharding_spec], src_rank, process_group), src_rank)


def shard_module(module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: Any = None) -> None:
    """Shard a module by a plan: its parameters, its submodules, what becomes of its outputs.

    If it raises because the plan does not fit, the module is as it was, on every rank. If ranks or workers are lost in the
    middle, or a `Sharder` fails after it changed its submodule, it is not.

    In a process group every rank runs the module on rows of its own. A parameter that stays whole has the same gradient on
    all ranks if it is part of a sharded operation, such as the bias of a sharded Linear. If it is not, such as that of a
    LayerNorm between two of them, its gradient is that of the rank's rows: add these up, as in any data parallel training.

    Args:
        module: The module; in a process group every rank has one of the same structure, and calls this.
        plan: What to do. Tied parameters stay tied, also if the plan names only one of them.
        src_rank: The rank in the group whose values count. Other ranks may have made the module on the ``meta`` device: they
            get their shards, and the values of what stays whole.
        process_group: The ranks; None for the default group.

    Raises:
        TypeError: Something in the plan is neither a spec nor a `Sharder`, or a `Sharder` did not return a module.
        AttributeError: The module has no such parameter or submodule.
        KeyError: A `Sharder` is to replace the module itself.
        RuntimeError: A `Sharder` and another entry are about the same part of the module; or there is no process group, or
            this process is not an RPC worker.
        ValueError: A parameter cannot be divided like this, or ranks want different things.
    """
    work = prepare(module, lambda: read_plan(module, plan), specs_in(plan), src_rank, process_group)
    replacements = run_sharders(work)
    divide_parameters(work, src_rank)
    send_lacking(work, module, src_rank)
    for step, made in zip(work.steps.sharders, replacements, strict=True):
        step.replace(made)
    for path, spec in work.steps.outputs.items():
        _reshard_output(module.get_submodule(path), spec)
    for path in work.steps.local_outputs:
        _collect_local_shard(module.get_submodule(path))


def _reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Redistribute a module's sharded output by another spec; leave a plain one as it is. Return the module."""
    return _change_output(module, lambda output: output.redistribute(resharding_spec))


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """Let a module return a plain tensor for a sharded one; leave a plain one as it is. Return the module."""
    return _change_output(module, _collect)


def _change_output(module: nn.Module, change: Callable[[ShardedTensor], torch.Tensor]) -> nn.Module:
    def hook(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        return change(output) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def _collect(output: ShardedTensor) -> torch.Tensor:
    """Return what the rank has, without the dimension that is cut into slices of length 1; all of it over RPC workers."""
    if not isinstance(output._backend, GroupBackend):
        return output.full_tensor()
    found, spec = output.local_tensor(), output.sharding_spec()
    if isinstance(spec, ChunkShardingSpec) and output.shape[spec.dim] == len(spec.placements):
        return found.squeeze(spec.dim) if found.shape[spec.dim] == 1 else found
    return found


@contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Use a process group for what is made or loaded in this block. Blocks can be nested; the inner one counts."""
    token = current_process_group.set(process_group)
    try:
        yield process_group
    finally:
        current_process_group.reset(token)


def _get_current_process_group() -> Any:
    """Return the group of `load_with_process_group`, or the default one."""
    group = current_process_group.get()
    return group if group is not None else default_process_group()
