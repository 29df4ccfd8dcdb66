"""Making calls: whom, what, with which deadline."""

from __future__ import annotations

import importlib
import operator
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import quick_python
from gradwire import rpc
from gradwire.errors import ConfigurationError, NotInitialized, RpcError, RpcTimeout, UnknownWorker
from gradwire.rpc import Agent, backend_registry
from gradwire.types import WorkerInfo
from gradwire.wire import pickling
from rpc import handlers
from rpc.puppets import wait_until


@pytest.mark.parametrize("to", ["b", 1, WorkerInfo("b", 1)])
def test_worker_is_named_in_three_ways(pair: list[Agent], to: Any) -> None:
    assert rpc.rpc_sync(to, operator.add, args=(1, 2)) == 3
    assert rpc.rpc_async(to, operator.add, args=(1, 2)).wait() == 3


def test_torch_functions_and_methods_are_called(pair: list[Agent]) -> None:
    assert rpc.rpc_sync("b", torch.add, args=(torch.ones(2), 1)).tolist() == [2.0, 2.0]
    assert rpc.rpc_sync("b", torch.Tensor.sum, args=(torch.ones(3),)).item() == 3.0
    assert rpc.rpc_sync("b", torch.nn.Linear, args=(2, 3)).weight.shape == (3, 2)


def test_keywords_arrive(pair: list[Agent]) -> None:
    result = rpc.rpc_sync("b", handlers.keywords, args=(1,), kwargs={"x": torch.ones(1), "y": None})
    assert result == ([1], {"x": torch.ones(1), "y": None})


@pytest.mark.parametrize("to", ["nobody", 7, WorkerInfo("nobody", 1)])
def test_unknown_worker_is_named(pair: list[Agent], to: Any) -> None:
    with pytest.raises(UnknownWorker, match=r"nobody|7"):
        rpc.rpc_sync(to, operator.add, args=(1, 2))


def test_worker_that_is_no_name_is_refused(pair: list[Agent]) -> None:
    with pytest.raises(UnknownWorker, match="name, rank or WorkerInfo"):
        rpc.rpc_sync(3.5, operator.add)  # type: ignore[arg-type]


def test_function_that_cannot_be_called_is_refused(pair: list[Agent]) -> None:
    with pytest.raises(TypeError, match="expected a function"):
        rpc.rpc_sync("b", 3)  # type: ignore[arg-type]


def test_call_to_oneself_runs_in_another_thread_and_copies(pair: list[Agent]) -> None:
    value = torch.ones(3)
    result = rpc.rpc_sync("a", handlers.echo, args=(value,))
    assert result.tolist() == [1, 1, 1]
    assert result.data_ptr() != value.data_ptr()
    assert rpc.rpc_sync("a", threading.get_ident) != threading.get_ident()


CALLS_WHILE_IMPORTED = """
from gradwire import rpc
from rpc import handlers

def f(value):
    return value + 1

def g(value):
    return value + 2

def h(value):
    return value + 3

direct = rpc.rpc_sync("a", f, args=(1,), timeout=20)
later = rpc.rpc_async("b", g, args=(1,), timeout=20).wait()
from_there = rpc.rpc_sync("b", handlers.forward, args=("b", "a", "calls_itself:h", 1), timeout=20)
"""


def test_a_module_that_calls_its_own_functions_while_it_is_imported(
    pair: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls wait for an import in progress, but not until they time out: it may be waiting for them."""
    (tmp_path / "calls_itself.py").write_text(CALLS_WHILE_IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pickling, "_IMPORT_S", 0.1)
    module = importlib.import_module("calls_itself")
    assert (module.direct, module.later, module.from_there) == (2, 3, 4)
    del sys.modules["calls_itself"]


def test_call_to_oneself_does_not_alias_lists(pair: list[Agent]) -> None:
    kept: list[int] = [1]
    result = rpc.rpc_sync("a", handlers.echo, args=(kept,))
    result.append(2)
    assert kept == [1]


def test_worker_info(pair: list[Agent]) -> None:
    assert rpc.get_worker_info() == WorkerInfo("a", 0)
    assert rpc.get_worker_info("b") == WorkerInfo("b", 1)
    with pytest.raises(UnknownWorker, match="nobody"):
        rpc.get_worker_info("nobody")


def test_without_init_the_error_says_what_to_do() -> None:
    with pytest.raises(NotInitialized, match="init_rpc"):
        rpc.rpc_sync("b", operator.add, args=(1, 2))
    with pytest.raises(NotInitialized, match="init_rpc"):
        rpc.shutdown()


def test_after_close_the_error_says_what_to_do(pair: list[Agent]) -> None:
    pair[0].close()
    with pytest.raises(NotInitialized, match="shut down"):
        rpc.rpc_sync("b", operator.add, args=(1, 2))


# -- deadlines ----------------------------------------------------------------------------------------------------


def test_timeout_of_one_call(pair: list[Agent]) -> None:
    with pytest.raises(RpcTimeout, match=r"wait_gate on worker b timed out after [2-9](\.\d+)? s") as caught:
        rpc.rpc_sync("b", handlers.wait_gate, timeout=2.0)
    assert (caught.value.worker, caught.value.phase) == ("b", "run")


def test_default_timeout_and_its_change(pair: list[Agent]) -> None:
    assert rpc.get_rpc_timeout() == 20.0
    rpc._set_rpc_timeout(0.1)
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("b", handlers.wait_gate)
    with pytest.raises(RpcTimeout):
        rpc.rpc_async("b", handlers.wait_gate).wait()
    assert rpc.rpc_sync("b", operator.add, args=(1, 2), timeout=10) == 3


def test_timeout_zero_means_none(pair: list[Agent]) -> None:
    rpc._set_rpc_timeout(0.05)
    future = rpc.rpc_async("b", handlers.wait_gate, timeout=0)
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("b", handlers.wait_gate)  # takes longer than the default
    assert not future.done()
    handlers.gate.set()
    assert future.wait() is True


def test_timeout_of_a_call_to_oneself(pair: list[Agent]) -> None:
    with pytest.raises(RpcTimeout, match="phase: run"):
        rpc.rpc_sync("a", handlers.wait_gate, timeout=2.0)


# -- everybody together -------------------------------------------------------------------------------------------


def test_all_gather_and_barrier(make_agents: Any) -> None:
    agents = make_agents("a", "b", "c")
    results: dict[str, Any] = {}

    def take_part(agent: Agent) -> None:
        value = {"name": agent.info.name, "tensor": torch.full((2,), agent.info.id)}
        results[agent.info.name] = agent.gathering.all_gather(value, None, threading.TIMEOUT_MAX)

    threads = [threading.Thread(target=take_part, args=(agent,)) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == ["a", "b", "c"]
    for gathered in results.values():
        assert {name: value["tensor"].tolist() for name, value in gathered.items()} == {
            "a": [0, 0],
            "b": [1, 1],
            "c": [2, 2],
        }


def test_all_gather_says_who_is_missing(pair: list[Agent]) -> None:
    with pytest.raises(RpcTimeout, match=r"did not make the same call \(.*_all_gather.*\) in time: b"):
        rpc._all_gather(1, timeout=0.1)


def test_all_gather_of_others_is_refused(pair: list[Agent]) -> None:
    with pytest.raises(ConfigurationError, match="a is not one of"):
        rpc._all_gather(1, worker_names=["b"])


def test_all_gather_after_a_timeout_works(make_agents: Any) -> None:
    a, b = make_agents("a", "b")
    with pytest.raises(RpcTimeout):
        a.gathering.all_gather("early", None, 0.0)
    with pytest.raises(RpcTimeout):
        b.gathering.all_gather("alone", None, 0.0)
    thread = threading.Thread(target=b.gathering.all_gather, args=("b", None, threading.TIMEOUT_MAX))
    thread.start()
    assert a.gathering.all_gather("a", None, threading.TIMEOUT_MAX) == {"a": "a", "b": "b"}
    thread.join(10)
    assert not thread.is_alive()


def test_wait_all_waits_for_what_was_started_inside(pair: list[Agent]) -> None:
    with rpc._wait_all():
        futures = [rpc.rpc_async("b", operator.add, args=(number, 1)) for number in range(20)]
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="inside"), rpc._wait_all():
        rpc.rpc_async("b", handlers.fail, args=(ValueError, "inside"))


# -- functions that answer later ------------------------------------------------------------------------------------


def test_async_execution_answers_when_the_future_is_there(pair: list[Agent]) -> None:
    assert rpc.rpc_sync("b", handlers.answer_later, args=(5,)) == 5
    assert rpc.rpc_sync("a", handlers.answer_later, args=(6,)) == 6


def test_async_execution_chains_through_a_third_worker(make_agents: Any) -> None:
    a, _b, _c = make_agents("a", "b", "c", num_worker_threads=1)
    result = a.call("b", handlers.add_there, ("b", "c", torch.ones(2), torch.ones(2)))
    assert result.tolist() == [3.0, 3.0]


def test_async_execution_that_raises(pair: list[Agent]) -> None:
    with pytest.raises(ValueError, match="before there was a future"):
        rpc.rpc_sync("b", handlers.raise_at_once)
    with pytest.raises(KeyError, match="raised by the future"):
        rpc.rpc_sync("b", handlers.fail_later)


def test_async_execution_without_a_future_is_an_error(pair: list[Agent]) -> None:
    with pytest.raises(RpcError, match=r"no_future, .* returned int"):
        rpc.rpc_sync("b", handlers.no_future)


# -- names of other systems -----------------------------------------------------------------------------------------


def test_backend_registry() -> None:
    assert backend_registry.backend_registered("TENSORPIPE")
    options = backend_registry.construct_rpc_backend_options(rpc.BackendType.TENSORPIPE, rpc_timeout=5)
    assert isinstance(options, rpc.TensorPipeRpcBackendOptions)
    assert options.rpc_timeout == 5.0
    with pytest.raises(RuntimeError, match="already registered"):
        backend_registry.register_backend("TENSORPIPE", rpc.RpcOptions, lambda: None)
    with pytest.raises(ConfigurationError, match="unknown RPC backend 'MPI'"):
        backend_registry.init_backend("MPI")


def test_tensorpipe_options_start_a_worker(meeting: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=3, rpc_timeout=7, init_method=meeting, device_maps={"a": {"cpu": "cpu"}}, _transports=["uv"]
    )
    rpc.init_rpc("a", rpc.BackendType.TENSORPIPE, rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert rpc.get_rpc_timeout() == 7.0
        assert rpc.current_agent().config.num_worker_threads == 3
        assert rpc.rpc_sync("a", operator.add, args=(1, 2)) == 3
    finally:
        rpc.shutdown()


def test_torch_own_options_are_accepted(meeting: str) -> None:
    from torch.distributed import rpc as torch_rpc

    options: Any = torch_rpc.TensorPipeRpcBackendOptions(rpc_timeout=8, init_method=meeting, num_worker_threads=2)
    rpc.init_rpc("a", torch_rpc.BackendType.TENSORPIPE, rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert rpc.get_rpc_timeout() == 8.0
        assert rpc.current_agent().config.num_worker_threads == 2
    finally:
        rpc.shutdown()


def test_device_maps_in_torch_own_options_are_checked(meeting: str) -> None:
    from torch.distributed import rpc as torch_rpc

    options: Any = torch_rpc.TensorPipeRpcBackendOptions(init_method=meeting, device_maps={"b": {"cuda:0": "cuda:0"}})
    with pytest.raises(ConfigurationError, match="invalid target node names in its device maps: there is no worker b"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)


def test_other_objects_are_no_options(meeting: str) -> None:
    with pytest.raises(TypeError, match="rpc_backend_options must be RpcOptions"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options={"init_method": meeting})  # type: ignore[arg-type]


SAME_SCRIPT = """
import subprocess, sys
from gradwire import rpc

counter = 0

class Thing:
    pass

def bump(thing):
    global counter
    counter += 1
    return counter, isinstance(thing, Thing), thing

if __name__ == "__main__":
    rank, where = int(sys.argv[1]), sys.argv[2]
    other = subprocess.Popen([sys.executable, __file__, "1", where]) if rank == 0 else None
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.RpcOptions(init_method=where))
    if other is not None:
        results = [rpc.rpc_sync("w1", bump, (Thing(),)) for _ in range(3)]
        print([(count, is_known, type(thing) is Thing) for count, is_known, thing in results])
    rpc.shutdown()
    if other is not None:
        other.wait(30)
"""


@pytest.mark.slow
def test_workers_of_one_script_share_what_main_defines(tmp_path: Path) -> None:
    """As in PyTorch: globals of the callee keep their values, and classes are the same on both sides."""
    script = tmp_path / "one_file.py"
    script.write_text(SAME_SCRIPT)
    command = [sys.executable, str(script), "0", f"file://{tmp_path}/store"]
    run = quick_python.run(command, timeout=60, env={**os.environ, quick_python.NESTED: "1"})
    assert run.stdout.strip() == "[(1, True, True), (2, True, True), (3, True, True)]", run.stderr


def test_gil_profiling(pair: list[Agent]) -> None:
    assert "gil_average_wait_time_us" not in rpc._get_debug_info()
    rpc.enable_gil_profiling(True)
    assert wait_until(lambda: float(rpc._get_debug_info()["gil_average_wait_time_us"]) > 0)
    rpc.enable_gil_profiling(False)
    assert "gil_average_wait_time_us" not in rpc._get_debug_info()
