"""`Worker`: a handle on one worker of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from gradwire.nn import RemoteModule
from gradwire.rpc.futures import CallFuture
from gradwire.types import WorkerInfo

if TYPE_CHECKING:
    from gradwire.cluster.monitor import Member, Monitor

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """A worker of a cluster, for calling functions on it. The object stays valid when the worker is restarted."""

    def __init__(self, monitor: Monitor, member: Member, timeout_s: float | None = None) -> None:
        self._monitor = monitor
        self._member = member
        self._agent = monitor.agent
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        reason = self._monitor.lost_reason(self._member)
        state = self._monitor.state_of(self._member) + (f": {reason}" if reason else "")
        return f"<Worker {self.name} rank={self.rank} pid={self.pid} {state}>"

    @property
    def info(self) -> WorkerInfo:
        """Name and rank, as the functions of `gradwire.rpc` take them."""
        return self._member.spec.info

    @property
    def name(self) -> str:
        """The name, unique in the cluster."""
        return self.info.name

    @property
    def rank(self) -> int:
        """The rank, from 0; no two workers of a cluster ever have the same."""
        return self.info.id

    @property
    def role(self) -> str:
        """The role given when the worker was started; ``worker`` by default."""
        return self._member.spec.role

    @property
    def pid(self) -> int | None:
        """The process id, which changes on a restart."""
        return self._member.handle.pid

    @property
    def is_alive(self) -> bool:
        """Whether the worker's process is running and belongs to the cluster."""
        return self._monitor.is_alive(self._member)

    def with_timeout(self, timeout: float | None) -> Worker:
        """Return a handle on the same worker with another timeout: ``worker.with_timeout(5).call(f)``.

        Applies to `call` and `submit`, not to `module`.

        Args:
            timeout: Seconds; 0 for no timeout, None for the cluster's `rpc_timeout`.
        """
        return Worker(self._monitor, self._member, timeout)

    @overload
    def call(self, function: str, /, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    def call(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function on this worker and return its result.

        Args:
            function: The function, or its exposed name.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Raises:
            CannotSend: The function, an argument or the result cannot be sent.
            LimitExceeded: The message is larger than `Limits` allows.
            RpcTimeout: The deadline passed.
            WorkerLost: The worker died; the message says whether it is being restarted.
            NotExposed, NoSuchFunction: The worker does not offer the function.
            NotInitialized: The cluster is closed.
            Exception: The function's exception, with its own type if that is known here.
        """
        return self._agent.call(self.name, function, args, kwargs, self._timeout_s)

    @overload
    def submit(self, function: str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]: ...

    @overload
    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...

    def submit(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Start a call on this worker and return a `torch.futures.Future`; takes the arguments of `call`.

        Raises:
            CannotSend: The function or an argument cannot be sent.
            LimitExceeded: The message is larger than `Limits` allows.
            RpcTimeout: The call could not be sent before the deadline.
            WorkerLost: The worker died.
            NotInitialized: The cluster is closed.
        """
        return self._agent.submit(self.name, function, args, kwargs, self._timeout_s)

    def module(self, module_cls: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> RemoteModule:
        """Create a module on this worker and return a handle that is used like the module.

        The module stays on the device on which it is created, e.g. with ``worker.module(nn.Linear, 3, 2, device="cuda:0")``.
        `gradwire.nn.RemoteModule` also takes a device to move it to and controls how trainers share the parameters.

        Args:
            module_cls: The class, or any function that returns a module.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Raises:
            NotInitialized: The cluster is closed.
            CannotSend: An argument cannot be sent.
            RpcTimeout: The module was not created within the cluster's `rpc_timeout`.
            WorkerLost: The worker died.
            Exception: The exception that `module_cls` raised.
        """
        return RemoteModule(self.name, module_cls, args, kwargs)
