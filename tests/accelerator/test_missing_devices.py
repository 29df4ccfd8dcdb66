"""Tensors for a worker that lacks their device, and devices that got their names late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gradwire as gw
from accelerator import copies, device
from gradwire.cluster.api import Cluster
from gradwire.errors import CannotSend
from gradwire.testing import LeakCheck

NO_DEVICE = rf"{{}} has no {device.NAME}:0; pass device_maps= .* or move the tensor to the CPU"


@pytest.fixture(scope="module")
def cluster(leak_check: LeakCheck) -> Iterator[Cluster]:
    """One worker with the device, and one without; the driver has none either."""
    try:
        device.check_stand_in()  # a real device is there for all workers
        device.build()
    except device.NeedsStandIn as reason:
        pytest.skip(str(reason))
    except device.NoCompiler as reason:
        pytest.skip(str(reason))
    with Cluster.local(2) as cluster:
        cluster.workers[0].call(device.load)
        yield cluster


@pytest.mark.parametrize("how", ["argument", "inside"])
def test_an_argument_for_a_worker_without_the_device_is_an_error_of_the_call(cluster: Cluster, how: str) -> None:
    first, second = cluster.workers
    with pytest.raises(CannotSend, match=NO_DEVICE.format("worker1")):
        first.call(copies.send_to, "worker1", how)
    assert first.call(gw.rpc.rpc_sync, "worker1", torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]
    assert second.call(abs, -1) == 1


@pytest.mark.parametrize("function", [copies.give, copies.give_inside], ids=lambda function: function.__name__)
def test_a_result_for_a_worker_without_the_device_is_an_error_of_the_call(cluster: Cluster, function: object) -> None:
    with pytest.raises(CannotSend, match=NO_DEVICE.format("driver")):
        cluster.workers[0].call(function, 1.0)  # type: ignore[arg-type]
    assert cluster.workers[0].call(abs, -1) == 1


def test_a_reference_can_be_used_where_its_value_cannot_be_fetched(cluster: Cluster) -> None:
    rref = gw.rpc.remote("worker0", copies.give, args=(2.0,))
    with pytest.raises(CannotSend, match=NO_DEVICE.format("driver")):
        rref.to_here()
    assert gw.rpc.rpc_sync("worker0", _sum, args=(rref,)) == 6.0


def _sum(rref: gw.rpc.RRef[torch.Tensor]) -> float:
    return float(rref.local_value().sum().item())


@pytest.mark.parametrize("trust", ["code", "data"])
def test_a_map_to_a_device_that_is_missing_is_an_error_of_the_call(cluster: Cluster, trust: str) -> None:
    cluster.workers[0].call(copies.send_what_the_map_names, trust)


def test_a_device_may_be_renamed_after_gradwire_was_imported(cluster: Cluster) -> None:
    cluster.workers[1].call(copies.rename)  # in the last test, because the device stays
