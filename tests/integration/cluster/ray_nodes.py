"""Ray clusters of several nodes on this machine, for tests."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.cluster_utils import Cluster as RayNodes

import quick_python
from gradwire.testing import LeakCheck, wait_until
from quick_ray import forked_workers

_OTHERS = ("thread pytest_timeout", "process raylet")  # what the tests themselves start and end
_SMALL: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False}
_ON_DEMAND = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}  # no workers ahead of work
_END_S = 60.0


class SmallNodes(RayNodes):  # type: ignore[misc]
    """Nodes that all have some options in common."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._options = options

    def __enter__(self) -> SmallNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def add_node(self, wait: bool = True, **options: Any) -> Any:
        return super().add_node(wait, **_SMALL, **self._options, **options)


@contextlib.contextmanager
def small_nodes(head: Mapping[str, Any], *others: Mapping[str, Any]) -> Iterator[SmallNodes]:
    """Ray with a node for each set of options; the first has no monitor of an autoscaler, unless the options say so."""
    handler, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
    os.environ["RAY_TMPDIR"] = folder = tempfile.mkdtemp(prefix="gwr-", dir="/tmp")  # short: sockets have short paths
    try:
        with forked_workers(folder) as options, SmallNodes(options) as nodes:
            config = {**_ON_DEMAND, **head.get("_system_config", {})}
            nodes.add_node(**{"no_monitor": True, **head, "_system_config": config})
            for other in others:
                nodes.add_node(**other)
            yield nodes
    finally:
        signal.signal(signal.SIGTERM, handler)
        os.environ.clear()
        os.environ.update(environment)
        shutil.rmtree(folder, ignore_errors=True)


@ray.remote(num_cpus=0)
def _first_task() -> None:
    return None


@ray.remote(num_cpus=0)
class _FirstActor:
    def answer(self) -> None:
        return None


@contextlib.contextmanager
def ray_nodes(*num_cpus: int, **head: Any) -> Iterator[SmallNodes]:
    """Ray with so many processors on each node; this process is connected to the first one."""
    first, *others = ({"num_cpus": number} for number in num_cpus)
    with small_nodes({**first, **head}, *others) as nodes:
        try:
            ray.init(address=nodes.address, logging_level="error", log_to_driver=False)
            # Ray keeps the connections of the first ones.
            ray.get([_first_task.remote(), _FirstActor.remote().answer.remote()])
            yield nodes
        finally:
            ray.shutdown()


_PROGRAM = """
from cluster.ray_nodes import small_nodes

with small_nodes(*{options!r}) as nodes:
    print(nodes.address, flush=True)
    input()
"""


@contextlib.contextmanager
def nodes_of_a_program(*options: Mapping[str, Any], **environment: str) -> Iterator[str]:
    """As `small_nodes`, but in a separate program, so that nothing of Ray is in this process; yields the address."""
    with quick_python.Popen(
        [sys.executable, "-c", _PROGRAM.format(options=options)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), quick_python.NESTED: "1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()  # empty if the program has ended
            assert address, "Ray's nodes did not start"
            yield address
            process.stdin.write("\n")
            process.stdin.flush()
            process.wait(_END_S)
        finally:
            process.kill()


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
