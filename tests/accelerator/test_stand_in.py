"""The stand-in accelerator itself: what its streams, events and memory do, on which the other tests rely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accelerator import device
from gradwire.cluster.api import Cluster

ZERO = f"{device.NAME}:0"
_LATER_S = 0.5  # more than it takes to look, also on a busy machine


def copy_later() -> None:
    """A copy that may be run later has not run when the call returns; its event says when it has."""
    ours, values = torch.Stream(device=ZERO), torch.arange(5.0).pin_memory()
    with device.asynchronous(_LATER_S):
        there = torch.empty(5, device=ZERO)
        with ours:
            there.copy_(values, non_blocking=True)
        done = ours.record_event()
        assert there.cpu().isnan().all()
        done.synchronize()
        assert torch.equal(there.cpu(), values)


def wait_on_a_stream() -> None:
    """A stream that waits for an event does what follows after it; one that does not is too early."""
    first, second, values = torch.Stream(device=ZERO), torch.Stream(device=ZERO), torch.arange(5.0).pin_memory()
    for waits in (True, False):
        with device.asynchronous(_LATER_S):
            there, back = torch.empty(5, device=ZERO), torch.empty(5, pin_memory=True)
            with first:
                for _ in range(3):  # later than the other stream's copy in any case
                    torch.empty(5, device=ZERO).copy_(values, non_blocking=True)
                there.copy_(values, non_blocking=True)
            if waits:
                second.wait_event(first.record_event())
            with second:
                back.copy_(there, non_blocking=True)
            second.synchronize()
            assert torch.equal(back, values) == waits


def free_too_early() -> None:
    """Memory that a stream uses is only kept for it if `record_stream` says so."""
    other, values = torch.Stream(device=ZERO), torch.arange(5.0)
    for is_recorded in (True, False):
        with device.asynchronous(_LATER_S):
            there, back = values.to(ZERO), torch.empty(5, pin_memory=True)
            with other:
                back.copy_(there, non_blocking=True)
            if is_recorded:
                there.record_stream(other)
            del there
            other.synchronize()
            assert torch.equal(back, values) == is_recorded


def read_the_log() -> None:
    """It has what was asked for, in that order."""
    ours = torch.Stream(device=ZERO)
    there = torch.arange(3.0).to(ZERO)
    device.take_log()
    before = torch.accelerator.current_stream(ZERO).record_event()
    ours.wait_event(before)
    with ours:
        there.copy_(torch.empty(3, pin_memory=True), non_blocking=True)
    before.synchronize()
    found = device.take_log()
    assert [entry.what for entry in found] == ["record", "wait", "pin", "copy", "synchronize_event"]
    assert found[0].event == found[1].event == found[4].event
    assert found[0].stream == "0:0" != found[1].stream == found[3].stream
    assert found[3].more == ("to_device", "non_blocking", "pinned", "12")
    assert device.take_log() == []


def test_without_a_compiler_tests_are_skipped_and_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CACHE", tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        device.NoCompiler, match=r"no C\+\+ compiler: install g\+\+"
    ):  # the fixtures skip with this text
        device.build()


def test_a_device_that_this_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "NAME", "ipu")
    monkeypatch.setattr(device, "IS_STAND_IN", False)
    with pytest.raises(device.TooFewDevices, match=r"there are 0 devices of ipu on this machine"):
        device.check_there()


@pytest.mark.parametrize(
    "check", [copy_later, wait_on_a_stream, free_too_early, read_the_log], ids=lambda check: check.__name__
)
def test_streams_events_and_memory(cluster: Cluster, check: Callable[[], None]) -> None:
    device.check_stand_in()
    cluster.workers[0].call(check)
