"""`torch.distributed._shard` on gradwire, and what in torch uses it: each in a program of its own, which imports it anew."""

from __future__ import annotations

import sys
import textwrap

import quick_python

IMPORTED_LATER = """
    import sys
    import gradwire.compat

    gradwire.compat.install()
    assert "torch.distributed._shard" not in sys.modules

    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor, custom_sharded_op_impl
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, ShardingSpec
    from torch.distributed.checkpoint.planner_helpers import ShardedTensor as known_to_checkpoints
    from torch.distributed.fsdp._fsdp_extensions import Shard as known_to_fsdp
    from gradwire import shard
    from gradwire.shard import dispatch

    assert ShardedTensor is known_to_checkpoints is shard.ShardedTensor
    assert known_to_fsdp is shard.Shard
    assert ChunkShardingSpec is shard.ChunkShardingSpec
    assert not dispatch._custom and not dispatch._custom_by_spec, "torch's operations are registered with torch"
    custom_sharded_op_impl(torch.cumsum)(lambda types, args, kwargs, process_group: None)
    assert torch.cumsum in dispatch._custom

    gradwire.compat.uninstall()
    import torch.distributed._shard.sharding_spec as specs
    from torch.distributed._shard.sharded_tensor import api
    assert specs.ChunkShardingSpec is not ChunkShardingSpec
    assert issubclass(specs.ChunkShardingSpec, specs.ShardingSpec), "torch's classes derive from torch's"
    assert torch.nn.functional.embedding in specs.api._CUSTOM_SHARDING_SPEC_OPS["ChunkShardingSpec"]
    assert torch.equal in api._SHARDED_OPS
"""

USED_BY_TORCH = """
    import os
    import tempfile
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
    import gradwire
    import gradwire.compat

    ROWS = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])

    def check_pickle(path):
        loaded = torch.load(path, weights_only=False)
        assert isinstance(loaded, gradwire.shard.ShardedTensor)
        assert isinstance(loaded.sharding_spec(), gradwire.shard.ChunkShardingSpec)
        assert torch.equal((loaded + 1).full_tensor(), torch.full((5, 3), 3.0))

    def check_tensor(folder):
        saved = sharded_tensor.rand(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 5, 3)
        assert isinstance(saved, gradwire.shard.ShardedTensor)
        dcp.save({"table": saved}, checkpoint_id=folder)
        loaded = {"table": sharded_tensor.zeros(ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"]), 5, 3)}
        dcp.load(loaded, checkpoint_id=folder)
        assert torch.equal(loaded["table"], saved)

    def check_model(folder):
        model = FSDP(torch.nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=True)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            assert all(isinstance(item, gradwire.shard.ShardedTensor) for item in state.values()), state
            dcp.save(state, checkpoint_id=folder)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            state = model.state_dict()
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state)
        assert all(map(torch.equal, model.parameters(), before))

    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = 0 if child else 1
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        torch.save(sharded_tensor.full(ROWS, [5, 3], 2.0), f"{folder}/pickle{rank}")  # torch's own
        gradwire.compat.install()
        check_pickle(f"{folder}/pickle{rank}")
        check_tensor(f"{folder}/tensor")
        check_model(f"{folder}/model")
        dist.barrier()
        dist.destroy_process_group()
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def run(program: str) -> None:
    done = quick_python.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_imported_later_are_gradwire_s_and_torch_s_own_stay_whole() -> None:
    run(IMPORTED_LATER)


def test_checkpoints_and_state_dicts_of_torch_work_with_gradwire_s_tensors() -> None:
    run(USED_BY_TORCH)
