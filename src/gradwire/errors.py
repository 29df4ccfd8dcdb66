"""Every error that gradwire raises.

GradwireError
  ConfigurationError (ValueError)        an option is wrong; nothing was started
  TransportError
    ConnectFailed (ConnectionError)      no worker answered at that address
    ConnectionLost (ConnectionError)     the other side ended it
    ConnectionClosed (ConnectionError)   this side had ended it
    DecodeError                          bytes are not a valid frame; the connection is closed
      LimitExceeded                      a frame is larger than this worker accepts
    ResourceExhausted                    this process is out of descriptors or memory
    AuthenticationFailed                 wrong key, unknown identity, other trust level or version
      IdentityTaken                      another worker has that name or rank
  CannotSend (TypeError, RuntimeError)   a value or tensor cannot be sent; says why
  WaitTimeout (TimeoutError)             Future.wait(timeout=...) timed out; the call goes on
  RpcError (RuntimeError)
    RpcTimeout (TimeoutError)            the deadline passed; says in which phase
    CallCancelled                        the caller cancelled it
    WorkerLost (ConnectionError)         the worker died or left
    UnknownWorker (ValueError)           no worker has that name or rank
    RemoteCallFailed                     the function raised an exception whose type is not known here
    NoSuchFunction (AttributeError)      the callee's module has no function of that name
    NotExposed (PermissionError)         trust="data" and the function was not marked with expose
    AlreadyInitialized (ConfigurationError)  this process is a worker already
    DuplicateWorker (ConfigurationError)  two workers have one name or rank
    InvalidName (ConfigurationError)     a worker cannot have that name
    NotInitialized                       init_rpc was not called in this process
    RendezvousFailed                     not every rank arrived
    WorkerStartFailed                    a worker process ended before it was ready
  RRefError (RuntimeError)               a reference cannot be used like that
    NotTheOwner                          only the worker that owns the value can do that
    OwnerLost (WorkerLost)               the worker that owned the value is gone, and the value with it
  AutogradError (RuntimeError)
    NoActiveContext                      not inside gradwire.autograd.context()
    UnknownContext                       the context was released or never existed here
    BackwardFailed                       a backward pass ended without gradients, everywhere
      UnsettledSend                      FAST mode: no gradient comes back for a message
  OptimizerError (RuntimeError)          a distributed optimizer failed on some workers; says which
    OptimizerNotMade (ConfigurationError)  some workers could not make their part of it
    OptimizerStepFailed                  some workers did not step; says which did
  CheckpointError (RuntimeError)         a checkpoint was not saved or not loaded
    CannotSave (TypeError)               a value cannot be stored; says where it is
    CheckpointBusy                       another process is saving to that directory
    CheckpointWriteFailed                a worker could not write its part
    CheckpointMissing (FileNotFoundError)  no checkpoint is there, or a file of it is gone
    CheckpointDamaged                    a file is not what was written
    CheckpointMismatch (ValueError)      it does not fit the objects that were to be filled

Messages name the worker, the operation and the next step. Errors travel between workers as data (`ErrorInfo` in
`gradwire.wire.messages`), never as pickles.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

DOCS_URL: Final = "https://gradwire.readthedocs.io/"
"""Where the documentation is published. Its page ``errors`` has a section for each class of this module."""


class GradwireError(Exception):
    """Base of every error that gradwire raises on its own account.

    A printed traceback ends with a link to the section of the documentation that says what the error means and what
    to do (from Python 3.11 on, which prints the notes of exceptions). ``str(error)`` is the message alone.
    """

    @property
    def docs_url(self) -> str:
        """The section on this error in the documentation."""
        kind = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return f"{DOCS_URL}errors.html#{kind.__name__.lower()}"

    # Made when a traceback is printed, not when the error is: errors that are caught pay nothing for it.
    @functools.cached_property
    def __notes__(self) -> list[str]:
        return [f"See {self.docs_url}"]


class ConfigurationError(GradwireError, ValueError):
    """An option or argument is wrong; nothing was started or sent."""


class TransportError(GradwireError):
    """The connection between two workers failed."""


class ConnectFailed(TransportError, ConnectionError):
    """No worker answered at that address."""


class ConnectionLost(TransportError, ConnectionError):
    """The other side ended the connection, or the network did."""


class ConnectionClosed(TransportError, ConnectionError):
    """This side had ended the connection already."""


class DecodeError(TransportError):
    """Bytes are not a valid frame. The connection they came over is closed; nothing else is touched."""


class LimitExceeded(DecodeError):
    """A frame is larger, deeper or more numerous than `gradwire.config.Limits` allow."""


class ResourceExhausted(TransportError):
    """This process is out of descriptors or memory."""


class AuthenticationFailed(TransportError):
    """The other side could not show that it belongs to this cluster."""


class IdentityTaken(AuthenticationFailed):
    """Another worker has that name or rank: a name belongs to one rank, and a rank to one name, while a cluster lives."""


class CannotSend(GradwireError, TypeError, RuntimeError):
    """A value or tensor cannot be sent to another worker; the message says which and why."""


class WaitTimeout(GradwireError, TimeoutError):
    """The timeout of `Future.wait` passed. The future is not completed, and the call goes on.

    This is not the deadline of the call itself: when that passes, the call ends with `RpcTimeout`.
    """


class RpcError(GradwireError, RuntimeError):
    """A call to another worker did not produce its result."""


class RpcTimeout(RpcError, TimeoutError):
    """The deadline of a call passed.

    Attributes:
        worker: Name of the worker that was called.
        phase: Where the call was when time ran out: ``connect``, ``send``, ``held`` (the worker does not serve calls
            yet), ``queue``, ``run``, ``reply`` or ``unknown`` (the worker did not answer the question).
    """

    def __init__(self, message: str, worker: str = "", phase: str = "unknown") -> None:
        super().__init__(message)
        self.worker = worker
        self.phase = phase


class CallCancelled(RpcError):
    """The caller cancelled the call before its result arrived."""


class WorkerLost(RpcError, ConnectionError):
    """The worker died, left or cannot be reached any more.

    Attributes:
        worker: Its name.
        last_seen: Seconds since the epoch when something last arrived from it, or None.
    """

    def __init__(self, message: str, worker: str = "", last_seen: float | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.last_seen = last_seen


class UnknownWorker(RpcError, ValueError):
    """No worker of that name or rank is in the cluster."""


class RemoteCallFailed(RpcError):
    """The called function raised, and the exception's own type cannot be rebuilt here.

    Attributes:
        worker: Name of the worker where it was raised.
        type_name: The exception's type there, as ``module.Class``.
    """

    def __init__(self, message: str, worker: str = "", type_name: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.type_name = type_name


class RemoteTraceback(Exception):
    """The traceback of an exception on another worker: the `__cause__` of the exception that is raised here.

    Attributes:
        worker: Name of the worker where the exception was raised.
        traceback: The traceback as that worker printed it.
    """

    def __init__(self, worker: str, traceback: str, info: object = None) -> None:
        super().__init__(worker, traceback)
        self.worker = worker
        self.traceback = traceback
        self.info = info  # the `ErrorInfo` that arrived, to be passed on to the next worker

    def __str__(self) -> str:
        return f"Remote traceback of worker '{self.worker}':\n{self.traceback}"


class NoSuchFunction(RpcError, AttributeError):
    """The module exists on the called worker, but has no function of that name there."""


class NotExposed(RpcError, PermissionError):
    """With ``trust="data"``, a function was called that is not marked with `gradwire.rpc.expose`."""


class AlreadyInitialized(RpcError, ConfigurationError):
    """This process is a worker already; call `gradwire.rpc.shutdown` first."""


class DuplicateWorker(RpcError, ConfigurationError):
    """Two workers gave the same name or the same rank; the message says which."""


class InvalidName(RpcError, ConfigurationError):
    """A worker cannot have that name; the message says which names are valid."""


class NotInitialized(RpcError):
    """This process is not part of a cluster: `gradwire.rpc.init_rpc` was not called, or `shutdown` was."""


class RendezvousFailed(RpcError):
    """Not every rank arrived before the deadline; the message says which did not and where they were expected."""


class WorkerStartFailed(RpcError):
    """A worker process ended before it was ready; the message carries what it printed."""


class RRefError(GradwireError, RuntimeError):
    """A reference cannot be used like that: it was deleted, its value was never made, or it is not inside a message."""


class NotTheOwner(RRefError):
    """Only the worker that owns the value of a reference can do that."""


class OwnerLost(RRefError, WorkerLost):
    """The worker that owned the value of a reference is gone, and the value with it."""


class AutogradError(GradwireError, RuntimeError):
    """Distributed autograd cannot do that."""


class NoActiveContext(AutogradError):
    """The current code does not run inside `gradwire.autograd.context`."""


class UnknownContext(AutogradError):
    """A context was released, or never existed on this worker; the message says which."""


class BackwardFailed(AutogradError):
    """A backward pass failed somewhere; no gradient of it is kept anywhere, and the next pass may work.

    The error of the worker where it failed is the cause (`__cause__`), with its traceback.

    Attributes:
        worker: Where it failed.
        operation: What that worker was doing.
    """

    def __init__(self, message: str, worker: str = "", operation: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.operation = operation


class UnsettledSend(BackwardFailed):
    """FAST mode only: a message was sent in the forward pass, and no gradient comes back for it.

    Its result or argument does not contribute to the loss; SMART mode handles that.

    Attributes:
        sends: One line for each such message: function, call site and worker.
    """

    def __init__(self, message: str, worker: str = "", operation: str = "", sends: tuple[str, ...] = ()) -> None:
        super().__init__(message, worker, operation)
        self.sends = sends


class OptimizerError(GradwireError, RuntimeError):
    """A distributed optimizer could not do something on some of the workers that own its parameters.

    Attributes:
        failed: What went wrong, by the worker's name; empty if the error came from another worker.
    """

    failed: Mapping[str, Exception] = MappingProxyType({})

    def __init__(self, message: str, failed: Mapping[str, Exception] = failed) -> None:
        super().__init__(message)
        self.failed = failed


class OptimizerNotMade(OptimizerError, ConfigurationError):
    """Some workers could not make their part of an optimizer; none was made."""


class OptimizerStepFailed(OptimizerError):
    """Some workers did not step, or did not confirm it.

    Calling `step` again with the same contexts repeats it for those alone.

    Attributes:
        stepped: Names of the workers that have.
        failed: What went wrong elsewhere, by the worker's name.
    """

    stepped: tuple[str, ...] = ()

    def __init__(
        self, message: str, stepped: tuple[str, ...] = (), failed: Mapping[str, Exception] = OptimizerError.failed
    ) -> None:
        super().__init__(message, failed)
        self.stepped = stepped


class CheckpointError(GradwireError, RuntimeError):
    """A checkpoint was not saved or not loaded; the message names the directory, the file or the value.

    Attributes:
        file: Name of the file it is about, or "".
        tensor: Name of the tensor it is about, or "".
    """

    def __init__(self, message: str, file: str = "", tensor: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class CannotSave(CheckpointError, TypeError):
    """A value cannot be stored in a checkpoint; the message says where it is and what to save instead."""


class CheckpointBusy(CheckpointError):
    """Another process is saving to that directory; the message says which."""


class CheckpointWriteFailed(CheckpointError):
    """A worker could not write its part; the checkpoint that was there before is whole."""


class CheckpointMissing(CheckpointError, FileNotFoundError):
    """There is no checkpoint in that directory, or a file of it is gone."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is not what was written: shorter, changed, or not a checkpoint at all."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint does not fit the objects that were to be filled; all of them are as they were.

    Attributes:
        problems: One line for each thing that does not fit.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems
