"""Ray clusters of several nodes on this machine, for tests."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import ray
from ray.cluster_utils import Cluster as RayNodes

from gradwire.testing import LeakCheck, wait_until

_OTHERS = ("thread pytest_timeout", "process raylet")  # what the tests themselves start and end
SMALL: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False}
# Ray takes half a minute to miss a node that is gone without a word; tests do not wait for that.
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}


@ray.remote(num_cpus=0)
def _first_task() -> None:
    return None


@ray.remote(num_cpus=0)
class _FirstActor:
    def answer(self) -> None:
        return None


@contextlib.contextmanager
def ray_nodes(*num_cpus: int) -> Iterator[RayNodes]:
    """Ray with so many processors on each node; this process is connected to the first one."""
    handler, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
    os.environ["RAY_TMPDIR"] = folder = tempfile.mkdtemp(prefix="gwr-", dir="/tmp")  # short: sockets have short paths
    nodes = RayNodes(initialize_head=True, head_node_args={**SMALL, "num_cpus": num_cpus[0], "_system_config": QUICK})
    try:
        for number in num_cpus[1:]:
            nodes.add_node(num_cpus=number, **SMALL)
        ray.init(address=nodes.address, logging_level="error", log_to_driver=False)
        ray.get(
            [_first_task.remote(), _FirstActor.remote().answer.remote()]
        )  # Ray keeps the connections of the first ones
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()
        signal.signal(signal.SIGTERM, handler)
        os.environ.clear()
        os.environ.update(environment)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def no_leaks() -> Iterator[LeakCheck]:
    """Fails if something of gradwire is left at the end; begins when Ray has its connections."""
    check = LeakCheck()

    def left() -> list[str]:
        return [leak for leak in check.leaks() if not leak.startswith(_OTHERS)]

    yield check
    gc.collect()
    with contextlib.suppress(TimeoutError):  # the assertion says what is left
        wait_until(lambda: not left(), 20.0)
    assert not (found := left()), f"left behind: {found}"
