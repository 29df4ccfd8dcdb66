"""Backward passes that wait in the middle for another worker, with nodes on devices."""

from __future__ import annotations

import pytest

from accelerator import gates
from accelerator.gates import ONE, ZERO
from gradwire.cluster.api import Cluster

ON_DEVICES = pytest.mark.parametrize(
    ("first", "second"), [(ZERO, ZERO), (ZERO, ONE), ("cpu", ONE)], ids=["one device", "two devices", "CPU and device"]
)


@ON_DEVICES
@pytest.mark.parametrize("name", gates.LOSSES)
def test_skip_connection_gives_the_gradients_of_one_process(
    cluster: Cluster, name: str, first: str, second: str
) -> None:
    cluster.workers[0].call(gates.differentiate, name, first, second)


@ON_DEVICES
def test_split_model_trains_as_in_one_process(cluster: Cluster, first: str, second: str) -> None:
    cluster.workers[0].call(gates.train_split_model, first, second)


def test_other_passes_end_while_a_gate_waits(cluster: Cluster) -> None:
    assert cluster.workers[0].call(gates.count_passes_beside_a_gate, 6) == 6


@pytest.mark.parametrize(("on", "inner"), [(ZERO, ZERO), (ZERO, ONE), (ZERO, "cpu"), ("cpu", ZERO)])
def test_hook_runs_a_pass_that_needs_its_thread(cluster: Cluster, on: str, inner: str) -> None:
    cluster.workers[0].call(gates.run_gated_pass_in_hook, on, inner)


@pytest.mark.parametrize("inner", [ZERO, ONE])
@pytest.mark.parametrize("on", ["cpu", ZERO])
def test_hook_runs_a_local_backward(cluster: Cluster, on: str, inner: str) -> None:
    cluster.workers[0].call(gates.run_local_backward_in_hook, on, inner)


@pytest.mark.parametrize("on", ["cpu", ZERO])
def test_hook_waits_for_another_pass_on_its_device(cluster: Cluster, on: str) -> None:
    cluster.workers[0].call(gates.wait_in_hook_for_another_pass, on)


@pytest.mark.parametrize("where", ["worker0", "worker1"])
@pytest.mark.parametrize("on", [ZERO, ONE])
def test_error_on_a_device_ends_the_pass_at_once(cluster: Cluster, on: str, where: str) -> None:
    cluster.workers[0].call(gates.fail_beside_a_gate, on, where)


@pytest.mark.parametrize("on", ["cpu", ZERO])
def test_unused_result_in_fast_mode_is_found_at_once(cluster: Cluster, on: str) -> None:
    cluster.workers[0].call(gates.leave_a_result_unused, on)
