"""Starting and ending a worker the way torch does: what it checks, and which of its private functions it goes through.

Programs and tests replace some of these functions in `torch.distributed.rpc.api`, so they are looked up there each time.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
import sys
from typing import Any

from torch._C import _distributed_rpc
from torch.distributed.rendezvous import rendezvous

from gradwire import autograd, rpc
from gradwire.compat import rref as _rref
from gradwire.errors import RpcError
from gradwire.rpc.agent import Agent, check_name
from gradwire.rpc.backend_registry import BackendType
from gradwire.rpc.options import RpcBackendOptions, RpcOptions, TensorPipeRpcBackendOptions
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
            num_worker_threads=config.num_worker_threads, rpc_timeout=self._agent.client.default_timeout_s
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


_DELETE = operator.attrgetter("_delete_all_user_and_unforked_owner_rrefs")


def _api() -> Any:
    return importlib.import_module("torch.distributed.rpc.api")


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """As `gradwire.rpc.init_rpc`, with torch's checks of types, and for backends that others registered.

    Raises:
        TypeError: The backend or its options are of another type.
        ConfigurationError: Another argument is wrong.
        RendezvousFailed: Not every rank arrived in time.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {rpc_backend_options!r}"
        )
    if backend is None and rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcOptions):
        raise TypeError(f"Could not infer backend for options {rpc_backend_options}; pass backend=")
    backend = backend or BackendType.TENSORPIPE
    if backend in (BackendType.TENSORPIPE, BackendType.GRADWIRE):
        _check_options(backend, rpc_backend_options)
        rpc.init_rpc(name, backend, rank, world_size, rpc_backend_options)
        _distributed_rpc._set_profiler_node_id(rpc.get_worker_info().id)  # torch's profiler notes it with each event
    else:
        _start_other(backend, name, rank, world_size, rpc_backend_options)


def _check_options(backend: BackendType, options: RpcBackendOptions | None) -> None:
    if backend is BackendType.TENSORPIPE and not isinstance(options, RpcOptions | None):
        wanted = TensorPipeRpcBackendOptions.__name__
        raise TypeError(f"`rpc_backend_options` must be a `{wanted}`, not {type(options).__name__}")


def _start_other(
    backend: BackendType, name: str, rank: int, world_size: int | None, options: RpcBackendOptions | None
) -> None:
    options = options or rpc.backend_registry.construct_rpc_backend_options(backend)
    store, rank, world = next(rendezvous(options.init_method, rank, -1 if world_size is None else world_size))
    agent = backend.value.init_backend_handler(
        store=store, name=name, rank=rank, world_size=world, rpc_backend_options=options
    )
    _api()._set_and_start_rpc_agent(agent)


def _init_rpc_backend(
    backend: BackendType = BackendType.TENSORPIPE,
    store: Any = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """As `init_rpc`. The workers meet where the options say; the store was a means to that end."""
    init_rpc(name, backend, rank, world_size, rpc_backend_options)


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Makes an agent the current one; gradwire's own are started already."""
    rpc.set_current_agent(agent._agent if isinstance(agent, RpcAgent) else agent)


def _reset_current_rpc_agent() -> None:
    """Forgets the current agent."""
    rpc.set_current_agent(None)


def _wait_all_workers(timeout: float = rpc.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Returns when every worker has called it and no call is under way anywhere."""
    rpc._wait_all_workers(timeout)


def shutdown(graceful: bool = True, timeout: float = rpc.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """As `gradwire.rpc.shutdown`; replaced steps of it are taken as they are.

    Raises:
        RpcTimeout: Somebody did not come in time; this worker has left all the same.
        RRefError: A replaced step left references behind, and that is not to be ignored.
        NotInitialized: This process is no worker.
    """
    api = _api()
    is_whole = api._wait_all_workers is _wait_all_workers and _DELETE(api) is _rref.delete_all
    if is_whole or not graceful:
        rpc.shutdown(graceful, timeout)
        return
    try:
        api._wait_all_workers(timeout)
        _DELETE(api)()
        leak = None if api._ignore_rref_leak else _rref.find_leak()
        with contextlib.suppress(RpcError):  # the others look, too, before anybody leaves
            rpc._wait_all_workers(timeout)
        if leak is not None:
            raise leak
    finally:
        rpc.shutdown(graceful=False)


_logger = logging.getLogger("gradwire.failures")


class _ToStderr(logging.Handler):
    """Writes to whatever stderr is at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one failure with its traceback."""
        print(self.format(record), file=sys.stderr, flush=True)


_handler = _ToStderr()
_before: list[tuple[int, bool]] = []  # level and propagation of the logger, if it prints now


def start() -> None:
    """Begins to print."""
    if not _before:
        _before.append((_logger.level, _logger.propagate))
        _logger.addHandler(_handler)
        _logger.setLevel(logging.DEBUG)
        _logger.propagate = False


def stop() -> None:
    """Leaves the logger as it was."""
    if _before:
        _logger.removeHandler(_handler)
        level, _logger.propagate = _before.pop()
        _logger.setLevel(level)
