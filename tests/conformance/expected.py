"""The tests of PyTorch that do not pass on gradwire, each with the reason.

`LIMITS` are tests that hold torch to a limit which gradwire does not have, or to work that it spares: they cannot pass, and
should not. `OPEN` is what is left. A listed test that passes makes ``make conformance`` fail, so the list stays true.
"""

from __future__ import annotations

LIMITS = {
    "DistAutogradTest.test_backward_unused_send_function": (
        "asserts that a pass with an unused result hangs; SMART mode ends it"
    ),
    "DistAutogradTest.test_nested_context": "asserts that contexts do not nest; here they do",
    "DistAutogradTest.test_no_grad_copy": (
        "asserts two copies where two leaves get one gradient; one is enough for them not to share it"
    ),
    "DistAutogradTest.test_no_grad_copy_sparse": "as test_no_grad_copy: asserts a copy that is not needed",
    "DistAutogradTest.test_dist_autograd_profiling": (
        "asserts that the profile shows the send of two leaves; their gradients arrive and are added without a run of "
        "the engine, so there is no such event"
    ),
    "RpcTest.test_callback_wrong_arg_num": (
        "asserts that what a callback raises becomes a RuntimeError; here it keeps its type (TypeError)"
    ),
    "RpcTest.test_callback_wrong_arg_type": "as test_callback_wrong_arg_num: the type is kept",
    "RpcTest.test_custom_exception_throw_during_reconstruction": (
        "asserts that an exception whose constructor takes more than a text cannot be brought over; here it arrives as "
        "its own type"
    ),
    "RpcTest.test_non_cont_tensors": (
        "asserts that a view arrives with the whole storage behind it; only the elements that it shows are sent, so it "
        "is contiguous"
    ),
    "RpcTest.test_rref_timeout": (
        "asserts that a value whose creation timed out is made and kept all the same; here the callee is told to drop it"
    ),
    "TensorPipeAgentRpcTest.test_dynamic_and_static_init_rpc_together": (
        "asserts that a worker cannot join a world that has met; here it can, and both sides can call each other"
    ),
    "RemoteModuleTest.test_unsupported_methods": (
        "asserts that parameters, state_dict, to and others are refused; gradwire.nn.RemoteModule has them"
    ),
    "ThreeWorkersRemoteModuleTest.test_send_remote_module_over_the_wire": (
        "asserts which attributes a RemoteModule has that arrived: torch's is no complete nn.Module there, gradwire's is"
    ),
}

SHARD_LIMITS = {
    "TestShardParameter.test_shard_parameter_errors": (
        "asserts that an EnumerableShardingSpec cannot divide a tensor; here it can, and the one of this test is refused "
        "because it leaves a gap"
    ),
    "TestShardTensor.test_shard_tensor_errors": "as test_shard_parameter_errors: any spec divides a tensor",
    "TestLocalTensor.test_local_tensor_error": (
        "asserts that a rank with several shards has no local tensor; here shards that make up a box are joined"
    ),
    "TestShardedTensorBinaryOps.test_torch_equal_tensor_specs": (
        "asserts that tensors of the same values differ if only one needs a gradient, or is pinned; here values count"
    ),
    "TestShardedTensorBinaryOps.test_torch_allclose_tensor_specs": "as test_torch_equal_tensor_specs: values count",
    "TestShardedTensorChunked.test_invalid_sharding": (
        "asserts that the sum of a sharded and a plain tensor is not supported; here it is"
    ),
    "TestShardedTensorChunked.test_invalid_pg_rpc_ranks": (
        "asserts that RPC ranks must be those of the process group; here ranks tell each other which worker they are"
    ),
    "TestReshard.test_sharded_tensor_reshard_errors": (
        "asserts that only chunks, one on each rank, can be divided in another way; here any layout can"
    ),
    "TestCustomSharder.test_custom_sharder": (
        "the module that the Sharder makes has no forward, which torch does not notice, as it runs the original; here the "
        "module takes the place of the original"
    ),
}
"""The same for the tests in a checkout of PyTorch's sources."""

SHARD_LEFT_OUT = {
    "TestShardedTensorChunked.test_sharded_tensor_metadata": "pinned memory needs an accelerator",
    "TestShardedTensorEnumerable.test_sharded_tensor_metadata": "pinned memory needs an accelerator",
    "TestShardedTensorFromLocalShards.test_init_from_local_shards_invalid_pin_memory": (
        "pinned memory needs an accelerator"
    ),
    "TestShardedTensorEnumerable.test_sharded_tensor_to_cpu": "moves a tensor from GPUs",
    "TestShardedTensorEnumerable.test_sharded_tensor_to_cuda": "moves a tensor to GPUs",
    "TestShardedTensorEnumerable.test_sharded_tensor_to_test": "moves a tensor from and to GPUs",
    "TestShardedTensorFromLocalShards.test_init_from_local_shards_invalid_local_shards": "has a shard on another device",
    "TestShardedTensorFromLocalShards.test_init_from_local_shards_and_global_metadata_invalid_shards": (
        "has a shard on another device"
    ),
    "TestShardedEmbeddingBag.test_sharded_embedding_bag_colwise": (
        "its offsets do not begin with 0, which torch refuses on the CPU before it looks at anything sharded"
    ),
    "TestShardedEmbeddingBag.test_sharded_embedding_bag_rowwise": "as test_sharded_embedding_bag_colwise",
}
"""Tests in a checkout that cannot pass without GPUs, not even on torch itself; they are not run."""

OPEN = {
    "RpcTest.test_server_process_global_profiler": (
        "a profile of all that a worker does for others is not offered; a caller's profile has what was done for it"
    ),
    "RpcTest.test_shutdown_errors": (
        "replaces a private step of torch's own gathering (_broadcast_to_followers), which does not exist here"
    ),
    "TensorPipeAgentRpcTest.test_op_with_invalid_args": (
        "wrong arguments for an operator are TorchScript's RuntimeError in torch; here the operator's own TypeError"
    ),
    "RemoteModuleTest.test_forward_async": "its second half scripts the RemoteModule; TorchScript is left out",
    "RemoteModuleTest.test_forward_sync": "as test_forward_async: scripts the module",
}


def reason_of(case: str) -> str | None:
    """Why a test is expected to fail; None if it is not."""
    return LIMITS.get(case) or SHARD_LIMITS.get(case) or OPEN.get(case)
