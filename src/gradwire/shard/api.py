"""Shards tensors, parameters and whole modules.

Everything is checked before anything is changed; in a process group all ranks agree first. Then parameters are sharded
one by one, and each original is freed before the next one is sharded.
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


@interruptible  # the method may be user code
def _shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None
) -> ShardedTensor:
    """Shard a tensor with the method `shard` of the spec.

    Raises:
        TypeError: `sharding_spec` is not a `ShardingSpec`.
        ValueError: The tensor is not contiguous, cannot be sharded like this, or differs between ranks.
        RuntimeError: There is no process group, or this process is not an RPC worker.
    """
    if not isinstance(sharding_spec, ShardingSpec):
        raise TypeError(f"sharding_spec must be a ShardingSpec, not {type(sharding_spec).__name__}")
    return sharding_spec.shard(tensor, src_rank, process_group)


def shard_parameter(
    module: nn.Module, param_name: str, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None
) -> None:
    """Replace a parameter or buffer with a sharded tensor with the same values.

    Args:
        module: The module with the parameter. Submodules that share it get the sharded tensor, too.
        param_name: Name of the parameter, without dots.
        sharding_spec: How to shard it: over the ranks of a process group, each of which calls this, or over RPC workers.
        src_rank: The rank in the group whose values are used. On other ranks it may be on the ``meta`` device.
        process_group: The process group; None for the default group.

    Raises:
        AttributeError: The module has no such parameter.
        TypeError: `sharding_spec` is not a `ShardingSpec`.
        ValueError: The parameter is not a contiguous tensor, cannot be sharded like this, or the ranks' arguments differ.
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
    """Shard a module by a plan: its parameters, its submodules and its outputs.

    If the plan does not fit, the module is not changed on any rank. If ranks or workers are lost on the way, or a
    `Sharder` fails after it changed its submodule, the module may be half sharded.

    In a process group every rank runs the module on its own rows. A parameter that is not sharded has the same gradient
    on all ranks if it is part of a sharded operation, such as the bias of a sharded Linear. Otherwise, as in a LayerNorm
    between two of them, its gradient is that of the rank's rows: add these up, as in any data parallel training.

    Args:
        module: The module; in a process group every rank has one of the same structure, and calls this.
        plan: The plan. Tied parameters stay tied, even if the plan names only one of them.
        src_rank: The rank in the group whose values are used. Other ranks may have created the module on the ``meta``
            device: they get their shards, and the values of parameters that are not sharded.
        process_group: The process group; None for the default group.

    Raises:
        TypeError: An entry of the plan is neither a spec nor a `Sharder`, or a `Sharder` did not return a module.
        AttributeError: The module has no such parameter or submodule.
        KeyError: A `Sharder` has an empty path.
        RuntimeError: A `Sharder` and another entry overlap; or there is no process group, or this process is not an RPC
            worker.
        ValueError: A parameter cannot be sharded like this, or the ranks' arguments differ.
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
    """Redistribute a module's sharded output by another spec; plain outputs do not change. Return the module."""
    return _change_output(module, lambda output: output.redistribute(resharding_spec))


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """Make a module return plain tensors instead of sharded ones; plain outputs do not change. Return the module."""
    return _change_output(module, _collect)


def _change_output(module: nn.Module, change: Callable[[ShardedTensor], torch.Tensor]) -> nn.Module:
    def hook(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        return change(output) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def _collect(output: ShardedTensor) -> torch.Tensor:
    """Return the local shard, without a sharded dimension of length 1; over RPC workers, the whole tensor."""
    if not isinstance(output._backend, GroupBackend):
        return output.full_tensor()
    found, spec = output.local_tensor(), output.sharding_spec()
    if isinstance(spec, ChunkShardingSpec) and output.shape[spec.dim] == len(spec.placements):
        return found.squeeze(spec.dim) if found.shape[spec.dim] == 1 else found
    return found


@contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Use a process group for tensors created or loaded in this block. Blocks can be nested; the inner one applies."""
    token = current_process_group.set(process_group)
    try:
        yield process_group
    finally:
        current_process_group.reset(token)


def _get_current_process_group() -> Any:
    """Return the group of `load_with_process_group`, or the default one."""
    group = current_process_group.get()
    return group if group is not None else default_process_group()
