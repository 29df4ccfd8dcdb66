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
    return LIMITS.get(case) or OPEN.get(case)
