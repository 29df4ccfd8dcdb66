"""Names inside torch that gradwire relies on (`gradwire._torch`): each test fails by name when torch changes one."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer

from gradwire import _torch
from gradwire._torch import Carried

# -- used by wire -------------------------------------------------------------------------------------------------------


def test_is_functorch_wrapped_tensor() -> None:
    seen: list[bool] = []

    def note(row: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_functorch_wrapped_tensor(row))
        return row

    torch.vmap(note)(torch.ones(2, 2))
    assert seen == [True]
    assert not _torch.is_functorch_wrapped_tensor(torch.ones(2))


def test_is_functional_tensor() -> None:
    seen: list[bool] = []

    def note(value: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_functional_tensor(value) or _torch.is_functorch_wrapped_tensor(value))
        return value

    torch.func.functionalize(note)(torch.ones(2))
    assert seen == [True]
    assert not _torch.is_functional_tensor(torch.ones(2))


def test_neg_view() -> None:
    value = torch.ones(2)
    negative = _torch.neg_view(value)
    assert negative.is_neg()
    assert negative.tolist() == [-1.0, -1.0]
    assert negative.data_ptr() == value.data_ptr()


def test_coo_indices_and_coo_values() -> None:
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    assert not twice.is_coalesced()
    assert _torch.coo_indices(twice).tolist() == [[1, 1]]
    assert _torch.coo_values(twice).tolist() == [1.0, 2.0]


def test_privateuse1_backend_name() -> None:
    assert isinstance(_torch.privateuse1_backend_name(), str)


class Guarded(torch.Tensor):
    text = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("not to be called")


def test_disable_torch_function_subclass() -> None:
    value = torch.ones(2).as_subclass(Guarded)
    with pytest.raises(RuntimeError, match="not to be called"):
        value.sum()
    with _torch.DisableTorchFunctionSubclass():
        assert value.sum().item() == 2.0


def test_make_subclass() -> None:
    plain = torch.ones(2)
    made = _torch.make_subclass(Guarded, plain, True)
    with _torch.DisableTorchFunctionSubclass():
        assert type(made) is Guarded
        assert made.is_leaf
        assert made.requires_grad
        assert made.data_ptr() == plain.data_ptr()


def test_get_obj_state_and_set_obj_state() -> None:
    value, other = torch.ones(2), torch.ones(2)
    assert not _torch.get_obj_state(value)
    value.text = "kept"  # type: ignore[attr-defined]
    _torch.set_obj_state(other, _torch.get_obj_state(value))
    assert other.text == "kept"  # type: ignore[attr-defined]


def test_untyped_storage_of_and_make_typed_storage() -> None:
    untyped = torch.arange(3, dtype=torch.int32).untyped_storage()
    typed = _torch.make_typed_storage(untyped, torch.int32)
    assert (typed.dtype, _torch.untyped_storage_of(typed).nbytes()) == (torch.int32, 12)
    assert _torch.untyped_storage_of(typed).data_ptr() == untyped.data_ptr()


# -- used by shard -------------------------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "asked"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError


def test_shard_disable_torch_function_subclass() -> None:
    made = _torch.make_wrapper_subclass(Wrapper, (2, 3), dtype=torch.float64)
    assert made.dim() == "asked"
    with _torch.DisableTorchFunctionSubclass():
        assert made.dim() == 2


def test_shard_make_wrapper_subclass() -> None:
    made = _torch.make_wrapper_subclass(
        Wrapper, torch.Size([2, 3]), dtype=torch.int32, layout=torch.strided, device="cpu", requires_grad=False
    )
    assert type(made) is Wrapper
    with _torch.DisableTorchFunctionSubclass():
        assert (list(made.size()), made.dtype, made.device.type) == ([2, 3], torch.int32, "cpu")


def test_shard_has_compatible_shallow_copy_type() -> None:
    assert _torch.has_compatible_shallow_copy_type(torch.zeros(2), torch.zeros(3))


def test_shard_is_view() -> None:
    tensor = torch.zeros(4)
    assert _torch.is_view(tensor[1:])
    assert not _torch.is_view(tensor)


def test_shard_calculate_correct_fan() -> None:
    assert [_torch.calculate_correct_fan(torch.zeros(5, 3), mode) for mode in ("fan_in", "fan_out")] == [3, 5]


def test_shard_is_profiler_enabled() -> None:
    assert not _torch.is_profiler_enabled()
    with torch.autograd.profiler.profile():
        assert _torch.is_profiler_enabled()


def test_shard_children_of() -> None:
    layer = nn.Linear(1, 1)
    module = nn.Module()
    module.first, module.second = layer, layer
    module.register_module("third", None)
    assert _torch.children_of(module) == {"first": layer, "second": layer, "third": None}


@pytest.mark.parametrize("name", ["step", "state_dict", "load_state_dict"])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_shard_optimizer_hooks(name: str, when: str) -> None:
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert _torch.optimizer_hooks(sgd, f"{name}_{when}") == []

    def hook(*args: Any) -> None: ...

    getattr(sgd, f"register_{name}_{when}_hook")(hook)
    assert _torch.optimizer_hooks(sgd, f"{name}_{when}") == [hook]


@pytest.mark.parametrize("when", ["pre", "post"])
def test_shard_has_global_optimizer_hooks(when: str) -> None:
    assert not _torch.has_global_optimizer_hooks()
    register = getattr(optimizer, f"register_optimizer_step_{when}_hook")
    handle = register(lambda *args: None)
    assert _torch.has_global_optimizer_hooks()
    handle.remove()
    assert not _torch.has_global_optimizer_hooks()


def test_shard_default_process_group() -> None:
    with pytest.raises(ValueError, match="has not been initialized"):
        _torch.default_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _torch.default_process_group() is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_shard_store_of_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = dist.new_group([0])
        _torch.store_of_group(dist.group.WORLD).set("key", "all")
        _torch.store_of_group(part).set("key", "part")
        assert _torch.store_of_group(dist.group.WORLD).get("key") == b"all"
        assert _torch.store_of_group(part).get("key") == b"part"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_shard_is_gloo_group(backend: str | None) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _torch.is_gloo_group(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_shard_group_without_gloo() -> None:
    assert not _torch.is_gloo_group(dist.ProcessGroup(dist.HashStore(), 0, 1))


def test_shard_remote_device() -> None:
    rank, worker = _torch.RemoteDevice("rank:1/cpu"), _torch.RemoteDevice("worker1/cuda:0")
    assert (rank.rank(), rank.worker_name(), rank.device()) == (1, None, torch.device("cpu"))
    assert (worker.rank(), worker.worker_name(), worker.device()) == (None, "worker1", torch.device("cuda:0"))
    assert str(rank) == "rank:1/cpu"
    assert rank == _torch.RemoteDevice("rank:1/cpu")


# -- used by checkpoint ---------------------------------------------------------------------------------------------------


class Overriding(nn.Linear):
    """Loads in a way of its own."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def make_nested() -> nn.Module:
    module = nn.BatchNorm1d(3)
    module.add_module("inner", nn.Linear(2, 2))
    return module


def test_own_tensors_are_parameters_and_buffers() -> None:
    module = make_nested()
    module.register_parameter("none", None)
    names = ["weight", "bias", "none", "running_mean", "running_var", "num_batches_tracked"]
    assert list(_torch.own_tensors(module)) == names
    assert _torch.own_tensors(module)["weight"] is module.weight
    assert _torch.own_tensors(module)["running_var"] is module.running_var


def test_is_method_of_module_sees_overrides() -> None:
    for module, is_torchs in ((nn.Linear(1, 1), True), (Overriding(1, 1), False)):
        assert _torch.is_method_of_module(module, _torch.LOAD_OWN_STATE_DICT) is is_torchs
        assert _torch.is_method_of_module(module, "load_state_dict")
    assert callable(nn.Module._load_from_state_dict)
    replaced = nn.Linear(1, 1)
    replaced.load_state_dict = lambda *_, **__: None
    assert not _torch.is_method_of_module(replaced, "load_state_dict")


def test_own_state_dict_leaves_submodules_out() -> None:
    module = make_nested()
    state = _torch.own_state_dict(module, keep_vars=True)
    assert list(state) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert state["weight"] is module.weight
    assert _torch.metadata_of(state) == {"": _torch.metadata_of(module.state_dict())[""]}


def test_load_own_state_dict_leaves_submodules_out_and_collects_errors() -> None:
    module, other = make_nested(), make_nested()
    inner = other.inner.weight.clone()
    with torch.no_grad():
        module.weight.fill_(5)
    _torch.load_own_state_dict(other, module.state_dict(), {"version": 2})
    assert other.weight.tolist() == [5, 5, 5]
    assert torch.equal(other.inner.weight, inner)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        _torch.load_own_state_dict(other, {"weight": torch.zeros(1)}, {})


def test_metadata_is_kept_in_state_dicts_and_reaches_modules() -> None:
    module, seen = nn.Sequential(nn.BatchNorm1d(1)), []
    state = module.state_dict()
    assert _torch.metadata_of(state)["0"]["version"] == nn.BatchNorm1d._version
    module[0].register_load_state_dict_pre_hook(lambda _, state, prefix, metadata, *rest: seen.append(metadata))
    _torch.set_metadata(state, {"": {}, "0": {"version": 7}})
    module.load_state_dict(state)
    assert [found["version"] for found in seen] == [7]


# -- used by rref -----------------------------------------------------------------------------------------------------


def test_cpp_list_refers_to_its_tensors_from_cpp() -> None:
    leaf = torch.ones(2, requires_grad=True)
    before = leaf._use_count()  # type: ignore[attr-defined]
    kept = _torch.CppList([leaf])
    assert leaf._use_count() == before + 1  # type: ignore[attr-defined]
    assert kept[0] is leaf


def test_storage_use_count_sees_views() -> None:
    value = torch.ones(4)
    storage = value.untyped_storage()
    assert _torch.storage_use_count(storage) == 2  # the tensor and the variable
    view = value[2:]
    assert _torch.storage_use_count(storage) == 3
    del view
    assert _torch.storage_use_count(storage) == 2


# -- used by optim ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_hooks_of_optimizers_are_in_tables_of_these_names(when: str) -> None:
    """`DistributedOptimizer` inherits the tables, and calls what is in them."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)

    def hook(*_: Any) -> None: ...

    getattr(optimizer, f"register_{when}_hook")(hook)
    assert list(getattr(optimizer, f"_optimizer_{when}_hooks").values()) == [hook]


def test_profile_hook_step_runs_the_hooks_around_a_step() -> None:
    seen = []

    class Optimizer(torch.optim.SGD):
        def _step(self) -> None:
            seen.append("step")

        _step_watched = torch.optim.Optimizer.profile_hook_step(_step)

    optimizer = Optimizer([torch.ones(1)], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer._step_watched()
    assert seen == ["before", "step", "after"]


# -- used by nn ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("forward_pre", "_forward_pre_hooks"),
        ("forward", "_forward_hooks"),
        ("full_backward_pre", "_backward_pre_hooks"),
        ("full_backward", "_backward_hooks"),
    ],
)
def test_hooks_of_modules_are_in_tables_of_these_names(kind: str, table: str) -> None:
    module = torch.nn.ReLU()
    getattr(module, f"register_{kind}_hook")(lambda *_: None)
    assert len(getattr(module, table)) == 1


# -- used by compat --------------------------------------------------------------------------------------------------------


def test_wait_for() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(3)
    assert _torch.wait_for(future) == 3


def test_call_when_done() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    seen: list[Any] = []
    _torch.call_when_done(future, lambda done: seen.append(_torch.wait_for(done)))
    future.set_result(3)
    _torch.call_when_done(future, lambda done: seen.append(_torch.wait_for(done)))
    assert seen == [3, 3]


def test_is_profiler_enabled() -> None:
    assert not _torch.is_profiler_enabled()
    with torch.autograd.profiler_legacy.profile():
        assert _torch.is_profiler_enabled()


def test_find_builtin() -> None:
    assert _torch.find_builtin(torch.add) == "aten::add"
    assert _torch.find_builtin(test_find_builtin) is None


def test_qualified_name() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated in newer releases
        script = torch.jit.script(double)
    assert _torch.qualified_name(script).startswith("__torch__.")
    assert _torch.qualified_name(script).endswith("double")


def test_end_event_with() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    with torch.autograd.profiler_legacy.profile() as profile:
        event = torch.autograd.profiler.record_function("event")
        event.__enter__()
        ended = _torch.end_event_with(event, future)
        assert not ended.done()
        future.set_result(3)
        assert ended.wait() == 3
    assert "event" in [item.name for item in profile.function_events]


def test_backward_class_has_the_name_of_the_nodes() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    result = Double.apply(torch.ones(1, requires_grad=True))  # type: ignore[no-untyped-call]
    assert type(result.grad_fn) is _torch.backward_class(Double)
    assert result.grad_fn.name() == _torch.backward_class(Double).__name__


def test_distributed_rpc() -> None:
    found = _torch.distributed_rpc()
    assert isinstance(found, types.ModuleType)
    assert found._is_current_rpc_agent_set() is False
    assert callable(found._set_profiler_node_id)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


# -- used by autograd and params -------------------------------------------------------------------------------------------


def test_run_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    arguments: tuple[Any, ...] = ((x * 3).sum(),), (torch.ones(()),), False, False, (x,)
    (found,) = _torch.run_backward(*arguments, allow_unreachable=True, accumulate_grad=False)
    assert found.tolist() == [3.0, 3.0]
    assert x.grad is None


def test_private_backend_name() -> None:
    name = _torch.private_backend_name()
    assert torch.device(f"{name}:1").type == name
    assert not torch.is_autocast_enabled(name)  # a type that autocast knows, although no such backend is there


def test_is_any_autocast_enabled() -> None:
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.is_any_autocast_enabled()


def test_set_grad_mode() -> None:
    _torch.set_grad_mode(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        _torch.set_grad_mode(True)
    assert torch.is_grad_enabled()


def test_function_apply() -> None:
    x = torch.ones(2, requires_grad=True)
    _torch.function_apply(Doubled)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_backward_class() -> None:
    before = _torch.backward_class(Doubled)
    other = type("Other", (before,), {"is_ours": True, "apply": lambda _, gradient: gradient * 5})
    _torch.set_backward_class(Doubled, other)
    try:
        x = torch.ones(2, requires_grad=True)
        output = _torch.function_apply(Doubled)(x)
        node: Any = output.grad_fn
        assert node.is_ours
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert gradient.tolist() == [5.0, 5.0]
    finally:
        _torch.set_backward_class(Doubled, before)


def test_sequence_number() -> None:
    node = (torch.ones(2, requires_grad=True) * 2).grad_fn
    _torch.set_sequence_number(node, 7)
    assert _torch.sequence_number(node) == 7


def test_uses_device_threads() -> None:
    """Where runs go by it needs an accelerator: tests/accelerator/test_backward.py."""
    assert _torch.uses_device_threads()
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(_torch.uses_device_threads()))  # type: ignore[no-untyped-call]
    _torch.set_uses_device_threads(False)
    try:
        x.sum().backward()  # type: ignore[no-untyped-call]
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(_torch.uses_device_threads).result(10.0))
    finally:
        _torch.set_uses_device_threads(True)
    assert seen == [False, True]


@pytest.mark.parametrize("call", ["backward", "grad"])
def test_local_backward_code(call: str) -> None:
    """The frame of the function that calls the engine is that of the caller of its nodes."""
    callers: list[Any] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    class Node:
        def apply(self, gradient: torch.Tensor) -> torch.Tensor:
            callers.append(sys._getframe(1).f_code)
            return gradient

    node = _torch.backward_class(Looks)
    _torch.set_backward_class(Looks, type(node.__name__, (Node, node), {}))
    x = torch.ones(2, requires_grad=True)
    y = _torch.function_apply(Looks)(x)
    if call == "backward":
        y.sum().backward()
    else:
        torch.autograd.grad(y.sum(), [x])
    y = _torch.function_apply(Looks)(x)
    _torch.run_backward(
        (y.sum(),), (torch.ones(()),), False, False, (x,), allow_unreachable=True, accumulate_grad=False
    )
    assert callers == [_torch.local_backward_code, sys._getframe().f_code]


def test_hook_mixin() -> None:
    noted: list[Any] = []
    before = _torch.hook_mixin._register_hook

    def note(hooks: Any, hook: Any) -> Any:
        noted.append(hook)
        return before(hooks, hook)

    _torch.hook_mixin._register_hook = staticmethod(note)
    try:
        doubled = Doubled.apply(torch.ones(2, requires_grad=True))  # type: ignore[no-untyped-call]
        doubled.grad_fn.register_hook(print)
    finally:
        _torch.hook_mixin._register_hook = staticmethod(before)
    assert noted == [print]


def test_leaf_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not _torch.leaf_hooks(leaf)
    handle = leaf.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
    assert len(_torch.leaf_hooks(leaf)) == 1
    handle.remove()
    assert not _torch.leaf_hooks(leaf)


def test_post_accumulate_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not _torch.post_accumulate_hooks(leaf)
    leaf.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    assert len(_torch.post_accumulate_hooks(leaf)) == 1


def test_carried_value_of_every_thread() -> None:
    value: Carried[int] = Carried("tests.carried.own", 7)
    assert value.set(1) == 7
    assert value.set(2) == 1
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(value.get()))
    thread.start()
    thread.join(10.0)
    assert (value.get(), seen) == (2, [7])


def test_carried_value_is_kept_alive_and_let_go() -> None:
    """Older releases take over a reference that they are not given."""
    value: Carried[Any] = Carried("tests.carried.kept", None)
    kept = object()
    before = sys.getrefcount(kept)
    value.set(kept)
    during = sys.getrefcount(kept)
    value.set(None)
    after = sys.getrefcount(kept)
    assert (during, after) == (before + 1, before)


def test_carried_values_are_kept_apart() -> None:
    one: Carried[str] = Carried("tests.carried.one", "none")
    other: Carried[str] = Carried("tests.carried.other", "none")
    one.set("here")
    assert (one.get(), other.get()) == ("here", "none")


# -- used by rpc -------------------------------------------------------------------------------------------------------


def test_torch_future() -> None:
    """`torch._C.Future` is the base of every future, takes a list of devices, and runs callbacks when it is completed."""
    assert issubclass(torch.futures.Future, _torch.TorchFuture)
    future = torch.futures.Future.__new__(torch.futures.Future)
    _torch.TorchFuture.__init__(future, [])
    seen: list[int] = []
    _torch.TorchFuture.add_done_callback(future, lambda done: seen.append(_torch.TorchFuture.wait(done)))
    future.set_result(3)
    assert seen == [3]
    assert _torch.TorchFuture.wait(future) == 3


# -- used by observe ------------------------------------------------------------------------------------------------------


def test_profile_all_threads() -> None:
    """`tests/unit/observe/test_operators.py` shows what it does."""
    assert isinstance(_torch.profile_all_threads(), torch._C._profiler._ExperimentalConfig)
