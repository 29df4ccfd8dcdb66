"""Programs that look at how tensors get off a device and onto one: the order of events, waits and copies, and the values.

They run on the first worker of a cluster. Copies are asynchronous meanwhile, there and on the worker that is called, so that
a wait that is missing gives wrong numbers, too. An assertion that fails there is the `AssertionError` of the driver's call.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from accelerator import device
from accelerator.device import Entry
from gradwire.config import KIB, TlsKeys
from gradwire.errors import CannotSend, RpcTimeout
from gradwire.testing import local_agents, wait_until
from gradwire.transports.tls import make_keys
from gradwire.wire import devices
from gradwire.wire.tensors import sparse_parts

Tensor = torch.Tensor

ZERO, ONE = f"{device.NAME}:0", f"{device.NAME}:1"
PEER = "worker1"
DELAY_S = 0.005

_switch: list[contextlib.ExitStack] = []


def switch(on: bool) -> None:
    """Make this worker's copies asynchronous, or synchronous again; clear the log."""
    if on:
        _switch.append(contextlib.ExitStack())
        _switch[-1].enter_context(device.asynchronous(DELAY_S))
    else:
        _switch.pop().close()
    device.take_log()


@contextlib.contextmanager
def later() -> Iterator[None]:
    """Copies are asynchronous here and on the peer."""
    switch(True)
    gw.rpc.rpc_sync(PEER, switch, args=(True,))
    try:
        yield
    finally:
        gw.rpc.rpc_sync(PEER, switch, args=(False,))
        switch(False)


def log_of_peer() -> list[Entry]:
    return [Entry(*entry) for entry in gw.rpc.rpc_sync(PEER, device.take_log)]


# -- the order ----------------------------------------------------------------------------------------------------------


def check_to_host(log: Sequence[Entry], num_copies: int, stream: str = "0:0") -> None:
    """The program's stream: event; ours: wait for it, copy everything, event; the host waits for that one."""
    if not device.IS_STAND_IN:
        return
    ours, first, last = _find_copies(log, "to_host", num_copies)
    assert ours != stream
    waits = [number for number, entry in enumerate(log[:first]) if entry.what == "wait" and entry.stream == ours]
    assert waits, "our stream does not wait for the program's"
    assert Entry("record", stream, log[waits[-1]].event, ()) in log[: waits[-1]]
    _find_host_wait(log, ours, last)
    assert log.count(Entry("record_stream", ours, 0, ())) == num_copies


def check_to_device(log: Sequence[Entry], num_copies: int, stream: str = "0:0") -> None:
    """Ours: copy everything, event; the host waits for that; the stream of the program is recorded."""
    if not device.IS_STAND_IN:
        return
    ours, first, last = _find_copies(log, "to_device", num_copies)
    assert ours != stream
    assert not [entry for entry in log if entry.what == "wait" and entry.stream == ours], "it waits for the program"
    done = _find_host_wait(log, ours, last)
    assert not [entry for entry in log[first:done] if entry.what == "operator"], "used before it is there"
    # More often if it is again by the thread that gets a result.
    assert log.count(Entry("record_stream", stream, 0, ())) >= num_copies


def check_filled(log: Sequence[Entry], num_copies: int, stream: str = "0:0") -> None:
    """The stream that uses a tensor: copy to it, event; the host waits for that before it uses its memory again."""
    if not device.IS_STAND_IN:
        return
    ours, _, last = _find_copies(log, "to_device", num_copies)
    assert ours == stream
    _find_host_wait(log, ours, last)


def check_on_devices(log: Sequence[Entry], num_copies: int, stream: str = "0:0") -> None:
    """As `check_to_host`, but the copies stay on the device; and they may be used on the program's stream."""
    ours, first, last = _find_copies(log, "on_device", num_copies)
    assert ours != stream
    waits = [number for number, entry in enumerate(log[:first]) if entry.what == "wait" and entry.stream == ours]
    assert waits, "our stream does not wait for the program's"
    assert Entry("record", stream, log[waits[-1]].event, ()) in log[: waits[-1]]
    _find_host_wait(log, ours, last)
    assert log.count(Entry("record_stream", ours, 0, ())) == num_copies
    num_arrived = sum(entry.more[:1] == ("to_device",) for entry in log)
    assert log.count(Entry("record_stream", stream, 0, ())) == num_copies + num_arrived
    assert not [entry for entry in log if "blocking" in entry.more]


def _find_copies(log: Sequence[Entry], direction: str, num_copies: int) -> tuple[str, int, int]:
    """Return the stream of the copies, and where the first and the last of them are."""
    assert not [entry for entry in log if entry.what.startswith("synchronize")], "more is waited for than the copies"
    found = [number for number, entry in enumerate(log) if entry.more[:2] == (direction, "non_blocking")]
    assert len(found) == num_copies, log
    (stream,) = {log[number].stream for number in found}
    for number in found if direction != "on_device" else ():  # small frames are copied whole when they arrive
        is_small = direction == "to_device" and int(log[number].more[3]) < 16 * KIB
        assert log[number].more[2] == "pinned" or is_small
    return stream, found[0], found[-1]


def _find_host_wait(log: Sequence[Entry], stream: str, last: int) -> int:
    """Return where the host has waited for the first event after the last copy."""
    rest = list(log[last:])
    events = [entry.event for entry in rest if entry.what == "record" and entry.stream == stream]
    assert events, "there is no event after the last copy"
    done = rest.index(Entry("found_done", "-", events[0], ()))
    assert done > rest.index(Entry("record", stream, events[0], ()))
    return last + done


# -- what is called on the peer -----------------------------------------------------------------------------------------


def _read(*tensors: Tensor, **more: Any) -> list[list[float]]:
    """Return the numbers of tensors on a device."""
    assert all(tensor.device.type == device.NAME for tensor in tensors)
    return [tensor.mul(1).cpu().reshape(-1).tolist() for tensor in (*tensors, *more.get("others", ()))]


def _make(value: float, *sizes: int) -> Any:
    """Return tensors that are being written on a stream of the program when this returns."""
    made, event = _write_later([torch.full((size,), value) for size in sizes])
    torch.accelerator.current_stream(ZERO).wait_event(event)
    return made[0] if len(made) == 1 else made


def _write_later(values: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event]:
    program = torch.Stream(device=ZERO)
    with program:
        made = [torch.empty(value.shape, device=ZERO).copy_(value.pin_memory(), non_blocking=True) for value in values]
    return made, program.record_event()


# -- programs -----------------------------------------------------------------------------------------------------------


def send_arguments() -> None:
    """Arguments that a stream of the program is still writing, several of them, also in a container."""
    values = [torch.arange(3.0), torch.arange(2000.0), torch.ones(2, 2)]
    with later():
        made, event = _write_later(values)
        torch.accelerator.current_stream(ZERO).wait_event(event)
        device.take_log()
        found = gw.rpc.rpc_sync(PEER, _read, args=tuple(made[:2]), kwargs={"others": [made[2]]})
        here = device.take_log()
        check_to_host(here, 3)
        assert not [entry for entry in here if "blocking" in entry.more]
        check_to_device(log_of_peer(), 3)
    assert found == [value.reshape(-1).tolist() for value in values]


def send_from_a_stream() -> None:
    """What the current stream of the calling thread is writing is waited for."""
    with later():
        program, host = torch.Stream(device=ZERO), torch.arange(4.0).pin_memory()
        with program:
            made = torch.empty(4, device=ZERO).copy_(host, non_blocking=True)
            device.take_log()
            found = gw.rpc.rpc_sync(PEER, _read, args=(made,))
        check_to_host(device.take_log(), 1, f"0:{program.stream_id}")
    assert found == [[0.0, 1.0, 2.0, 3.0]]


def fetch_results() -> None:
    """A result, and two of one call."""
    with later():
        for sizes in ((5,), (3, 4000)):
            log_of_peer()
            device.take_log()
            found = gw.rpc.rpc_sync(PEER, _make, args=(float(len(sizes)), *sizes))
            check_to_device(device.take_log(), len(sizes))
            check_to_host(log_of_peer(), len(sizes))
            for item, size in zip(found if len(sizes) > 1 else [found], sizes, strict=True):
                assert item.device == torch.device(ZERO)
                assert torch.equal(item.cpu(), torch.full((size,), float(len(sizes))))


def fetch_a_reference() -> None:
    """The value of a reference."""
    with later():
        rref = gw.rpc.remote(PEER, _make, args=(7.0, 6))
        rref.to_here()
        log_of_peer()
        device.take_log()
        found = rref.to_here()
        check_to_device(device.take_log(), 1)
        check_to_host(log_of_peer(), 1)
        assert torch.equal(found.cpu(), torch.full((6,), 7.0))


def _triple(x: Tensor) -> Tensor:
    return x * 3


def send_gradients() -> None:
    """A gradient leaves a device and arrives on one, twice."""
    with later():
        x = torch.arange(5.0, device=ZERO).requires_grad_()
        with gw.autograd.context() as ctx:
            loss = gw.rpc.rpc_sync(PEER, _triple, args=(x,)).square().sum()
            log_of_peer()
            device.take_log()
            ctx.backward(loss)
            for log in (device.take_log(), log_of_peer()):
                check_to_host(log, 1)
                check_to_device(log, 1)
            assert torch.equal(ctx.gradients()[x].cpu(), torch.arange(5.0) * 18)


def send_gradients_to_oneself() -> None:
    """The gradients of a call to oneself, of the result and of the argument, do not leave the device."""
    with later():
        x = torch.arange(5.0, device=ZERO).requires_grad_()
        with gw.autograd.context() as ctx:
            loss = gw.rpc.rpc_sync("worker0", _triple, args=(x,)).square().sum()
            device.take_log()
            ctx.backward(loss)
            log = device.take_log()
            check_on_devices(log, 2)
            assert {entry.more[0] for entry in log if entry.what == "copy"} == {"on_device"}
            assert torch.equal(ctx.gradients()[x].cpu(), torch.arange(5.0) * 18)


def send_gradients_by_a_shortcut() -> None:
    """Between two calls of the peer, the gradient of what was passed on here does not leave the device there."""
    with later():
        x = torch.arange(5.0, device=ZERO).requires_grad_()
        with gw.autograd.context() as ctx:
            loss = gw.rpc.rpc_sync(PEER, _triple, args=(gw.rpc.rpc_sync(PEER, _triple, args=(x,)),)).square().sum()
            log_of_peer()
            ctx.backward(loss)
            log = log_of_peer()
            check_to_device(log[: _last_copy(log)], 1)
            check_on_devices(log, 1)
            assert torch.equal(ctx.gradients()[x].cpu(), torch.arange(5.0) * 162)


def keep_memory_of_conj_and_neg() -> None:
    """What keeps the memory of a tensor for a stream is not a computation, and not done to a temporary tensor."""
    numbers = torch.view_as_complex(torch.arange(24.0).reshape(3, 4, 2)).to(ZERO)
    places = [torch.device("cpu"), torch.device(ZERO)]
    devices.copy_to([torch.ones(1)], places[1:], time.monotonic() + 10.0)  # makes our streams
    for tensor in (numbers.conj(), numbers.conj().imag, -numbers.imag):
        device.take_log()
        devices.record_use([tensor])
        assert device.take_log() == [Entry("record_stream", "0:0", 0, ())]
        made = devices.copy_to([tensor] * 2, places, time.monotonic() + 10.0)
        for found in [*made, *devices.move([tensor], places[:1])]:
            assert torch.equal(found.cpu(), tensor.resolve_conj().resolve_neg().cpu())


def _last_copy(log: Sequence[Entry]) -> int:
    return max(number for number, entry in enumerate(log) if entry.more[:1] == ("on_device",))


def copy_gradients_between_devices() -> None:
    """Copies of every kind of tensor go from every place to every place."""
    places = [torch.device(name) for name in ("cpu", ZERO, ONE)]
    with later():
        for name, value in _tensors().items():
            for source in places:
                tensor = value.detach().to(source)
                copies = devices.copy_to([tensor] * len(places), places, time.monotonic() + 10.0)
                for copied, place in zip(copies, places, strict=True):
                    try:
                        _check_equal(copied, value.detach().to(place).resolve_conj().resolve_neg())
                    except Exception as error:
                        raise AssertionError(f"{name} from {source} to {place}: {error}") from error


def keep_the_deadline_of_a_pass() -> None:
    """A copy for oneself does not wait longer than it is given."""
    with device.asynchronous(1.0):
        made, event = _write_later([torch.arange(4.0)])
        torch.accelerator.current_stream(ZERO).wait_event(event)
        with pytest.raises(TimeoutError, match=f"{ZERO} has not computed"):
            devices.copy_to(made, [torch.device(ZERO)], time.monotonic() + 0.05)
        assert not event.query(), "it did not wait for the device"


def send_sparse_gradients() -> None:
    """A sparse gradient has two parts, which arrive on the device together."""
    rows = torch.tensor([1, 3])
    with later():
        weight = torch.zeros(5, 2, device=ZERO).requires_grad_()
        gradient = torch.sparse_coo_tensor(
            rows[None].to(ZERO), torch.ones(2, 2, device=ZERO), (5, 2), is_coalesced=True
        )
        with gw.autograd.context() as ctx:
            loss = gw.rpc.rpc_sync(PEER, _with_gradient, args=(weight, gradient)).sum()
            ctx.backward(loss)
            found = ctx.gradients()[weight]
        assert found.device == torch.device(ZERO)
        assert found.is_sparse
        assert found._indices().cpu().tolist() == [[1, 3]]
        assert found._values().cpu().tolist() == [[1.0, 1.0], [1.0, 1.0]]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.gradient, None


def _with_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    return _WithGradient.apply(x, gradient)  # type: ignore[no-any-return]


def send_by_shared_memory() -> None:
    """Large tensors are copied straight into slots of shared memory and out of them, which are pinned once."""
    size = 64 * KIB
    with later():
        logs: list[tuple[list[Entry], list[Entry]]] = []
        for number in range(5):
            device.take_log()
            log_of_peer()
            found = gw.rpc.rpc_sync(PEER, _sum, args=(_make(float(number), size),))
            assert found == number * size
            logs.append((device.take_log(), log_of_peer()))
        if not device.IS_STAND_IN:
            return
        here, there = logs[-1]
        check_to_host(here[_last_pin(here) :], 1)
        assert [entry for entry in here if entry.what == "pin"] == [
            Entry("pin", "-", 0, (str(4 * size),))
        ]  # by `_make`
        check_to_device(there, 1)
        assert not [entry for entry in there if entry.what == "pin"]
    for log in ([entry for here, _ in logs for entry in here], [entry for _, there in logs for entry in there]):
        assert sum(entry.what == "register" for entry in log) == 1


def send_by_socket() -> None:
    """Large tensors arrive in pinned memory without shared memory, too."""
    with local_agents(2, "tcp") as (a, _), device.asynchronous(DELAY_S):
        made = _make(3.0, 64 * KIB)
        device.take_log()
        assert a.call("b", _sum, (made,)) == 3 * 64 * KIB
        log = device.take_log()
        check_to_host(log, 1)
        check_to_device(log, 1)
        if device.IS_STAND_IN:
            assert [entry.more for entry in log if entry.what == "pin"] == [(str(256 * KIB),)] * 2


def _last_pin(log: Sequence[Entry]) -> int:
    return max(number for number, entry in enumerate(log) if entry.what == "pin")


def _sum(x: Tensor) -> float:
    return float(x.sum().item())


def unregister_slots() -> None:
    """Slots are made unknown to the device before they are unmapped."""
    device.take_log()
    with local_agents(2) as (a, _):
        for number in range(4):
            assert a.call("b", _sum, (torch.full((64 * KIB,), float(number), device=ZERO),)) == number * 64 * KIB
    gc.collect()
    log = device.take_log()
    num_registered = sum(entry.what == "register" for entry in log)
    assert num_registered == (2 if device.IS_STAND_IN else 0)  # the two ends
    assert sum(entry.what == "unregister" for entry in log) == num_registered


def give_slots_back() -> None:
    """A slot of a large tensor that was not sent in time is used again when the device is done with it."""
    device.check_stand_in()
    size = 64 * KIB
    with local_agents(2) as (a, _), device.asynchronous(0.3):
        for number in range(3):
            assert a.call("b", _sum, (torch.full((size,), float(number), device=ZERO),)) == number * size
        arena = a.peers.peer("b").lane("calls", time.monotonic() + 5.0).stream.arena
        assert arena is not None
        before = arena.statistics()
        made, event = _write_later([torch.ones(size)])
        torch.accelerator.current_stream(ZERO).wait_event(event)
        with pytest.raises(RpcTimeout, match=f"{ZERO} has not computed"):
            a.call("b", _sum, tuple(made), None, 0.02)
        wait_until(lambda: a.call("b", _sum, tuple(made)) == size and arena.statistics().num_lent == 0, 10.0, "a slot")
        assert arena.statistics().num_created - before.num_created <= 1  # while the other was in use


def close_while_the_device_writes() -> None:
    """A slot that a device writes to stays mapped after its connection is closed."""
    device.check_stand_in()
    size = 64 * KIB
    with contextlib.ExitStack() as agents:
        a, _ = agents.enter_context(local_agents(2))
        for _ in range(3):
            assert a.call("b", _sum, (torch.ones(size, device=ZERO),)) == size
        with device.asynchronous(0.4):
            made, event = _write_later([torch.ones(size)])
            torch.accelerator.current_stream(ZERO).wait_event(event)
            with pytest.raises(RpcTimeout):
                a.call("b", _sum, tuple(made), None, 0.02)
            agents.close()
            del a, _
            gc.collect()  # and then the copies end


# -- modules, shards, checkpoints, threads -----------------------------------------------------------------------------


def call_a_module() -> None:
    """Arguments that came on the CPU go to the module's device, results to the CPU, gradients the other way."""
    with later():
        module = gw.nn.RemoteModule(f"{PEER}/{ZERO}", torch.nn.Tanh)
        x = torch.arange(4.0).requires_grad_()
        with gw.autograd.context() as ctx:
            log_of_peer()
            out = module(x)
            log = log_of_peer()
            check_to_device(log, 1)
            check_to_host(log, 1)
            assert torch.equal(out, torch.tanh(x))
            ctx.backward(out.sum())
            log = log_of_peer()
            check_to_device(log, 1)
            check_to_host(log, 1)
            assert torch.allclose(ctx.gradients()[x], 1 - torch.tanh(x.detach()).square())


def gather_shards() -> None:
    """Shards leave their device, and come together on another one."""
    with later():
        values = torch.arange(8.0).reshape(4, 2)
        sharded = gw.shard.ChunkShardingSpec(0, [f"{PEER}/{ZERO}", "worker2/cpu"]).shard(values)
        sharded.requires_grad_()
        with gw.autograd.context() as ctx:
            log_of_peer()
            device.take_log()
            found = sharded.full_tensor()
            assert found.device == torch.device(ZERO)
            check_to_device(device.take_log(), 2)
            check_to_host(log_of_peer(), 1)
            assert torch.equal(found.detach().cpu(), values)
            device.take_log()
            ctx.backward(found.square().sum())
            check_to_host(device.take_log(), 2)
            check_to_device(log_of_peer(), 1)


def save_and_load() -> None:
    """A checkpoint is written from pinned memory, and loaded from it."""
    with later(), tempfile.TemporaryDirectory() as folder:
        module = gw.nn.RemoteModule(f"{PEER}/{ZERO}", torch.nn.Linear, (600, 1000), {"bias": False})  # in two pieces
        state = module.state_dict()
        log_of_peer()
        gw.checkpoint.save(folder, {"model": module}, progress=False)
        check_to_host(log_of_peer(), 2)
        module.load_state_dict({name: torch.zeros_like(item) for name, item in state.items()})
        log_of_peer()
        gw.checkpoint.load(folder, {"model": module}, progress=False)
        check_filled(log_of_peer(), 2)
        assert all(torch.equal(item, state[name]) for name, item in module.state_dict().items())


def use_on_another_stream(how: str) -> None:
    """Memory of a result is kept for the stream of the thread that gets it, whichever thread has unpacked it."""
    with later():
        future = gw.rpc.rpc_async(PEER, _make, args=(3.0, 6))
        wait_until(future.done, 10.0, "an answer, which another thread reads")
        program, back = torch.Stream(device=ZERO), torch.empty(6, pin_memory=True)
        with program:
            found = future.wait() if how == "wait" else future.value()
            back.copy_(found, non_blocking=True)
        del found, future
        gc.collect()
        program.synchronize()
        assert torch.equal(back, torch.full((6,), 3.0))


def _check_in_turn(log: Sequence[Entry], streams: Sequence[str]) -> None:
    """Each of the streams waits for the one before it."""
    if not device.IS_STAND_IN:
        return
    for first, second in itertools.pairwise(streams):
        found = [entry.event for entry in log if entry.what == "record" and entry.stream == first]
        assert [entry for entry in log if entry.what == "wait" and entry.stream == second and entry.event in found]


def use_gradients_on_another_stream() -> None:
    """Memory of a gradient is kept for the stream of the thread that asks for it."""
    with later():
        program, back = torch.Stream(device=ZERO), torch.empty(5, pin_memory=True)
        with program:
            x = torch.arange(5.0, device=ZERO).requires_grad_()
            with gw.autograd.context() as ctx:
                loss = gw.rpc.rpc_sync(PEER, _triple, args=(x,)).square().sum()
                device.take_log()
                ctx.backward(loss)
                assert torch.accelerator.current_stream(ZERO) == program
                _check_in_turn(device.take_log(), [own := f"0:{program.stream_id}", "0:0", own])
                found = ctx.gradients()[x]
            back.copy_(found, non_blocking=True)
        del found
        gc.collect()
        program.synchronize()
        assert torch.equal(back, torch.arange(5.0) * 18)


# -- kinds of tensors, ways to travel -----------------------------------------------------------------------------------


def _tensors() -> dict[str, Tensor]:
    values = torch.arange(24.0).reshape(4, 6)
    numbers = torch.view_as_complex(values.reshape(3, 4, 2).contiguous())
    return {
        "plain": values.to(ZERO),
        "on the other device": values.to(ONE),
        "transposed": values.to(ZERO).t(),
        "column": values.to(ZERO)[:, 2],
        "stepped": values.to(ZERO)[::2, ::3],
        "expanded": values[0].to(ZERO).expand(3, 6),
        "of no dims": torch.tensor(3.5).to(ZERO),
        "empty": torch.empty(0, 3, device=ZERO),
        "bool": (values > 7).to(ZERO),
        "int": values.to(torch.int64).to(ZERO),
        "bfloat16": values.to(torch.bfloat16).to(ZERO),
        "complex": numbers.to(ZERO),
        "conj": numbers.to(ZERO).conj(),
        "neg": numbers.to(ZERO).conj().imag,
        "large": torch.arange(100_000.0).to(ZERO),
        "large and transposed": torch.arange(200_000.0).reshape(400, 500).to(ZERO).t(),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[0, 2]], device=ZERO), torch.tensor([1.0, 2.0], device=ZERO), (4,), is_coalesced=True
        ),
        "sparse, not coalesced": torch.sparse_coo_tensor(
            torch.tensor([[1, 1]], device=ONE), torch.tensor([1.0, 2.0], device=ONE), (4,)
        ),
        "parameter": torch.nn.Parameter(values.to(ZERO)),
        **{str(layout): _compressed(layout) for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr)},
    }


def _compressed(layout: torch.layout) -> Tensor:
    """A sparse tensor with two elements, or two blocks, on the diagonal."""
    ends, places = torch.tensor([0, 1, 2]).to(ZERO), torch.tensor([0, 1]).to(ZERO)
    values = torch.tensor([1.0, 2.0] if layout is not torch.sparse_bsr else [[[1.0]], [[2.0]]]).to(ZERO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that they are young
        return torch.sparse_compressed_tensor(ends, places, values, (2, 2), layout=layout, check_invariants=False)


def _echo(value: Any) -> Any:
    return value


def _check_equal(found: Tensor, expected: Tensor) -> None:
    assert type(found) is type(expected)
    assert found.device == expected.device
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.layout == expected.layout
    if expected.is_sparse:
        assert found.is_coalesced() == expected.is_coalesced()
    if expected.layout is not torch.strided:
        for part, other in zip(sparse_parts(found), sparse_parts(expected), strict=True):
            _check_equal(part, other)
    else:
        assert found.is_conj() == expected.is_conj()
        assert found.is_neg() == expected.is_neg()
        assert torch.equal(found.cpu(), expected.cpu())


def send_every_kind(transport: str) -> None:
    """Every kind of tensor comes back as it was, alone and together with others of the CPU."""
    with contextlib.ExitStack() as stack:
        if transport == "tls":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            make_keys(folder / "keys")
            keys = TlsKeys.in_folder(folder / "keys")
            a, _ = stack.enter_context(local_agents(2, "tcp", tls=keys, trust="code"))
        else:
            a, _ = stack.enter_context(local_agents(2, "unix" if transport == "loopback" else transport))
        to = "a" if transport == "loopback" else "b"
        stack.enter_context(device.asynchronous(0.001))
        for name, expected in _tensors().items():
            try:
                device.take_log()
                found = a.call(to, _echo, (expected,))
                operators = [entry for entry in device.take_log() if entry.what == "operator"]
                assert expected.layout is not torch.strided or not operators, operators
                _check_equal(found, expected)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
        everything = {"cpu": torch.arange(3.0), **_tensors()}
        for name, found in a.call(to, _echo, (everything,)).items():
            _check_equal(found, everything[name])


def keep_the_timeout() -> None:
    """A call does not wait longer than its time for a tensor that the device is still computing."""
    device.check_stand_in()
    with local_agents(2) as (a, _), device.asynchronous(1.0):
        assert a.call("b", _echo, (1,)) == 1  # they are connected
        made, event = _write_later([torch.arange(4.0)])
        torch.accelerator.current_stream(ZERO).wait_event(event)
        with pytest.raises(RpcTimeout, match=f"{ZERO} has not computed"):
            a.call("b", _read, tuple(made), None, 0.05)
        assert not event.query(), "it did not wait for the device"
        assert a.call("b", _read, tuple(made)) == [[0.0, 1.0, 2.0, 3.0]]


def let_the_program_go_on() -> None:
    """While a thread waits for a copy, others send and compute."""
    with local_agents(2) as (a, _), device.asynchronous(0.2):
        made, event = _write_later([torch.arange(4.0)])
        torch.accelerator.current_stream(ZERO).wait_event(event)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(a.call("b", _read, tuple(made))))
        thread.start()
        while thread.is_alive():
            assert a.call("b", _echo, (1,)) == 1
        assert found == [[[0.0, 1.0, 2.0, 3.0]]]


# -- a device that is not there, or has another name -------------------------------------------------------------------


def give(value: float) -> Tensor:
    return torch.full((3,), value, device=ZERO)


def give_inside(value: float) -> dict[str, Any]:
    return {"list": [1, give(value)], "more": (2.0, give(value))}


def send_to(to: str, how: str) -> None:
    """Send a tensor to a worker without the device: as an argument, or inside one."""
    args, kwargs = ((give(1.0),), None) if how == "argument" else ((), {"value": {"inside": [1, (give(2.0),)]}})
    gw.rpc.rpc_sync(to, _echo, args=args, kwargs=kwargs)


@gw.rpc.expose
def look_at(value: Any) -> str:
    """Return where a tensor is; exposed, for workers that trust each other's data alone."""
    return str(value.device)


@gw.rpc.expose
def give_exposed() -> Tensor:
    return give(1.0)


def send_what_the_map_names(trust: str) -> None:
    """A map may name a device that the other worker lacks; the connection stays."""
    sends, returns = {"b": {ZERO: "cuda:1", "cpu": "cpu"}}, {"a": {"cuda:1": ZERO}}
    with local_agents(2, trust=trust, device_maps=sends | returns) as (a, b):
        assert a.call("b", look_at, (torch.ones(1),)) == "cpu"
        connections = a.connections()
        with pytest.raises(CannotSend, match=r"b has no cuda:1; pass device_maps= .* or move the tensor to the CPU"):
            a.call("b", look_at, (give(1.0),))
        with pytest.raises(CannotSend, match="b has no cuda:1"):
            b.call("a", give_exposed)
        assert a.call("b", look_at, (torch.ones(1),)) == "cpu"
        assert set(connections) <= set(a.connections())


def rename() -> None:
    """Load the device under another name, long after gradwire was imported, and send a tensor."""
    device.load("gradacc")
    with local_agents(2) as (a, _):
        device.take_log()
        with device.asynchronous(0.001):
            found = a.call("b", _echo, (torch.arange(4.0).to("gradacc:1"),))
        assert str(found.device) == "gradacc:1"
        assert found.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
        check_to_device(device.take_log(), 2, "1:0")
