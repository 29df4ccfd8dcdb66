"""`Worker`: one worker of a cluster, as the program uses it."""

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
    """One worker of a cluster, to call functions on. It stays the same when the worker is started again."""

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
        """The name; unique in the cluster."""
        return self.info.name

    @property
    def rank(self) -> int:
        """The number, from 0; no two workers of a cluster ever have the same."""
        return self.info.id

    @property
    def role(self) -> str:
        """What the program uses it for, as it said when it started the worker; ``worker`` if it did not."""
        return self._member.spec.role

    @property
    def pid(self) -> int | None:
        """The process id; another one after a restart."""
        return self._member.handle.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is there and belongs to the cluster."""
        return self._monitor.is_alive(self._member)

    def with_timeout(self, timeout: float | None) -> Worker:
        """Return the same worker, for calls with another deadline: ``worker.with_timeout(5).call(f)``.

        Args:
            timeout: Seconds; 0 for no deadline, None for the cluster's `rpc_timeout`.
        """
        return Worker(self._monitor, self._member, timeout)

    @overload
    def call(self, function: str, /, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    def call(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function on this worker and return its result.

        Args:
            function: The function, or the name that it is exposed under.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Raises:
            CannotSend: An argument or the result cannot travel.
            RpcTimeout: The deadline passed.
            WorkerLost: The worker died; the text says whether it is being restarted.
            Exception: The one that the function raised, as its own type where that is known here.
        """
        return self._agent.call(self.name, function, args, kwargs, self._timeout_s)

    @overload
    def submit(self, function: str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]: ...

    @overload
    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...

    def submit(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Start a function on this worker and return a `torch.futures.Future`; takes what `call` takes.

        Raises:
            CannotSend: An argument cannot travel.
            WorkerLost: The worker died.
        """
        return self._agent.submit(self.name, function, args, kwargs, self._timeout_s)

    def module(self, module_cls: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> RemoteModule:
        """Make a module on this worker and return a handle on it, which is used like the module.

        It stays on the device that it is made on, such as that of ``worker.module(nn.Linear, 3, 2, device="cuda:0")``.
        `gradwire.nn.RemoteModule` does the same with a device to move it to, and a choice of how trainers share the
        parameters.

        Args:
            module_cls: The class, or any function that returns a module.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Raises:
            CannotSend: An argument cannot travel.
            WorkerLost: The worker died.
        """
        return RemoteModule(self.name, module_cls, args, kwargs)
