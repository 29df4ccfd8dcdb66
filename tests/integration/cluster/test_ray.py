"""`Cluster.ray` on a Ray cluster of two nodes, which are both on this machine."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster as RayNodes
from ray.exceptions import ActorUnavailableError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

import gradwire
import quick_python
from cluster import tasks
from cluster.processes import children_of, is_there
from cluster.ray_nodes import no_leaks, ray_nodes
from cluster.shown import Shown
from documents import is_as_shown, text_shown_in
from gradwire.cluster import _ray, ray_scheduler
from gradwire.cluster._forkserver import close_idle_fork_server
from gradwire.cluster.ray_placement import Node
from gradwire.errors import ConfigurationError, WorkerLost, WorkerStartFailed
from gradwire.testing import LeakCheck, wait_until

ROOT = Path(__file__).resolve().parents[3]

# Ray leaves files and pipes of its own processes to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file.*/ray/:ResourceWarning")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(2, 2, no_monitor=False) as nodes:  # the monitor says whether there is an autoscaler
        yield nodes
        wait_until(lambda: free_cpus() == 4, 10.0, "that Ray has its resources back")


@pytest.fixture(scope="module", autouse=True)
def leak_check(_own_temporary_folder: None, nodes: RayNodes) -> Iterator[LeakCheck]:
    """Once for the file, because a test uses the connections of the one before it."""
    with no_leaks() as check:
        yield check


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> None:
    """The check for workers of the fork server would find those of Ray."""


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0.0)


def make_scheduler(num_workers: int, **options: Any) -> ray_scheduler.RayScheduler:
    return ray_scheduler.RayScheduler(ray_scheduler.RayOptions(**options), num_workers)


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def look_around() -> dict[str, Any]:
    """What is special about a worker in an actor."""
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "children": children_of(os.getpid()),
        "is_main": threading.current_thread() is threading.main_thread(),
        "colour": (os.environ.get("TEST_COLOUR"), os.environ.get("TEST_SHADE")),
        "node": ray.get_runtime_context().get_node_id(),
        "cpus": ray.get_runtime_context().get_assigned_resources().get("CPU"),
    }


def start_local_cluster() -> None:
    """Tries what only a driver may do."""
    gradwire.Cluster.local(1).close()


@pytest.fixture(scope="class")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The example, in a folder of its own that workers import from: other examples have names of tests' packages."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copy(ROOT / "examples" / "demo.py", folder)
    shutil.copy(ROOT / "docs" / "tutorial" / "8_ray.py", folder / "tutorial_on_ray.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("demo")
        sys.modules.pop("demo")


@pytest.fixture(scope="class")
def cluster(nodes: RayNodes, demo: ModuleType) -> Iterator[gradwire.Cluster]:
    with gradwire.Cluster.ray(
        3,
        roles={"ps": 1, "stage": 2},
        threads_per_worker=2,
        runtime_env={"env_vars": {"TEST_SHADE": "light"}},
        env={"TEST_COLOUR": "blue"},
        imports=["demo"],
    ) as cluster:
        yield cluster


class TestWorkers:
    """Tests that leave the workers as they are, and share them."""

    def test_they_are_named_and_ordered_by_node(self, cluster: gradwire.Cluster) -> None:
        assert [worker.name for worker in cluster.workers] == ["ps0", "stage0", "stage1"]
        seen = [worker.call(look_around) for worker in cluster.workers]
        assert len({item["node"] for item in seen}) == 2, "SPREAD uses both nodes"
        assert sorted(seen, key=lambda item: item["node"]) == seen
        assert [item["pid"] for item in seen] == [worker.pid for worker in cluster.workers]

    def test_an_actor_has_its_bundle_and_the_threads_that_were_asked_for(self, cluster: gradwire.Cluster) -> None:
        seen = cluster.workers[0].call(look_around)
        assert (seen["cpus"], seen["omp"], seen["threads"]) == (1.0, "1", 2)
        assert seen["colour"] == ("blue", "light")

    def test_the_agent_is_in_the_actor_and_nothing_is_forked_there(self, cluster: gradwire.Cluster) -> None:
        seen = cluster.workers[0].call(look_around)
        assert seen["children"] == []
        assert not seen["is_main"]
        with pytest.raises(
            ConfigurationError, match="ps0 is a worker of a cluster, and only a driver can start a cluster"
        ):
            cluster.workers[0].call(start_local_cluster)

    def test_they_call_each_other(self, cluster: gradwire.Cluster) -> None:
        assert cluster.workers[0].call(tasks.ask_who, "stage1") == "stage1"

    def test_their_output_comes_over_gradwire(
        self, cluster: gradwire.Cluster, capfd: pytest.CaptureFixture[str]
    ) -> None:
        expected = {f"[{worker.name}] to be seen {worker.rank + 5}" for worker in cluster.workers}
        with Shown() as shown:
            for worker in cluster.workers:  # Ray itself would show one of these, because they differ in digits alone
                worker.call(tasks.speak, f"to be seen {worker.rank + 5}\n")
            wait_until(lambda: expected <= set(shown.out.splitlines()), 20.0)
        assert {*shown.out.splitlines(), *capfd.readouterr().out.splitlines()} == expected, "not a second time by Ray"

    def test_the_model_of_the_demo_trains_across_both_nodes(self, cluster: gradwire.Cluster, demo: ModuleType) -> None:
        assert demo.gradient_difference(cluster, torch.float64) < 1e-15  # from the same step in one process
        model = demo.place_model(cluster)
        images, digits = demo.draw_digits(200, seed=0)
        optimizer = gradwire.optim.DistributedOptimizer(torch.optim.Adam, list(model), lr=3e-3)
        losses = [demo.train_batch(model, optimizer, images, digits, demo.Clock()) for _ in range(30)]
        assert losses[-1] < 0.5 * losses[0]

    def test_the_program_of_the_tutorial(self, cluster: gradwire.Cluster, capfd: pytest.CaptureFixture[str]) -> None:
        importlib.import_module("tutorial_on_ray").run(cluster)
        sys.modules.pop("tutorial_on_ray")
        assert re.fullmatch(r"right: (9\d|100)% of new reviews\n", capfd.readouterr().out)

    def test_describe_says_what_was_started(self, cluster: gradwire.Cluster) -> None:
        text = cluster.describe()
        assert f"Ray {ray.__version__} at " in text
        assert "one bundle {CPU: 1} for each worker, placed with strategy SPREAD" in text
        assert "num_cpus=1, num_gpus=0, resources={}, max_restarts=0, max_task_retries=0" in text
        for worker in cluster.workers:
            assert f"process {worker.pid} " in text


class TestPlacement:
    def test_too_many_fail_at_once_with_what_is_missing(self, nodes: RayNodes) -> None:
        wait_until(lambda: free_cpus() == 4, 10.0)
        began = time.monotonic()
        with pytest.raises(WorkerStartFailed, match="room for 2 now, and for 2 on an idle cluster") as failed:
            gradwire.Cluster.ray(3, strategy="STRICT_SPREAD")
        assert time.monotonic() - began < 20.0, "it does not wait for 300 s"
        assert str(failed.value).count("2 of 2 CPU free") == 2
        assert not gradwire.Cluster.current()

    def test_a_bundle_that_no_node_can_hold(self, nodes: RayNodes) -> None:
        with pytest.raises(WorkerStartFailed) as failed:
            gradwire.Cluster.ray(1, resources={"CPU": 1, "GPU": 1})
        shown = re.sub(r"node 10\.0\.0\.\d \(\w+\)", "node ...", text_shown_in("docs/tutorial/8-ray.md", "Ray cannot"))
        assert is_as_shown(shown, " ".join(str(failed.value).split()))

    def test_what_others_hold_is_waited_for_until_the_deadline(self, nodes: RayNodes) -> None:
        held = placement_group([{"CPU": 2}] * 2)
        assert held.wait(10)
        try:
            with (
                contextlib.closing(make_scheduler(1)) as scheduler,
                pytest.raises(WorkerStartFailed, match="0 of 2 CPU free"),
            ):
                scheduler.launch(1, soon(0.5))
        finally:
            remove_placement_group(held)
        wait_until(lambda: free_cpus() == 4, 10.0)

    def test_the_group_of_a_failed_start_is_removed(self, nodes: RayNodes) -> None:
        states = {group["state"] for group in placement_group_table().values()}
        assert states <= {"REMOVED"}

    def test_a_launch_ends_when_it_is_closed(self, nodes: RayNodes) -> None:
        held = placement_group([{"CPU": 2}] * 2)
        assert held.wait(10)
        scheduler, errors = make_scheduler(1), []

        def launch() -> None:
            try:
                scheduler.launch(1, soon(60.0))
            except WorkerStartFailed as error:
                errors.append(str(error))

        def is_pending() -> bool:
            return "PENDING" in {group["state"] for group in placement_group_table().values()}

        thread = threading.Thread(target=launch)
        thread.start()
        try:
            wait_until(is_pending, 20.0)
            scheduler.close()
            thread.join(10.0)
            assert errors == ["no actor was started: the cluster is closed"]
            wait_until(lambda: not is_pending(), 10.0, "that the group is removed")
            with pytest.raises(WorkerStartFailed, match="the cluster is closed"):
                scheduler.launch(1, soon())
        finally:
            remove_placement_group(held)
        wait_until(lambda: free_cpus() == 4, 10.0)

    def test_no_autoscaler_is_seen_here(self, nodes: RayNodes) -> None:
        assert _ray.can_grow() is False

    def test_ctrl_c_ends_the_wait(self, nodes: RayNodes) -> None:
        held = placement_group([{"CPU": 2}] * 2)
        assert held.wait(10)

        def interrupt() -> None:
            wait_until(lambda: "PENDING" in {group["state"] for group in placement_group_table().values()}, 20.0)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                gradwire.Cluster.ray(1)
        finally:
            thread.join(30.0)
            remove_placement_group(held)
        wait_until(lambda: free_cpus() == 4, 10.0)


class TestConnection:
    def test_the_program_s_own_connection_is_left_open(self, nodes: RayNodes) -> None:
        with gradwire.Cluster.ray(1, resources={"CPU": 0.5}) as cluster:
            (worker,) = cluster.workers
            pid = worker.pid
            assert pid is not None
        assert re.search(r"ended: (it )?left>$", repr(worker)), "the worker leaves before Ray ends its process"
        assert ray.is_initialized()
        wait_until(lambda: not is_there(pid), 10.0)
        wait_until(lambda: free_cpus() == 4, 10.0)

    def test_another_address_than_that_of_the_program(self, nodes: RayNodes) -> None:
        with pytest.raises(ConfigurationError, match=rf"already connected to the Ray cluster at {nodes.address}, not"):
            gradwire.Cluster.ray(1, address="10.1.1.1:6379")

    def test_a_connection_by_ray_client_is_refused(self, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
        """The client's server needs grpcio, which is not a dependency."""
        monkeypatch.setattr(_ray, "is_client", lambda: True)
        with pytest.raises(ConfigurationError, match=r"connected to Ray by Ray Client.*ray job submit"):
            gradwire.Cluster.ray(1)

    def test_without_ray_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        for name in [
            name for name in sys.modules if name.startswith(("gradwire.cluster.ray_", "gradwire.cluster._ray"))
        ]:
            monkeypatch.delitem(sys.modules, name)
        with pytest.raises(ConfigurationError, match=r"pip install 'gradwire\[ray\]'"):
            gradwire.Cluster.ray(1)

    @pytest.mark.usefixtures("fresh_fork_servers")
    def test_local_workers_can_be_started_beside_ray(self, nodes: RayNodes) -> None:
        """The fork server is a fresh process, which has none of the threads that Ray has in this one."""
        with gradwire.Cluster.local(2) as cluster:
            assert cluster.workers[0].call(tasks.ask_who, "worker1") == "worker1"
        close_idle_fork_server()


@ray.remote(num_cpus=0, max_retries=0)
def serve(is_reached: bool) -> None:
    if not is_reached:
        raise ActorUnavailableError("the connection was lost", None)


class Unreachable:
    """The handle of an actor that Ray does not reach for a while; a network that drops one connection cannot be had here."""

    def __init__(self) -> None:
        self.serve = self
        self._num_calls = 0

    def remote(self) -> Any:
        self._num_calls += 1
        return serve.remote(self._num_calls > 1)


class TestEnds:
    def test_a_worker_that_is_killed_is_lost_with_ray_s_reason(self, nodes: RayNodes) -> None:
        with gradwire.Cluster.ray(2, strategy="STRICT_SPREAD") as cluster:
            victim, other = cluster.workers
            os.kill(victim.pid or 0, signal.SIGKILL)
            with pytest.raises(WorkerLost, match="worker0"):
                victim.call(tasks.take_a_moment)
            wait_until(lambda: not victim.is_alive, 10.0)
            assert "its worker process has died" in repr(victim)
            with pytest.raises(WorkerLost, match="worker0"):
                other.call(tasks.ask_who, "worker0")

    def test_a_new_process_takes_the_bundle_of_an_old_one(self, nodes: RayNodes) -> None:
        with contextlib.closing(make_scheduler(2, strategy="STRICT_SPREAD")) as scheduler:
            first, second = scheduler.launch(2, soon())
            assert free_cpus() == 2
            (third,) = scheduler.launch(1, soon(), replaces=second)
            assert third.place == second.place != first.place
            wait_until(lambda: second.end_reason() is not None, 10.0)
            assert second.end_reason() == "killed by the driver"
            assert (first.end_reason(), third.end_reason()) == (None, None)
            assert free_cpus() == 2
        wait_until(lambda: free_cpus() == 4, 10.0)

    def test_an_actor_that_cannot_be_reached_is_watched_again(self, nodes: RayNodes) -> None:
        process = ray_scheduler.RayProcess(Unreachable(), None, 0, Node("a" * 40, "10.0.0.4", {}, {}), 0)
        wait_until(lambda: ray.wait([process.service], timeout=0)[0], 20.0)
        assert process.on_service_ended() is False
        assert process.end_reason() is None
        process.watch_again()
        wait_until(lambda: ray.wait([process.service], timeout=0)[0], 20.0)
        assert process.on_service_ended() is True
        assert process.end_reason() == "left"

    def test_workers_end_with_the_driver(self, nodes: RayNodes, tmp_path: Path) -> None:
        program = f"""if True:
            import time
            import gradwire

            cluster = gradwire.Cluster.ray(2, address={nodes.address!r})
            print(*(worker.pid for worker in cluster.workers), flush=True)
            cluster.workers[0].with_timeout(0).call(time.sleep, 100)
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
        with quick_python.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
        ) as driver:
            assert driver.stdout is not None
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(pids) == 2
            driver.kill()
            wait_until(lambda: not any(map(is_there, pids)), 30.0, f"the end of {pids}")
        wait_until(lambda: free_cpus() == 4, 30.0)
