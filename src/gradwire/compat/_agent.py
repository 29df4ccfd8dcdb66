"""torch's agent, worker info and numbers for people, as views of a gradwire agent."""

from __future__ import annotations

from typing import Any

from gradwire import autograd, rpc
from gradwire.compat import _rref
from gradwire.rpc.agent import Agent
from gradwire.rpc.worker import check_name
from gradwire.types import WorkerInfo as GradwireWorkerInfo

_MAX_NAME = 128


class RpcAgent:
    """What torch's programs ask of an agent.

    Args:
        agent: The worker.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._agent!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RpcAgent) and other._agent is self._agent

    def __hash__(self) -> int:
        return hash(self._agent)

    def get_worker_info(self, worker: str | int | None = None) -> GradwireWorkerInfo:
        """Name and rank of a worker; of this one if none is named."""
        return self._agent.worker_info(worker)

    def get_worker_infos(self) -> list[GradwireWorkerInfo]:
        """All known workers."""
        return self._agent.directory.infos()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Waits until no call is under way anywhere, and leaves if asked to."""
        rpc._wait_all_workers(timeout)
        if shutdown:
            self.shutdown()

    def sync(self) -> None:
        """Waits until every worker is here."""
        rpc._barrier()

    def shutdown(self) -> None:
        """Leaves at once."""
        self._agent.close()

    def get_debug_info(self) -> dict[str, str]:
        """Numbers about the agent, as text, under torch's names where it has one."""
        numbers = self._agent.statistics()
        info = {f"agent.{name}": str(getattr(numbers, name)) for name in numbers.__slots__}
        info["agent.thread_pool_size"] = str(self._agent.config.num_worker_threads)
        info["agent.num_idle_threads"] = str(max(0, numbers.num_threads - numbers.num_running))
        info["agent.num_pending_requests"] = str(numbers.num_pending)
        meter = self._agent.reactor.gil_meter
        if meter is not None:
            info["agent.gil_average_wait_time_us"] = f"{meter.average_us:.1f}"
        return info

    def get_metrics(self) -> dict[str, str]:
        """The same."""
        return self.get_debug_info()

    def _get_device_map(self, dst: Any) -> dict[Any, Any]:
        return {}


class TensorPipeAgent(RpcAgent):
    """The agent under the name of torch's default one."""

    @property
    def is_static_group(self) -> bool:
        """Whether the workers are all known from the start."""
        return self._agent.directory.is_fixed

    def _get_backend_options(self) -> rpc.TensorPipeRpcBackendOptions:
        config = self._agent.config
        return rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=config.num_worker_threads, rpc_timeout=self._agent.caller.default_timeout_s
        )


class _Instances(type):
    """What gradwire made counts as an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, GradwireWorkerInfo)


class WorkerInfo(metaclass=_Instances):
    """Makes gradwire's `WorkerInfo`, after a look at the name."""

    def __new__(cls, name: str, id: int) -> GradwireWorkerInfo:  # type: ignore[misc]
        check_name(name, _MAX_NAME)
        return GradwireWorkerInfo(name, id)


def current_agent() -> RpcAgent:
    """torch's view of the agent of this process."""
    return TensorPipeAgent(rpc.current_agent())


def get_debug_info() -> dict[str, str]:
    """Numbers about references, agent and autograd of this worker, as text."""
    return {**_rref.get_debug_info(), **current_agent().get_debug_info(), **autograd._get_debug_info()}
