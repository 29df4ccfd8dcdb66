"""Names of `torch.distributed._shard`, with the parameters that PyTorch's have."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

import gradwire.shard
from gradwire.shard import sharding_spec

NAMES = {
    "": "_shard_tensor shard_parameter shard_module load_with_process_group",
    "api": "_reshard_output _collect_local_shard _get_current_process_group",
    "sharder": "Sharder",
    "sharding_plan": "ShardingPlan ShardingPlanner",
    "metadata": "ShardMetadata",
    "sharding_spec": "DevicePlacementSpec ChunkShardingSpec EnumerableShardingSpec PlacementSpec ShardingSpec "
    "_infer_sharding_spec_from_shards_metadata",
    "sharded_tensor": "init_from_local_shards state_dict_hook pre_load_state_dict_hook custom_sharded_op_impl "
    "_sharded_op_impl Shard TensorProperties ShardedTensorMetadata",
    "sharded_tensor.utils": "build_metadata_from_local_shards build_global_metadata "
    "recalc_global_sharded_tensor_metadata _parse_and_validate_remote_device",
    "sharded_tensor.reshard": "get_idx_from_placements build_reshard_metadata reshuffle_local_shard reshard_local_shard",
    "sharded_optim": "ShardedOptimizer named_params_with_sharded_tensor",
    "_utils": "narrow_tensor_by_index narrow_tensor",
}


def find(path: str) -> Any:
    found: Any = gradwire.shard
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


def parameters(value: Any) -> list[str]:
    return list(inspect.signature(value).parameters)


@pytest.mark.filterwarnings("ignore")  # PyTorch's modules say that they are deprecated
@pytest.mark.parametrize("path", NAMES)
def test_parameters_are_those_of_pytorch(path: str) -> None:
    theirs = importlib.import_module(f"torch.distributed._shard{'.' + path if path else ''}")
    for name in NAMES[path].split():
        assert parameters(getattr(find(path), name)) == parameters(getattr(theirs, name)), name


@pytest.mark.filterwarnings("ignore")
def test_helpers_of_specs_are_in_the_module_of_specs() -> None:
    for module in ("api", "_internals"):
        theirs = importlib.import_module(f"torch.distributed._shard.sharding_spec.{module}")
        for name in (
            "custom_sharding_spec_op",
            "validate_non_overlapping_shards_metadata",
            "check_tensor",
            "get_split_size",
            "get_chunked_dim_size",
            "get_chunk_sharding_params",
        ):
            if hasattr(theirs, name) and inspect.getmodule(getattr(theirs, name)) is theirs:
                assert parameters(getattr(sharding_spec, name)) == parameters(getattr(theirs, name)), name
