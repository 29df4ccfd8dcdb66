"""Systems with actors: Ray, with plain calls and as a compiled graph, and Monarch. None of them carries gradients.

They have no `servers` of ours: their processes are below the driver's (`processes.with_descendants`).
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

START_TIMEOUT_S = 90.0
CALL_TIMEOUT_S = 30.0
OBJECT_STORE_BYTES = 128 << 20


class RayActor:
    """A plain call of an actor's method, then `ray.get`. Results of more than 100 KB come through Ray's object store."""

    package = "ray"
    servers = ()

    def start(self) -> None:
        torch.set_num_threads(1)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        self.ray = ray
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=self._folder.name,
        )
        self.prepare()

    def prepare(self) -> None:
        self._actor = self.make_actor()

    def make_actor(self) -> Any:
        class Echo:
            def __init__(self) -> None:
                torch.set_num_threads(1)

            def noop(self, _: None = None) -> None:
                pass

            def echo(self, tensor: torch.Tensor) -> torch.Tensor:
                return tensor

        actor = self.ray.remote(num_cpus=1)(Echo).remote()
        self.ray.get(actor.noop.remote(), timeout=START_TIMEOUT_S)
        return actor

    def noop(self) -> None:
        self.ray.get(self._actor.noop.remote(), timeout=CALL_TIMEOUT_S)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.ray.get(self._actor.echo.remote(tensor), timeout=CALL_TIMEOUT_S)

    def close(self) -> None:
        self.ray.shutdown()
        self._folder.cleanup()


class RayGraph(RayActor):
    """The same methods, each compiled into a static graph of one node. An actor serves one graph at a time."""

    def prepare(self) -> None:
        self._noop, self._echo = (self._compile(method) for method in ("noop", "echo"))

    def _compile(self, method: str) -> Any:
        from ray.dag import InputNode

        with InputNode() as given:
            return getattr(self.make_actor(), method).bind(given).experimental_compile()

    def noop(self) -> None:
        self.ray.get(self._noop.execute(None), timeout=CALL_TIMEOUT_S)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.ray.get(self._echo.execute(tensor), timeout=CALL_TIMEOUT_S)

    def close(self) -> None:
        self._noop.teardown(kill_actors=True)
        self._echo.teardown(kill_actors=True)
        super().close()


class MonarchActor:
    """A call of an actor's endpoint in another process of this host."""

    package = "torchmonarch"
    servers = ()

    def start(self) -> None:
        torch.set_num_threads(1)
        from monarch.actor import Actor, endpoint, this_host

        class Echo(Actor):  # here, so that it travels by value: the actor's process does not have this module
            def __init__(self) -> None:
                torch.set_num_threads(1)

            @endpoint
            def noop(self) -> None:
                pass

            @endpoint
            def echo(self, tensor: torch.Tensor) -> torch.Tensor:
                return tensor

        self._processes = this_host().spawn_procs(per_host={"gpus": 1})
        self._actor = self._processes.spawn("echo", Echo)
        self._actor.noop.call_one().get(timeout=START_TIMEOUT_S)

    def noop(self) -> None:
        self._actor.noop.call_one().get(timeout=CALL_TIMEOUT_S)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._actor.echo.call_one(tensor).get(timeout=CALL_TIMEOUT_S)

    def close(self) -> None:
        from monarch.actor import shutdown_context

        self._processes.stop().get(timeout=CALL_TIMEOUT_S)
        shutdown_context().get(timeout=CALL_TIMEOUT_S)
