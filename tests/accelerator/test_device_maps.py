"""Device maps: where tensors arrive, and where results and gradients come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accelerator import mapped
from gradwire.cluster.api import Cluster
from gradwire.errors import CannotSend, ConfigurationError


@pytest.fixture(scope="module")
def device_maps() -> dict[str, dict[str, str]]:
    return mapped.MAPS


@pytest.mark.parametrize(
    "program",
    [mapped.map_arguments, mapped.map_results, mapped.miss_a_device, mapped.call_a_module],
    ids=lambda program: program.__name__,
)
def test_tensors_arrive_where_the_map_says(cluster: Cluster, program: Callable[[], None]) -> None:
    cluster.workers[0].call(program)


@pytest.mark.parametrize(
    ("worker", "here"), [(worker, here) for worker, found in mapped.MAPS.items() for here in found]
)
def test_gradients_come_back_through_maps(cluster: Cluster, worker: str, here: str) -> None:
    cluster.workers[0].call(mapped.differentiate, worker, here)


def test_a_caller_without_the_device_is_told_what_to_do(cluster: Cluster) -> None:
    with pytest.raises(CannotSend, match=rf"driver has no {mapped.ONE}; pass device_maps="):
        cluster.workers[1].call(torch.ones, 2, device=mapped.ZERO)


def test_a_map_for_a_worker_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"invalid target node names: worker7"):
        Cluster.local(1, device_maps={"worker7": {"cpu": "cuda:0"}})
