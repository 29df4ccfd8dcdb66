"""Every error that gradwire raises.

GradwireError
  ConfigurationError (ValueError)        an option is wrong; nothing was started
  TransportError
    ConnectFailed (ConnectionError)      no worker answered at that address
    ConnectionLost (ConnectionError)     the peer or the network closed the connection
    ConnectionClosed (ConnectionError)   this worker had already closed the connection
    DecodeError                          received data is not valid; after an invalid frame the connection is closed
      LimitExceeded                      something exceeds Limits, here or at the receiver
    ResourceExhausted                    this process is out of descriptors or memory
    AuthenticationFailed                 wrong key, unknown identity, different trust level or version
      IdentityTaken                      another worker has that name or rank
  CannotSend (TypeError, RuntimeError)   a value or tensor cannot be sent; the message says why
  WaitTimeout (TimeoutError)             Future.wait(timeout=...) timed out; the call is still running
  RpcError (RuntimeError)
    RpcTimeout (TimeoutError)            the deadline passed; has the phase of the call
    CallCancelled                        the caller cancelled it
    WorkerLost (ConnectionError)         the worker died or left
    UnknownWorker (ValueError)           no worker has that name or rank
    RemoteCallFailed                     the function raised an exception whose type is not known here
    NoSuchFunction (AttributeError)      the callee's module has no function of that name
    NotExposed (PermissionError)         trust="data", and the function is not marked with expose
    AlreadyInitialized (ConfigurationError)  this process is already a worker
    DuplicateWorker (ConfigurationError)  two workers have the same name or rank
    InvalidName (ConfigurationError)     not a valid worker name
    NotInitialized                       init_rpc was not called in this process
    RendezvousFailed                     the ranks could not meet
    WorkerStartFailed                    a worker could not be started, or was not ready in time
  RRefError (RuntimeError)               a reference cannot be used this way
    NotTheOwner                          only the worker that owns the value can do this
    OwnerLost (WorkerLost)               the worker that owned the value is lost, and so is the value
  AutogradError (RuntimeError)
    NoActiveContext                      not inside gradwire.autograd.context()
    UnknownContext                       the context was released or never existed here
    BackwardFailed                       a backward pass failed; no worker keeps gradients of it
      UnsettledSend                      FAST mode: no gradient comes back for a message
  OptimizerError (RuntimeError)          a distributed optimizer failed on some workers
    OptimizerNotMade (ConfigurationError)  some workers could not make their part of it
    OptimizerStepFailed                  some workers did not step; lists those that did
  CheckpointError (RuntimeError)         a checkpoint was not saved or not loaded
    CannotSave (TypeError)               a value cannot be stored; the message says where it is
    CheckpointBusy                       another process is using that directory
    CheckpointWriteFailed                a worker could not write its part
    CheckpointMissing (FileNotFoundError)  there is no checkpoint, or one of its files is missing
    CheckpointDamaged                    a file is corrupt
    CheckpointMismatch (ValueError)      the checkpoint does not match the objects to load it into

Messages name the worker, the operation and the next step. Errors travel between workers as data (`ErrorInfo` in
`gradwire.wire.messages`), never as pickles.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

DOCS_URL: Final = "https://gradwire.readthedocs.io/en/stable/"
"""Base URL of the documentation. Its page ``errors`` has a section for each class of this module."""


class GradwireError(Exception):
    """Base class of every error that gradwire itself raises.

    A printed traceback ends with a link to the section of the documentation that explains the error and what to do
    (Python 3.11 and later, which print the notes of exceptions). ``str(error)`` is the message alone.
    """

    @property
    def docs_url(self) -> str:
        """Link to the section on this error in the documentation."""
        kind = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return f"{DOCS_URL}errors.html#{kind.__name__.lower()}"

    # Computed when a traceback is printed, not when the error is raised: errors that are caught do not pay for it.
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
    """The peer or the network closed the connection."""


class ConnectionClosed(TransportError, ConnectionError):
    """This worker had already closed the connection."""


class DecodeError(TransportError):
    """Received data is not valid. After an invalid frame its connection is closed; nothing else is affected."""


class LimitExceeded(DecodeError):
    """A message, its nesting or a count exceeds `gradwire.config.Limits`."""


class ResourceExhausted(TransportError):
    """This process is out of descriptors or memory."""


class AuthenticationFailed(TransportError):
    """A peer could not prove that it belongs to this cluster, or has another trust level or version."""


class IdentityTaken(AuthenticationFailed):
    """Another worker has that name or rank. A name is free again after `Cluster.remove`; a rank is used once."""


class CannotSend(GradwireError, TypeError, RuntimeError):
    """A value or tensor cannot be sent to another worker; the message says which and why."""


class WaitTimeout(GradwireError, TimeoutError):
    """The timeout of `Future.wait` passed. The future is not completed, and the call is still running.

    This is not the deadline of the call itself: when that passes, the call ends with `RpcTimeout`.
    """


class RpcError(GradwireError, RuntimeError):
    """A call to another worker did not produce its result."""


class RpcTimeout(RpcError, TimeoutError):
    """The deadline of a call, or of another operation that waits for workers, has passed.

    Attributes:
        worker: Name of the worker that was waited for; several are separated by commas. Empty if it is not known.
        phase: How far the call had got when time ran out: ``connect``, ``send``, ``held`` (the worker does not serve
            calls yet), ``queue``, ``run``, ``reply`` or ``unknown`` (the worker did not report it).
    """

    def __init__(self, message: str, worker: str = "", phase: str = "unknown") -> None:
        super().__init__(message)
        self.worker = worker
        self.phase = phase


class CallCancelled(RpcError):
    """The caller cancelled the call before its result arrived."""


class WorkerLost(RpcError, ConnectionError):
    """The worker died, left, or can no longer be reached.

    Attributes:
        worker: Name of the worker.
        last_seen: Time of the last message from it, in seconds since the epoch, or None.
    """

    def __init__(self, message: str, worker: str = "", last_seen: float | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.last_seen = last_seen


class UnknownWorker(RpcError, ValueError):
    """The cluster has no worker of that name or rank."""


class RemoteCallFailed(RpcError):
    """The called function raised an exception whose type cannot be rebuilt on this worker.

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
    """The module on the called worker has no function of that name."""


class NotExposed(RpcError, PermissionError):
    """With ``trust="data"``, the called function is not marked with `gradwire.rpc.expose`."""


class AlreadyInitialized(RpcError, ConfigurationError):
    """This process is already a worker: call `gradwire.rpc.shutdown` first, unless a cluster started it."""


class DuplicateWorker(RpcError, ConfigurationError):
    """Two workers have the same name or the same rank; the message names them."""


class InvalidName(RpcError, ConfigurationError):
    """The name is not a valid worker name; the message says which names are."""


class NotInitialized(RpcError):
    """This process is not part of a cluster.

    `gradwire.rpc.init_rpc` was not called, `shutdown` was, the `Cluster` is closed, or the process is a fork of a worker.
    """


class RendezvousFailed(RpcError):
    """The ranks could not meet: the message lists those that did not arrive in time, or says why they cannot meet."""


class WorkerStartFailed(RpcError):
    """A worker could not be started, or was not ready in time; the message says why, with its output if there is any."""


class RRefError(GradwireError, RuntimeError):
    """A reference cannot be used this way: it was deleted, its value was never created, or it was pickled outside a call."""


class NotTheOwner(RRefError):
    """Only the worker that owns the value of a reference can do this."""


class OwnerLost(RRefError, WorkerLost):
    """The worker that owned the value of a reference is lost, and so is the value."""


class AutogradError(GradwireError, RuntimeError):
    """Base class of errors of distributed autograd."""


class NoActiveContext(AutogradError):
    """The current code does not run inside `gradwire.autograd.context`."""


class UnknownContext(AutogradError):
    """A context was released, or never existed on this worker; the message says which."""


class BackwardFailed(AutogradError):
    """A backward pass failed on some worker. No worker keeps gradients of it, and the next pass may succeed.

    The error on the worker where it failed is the cause (`__cause__`), with its traceback.

    Attributes:
        worker: Name of the worker where it failed.
        operation: The operation that failed there.
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
    """An operation of a distributed optimizer failed on some of the workers that own its parameters.

    Attributes:
        failed: Errors by worker name; empty if this error was received from another worker.
    """

    failed: Mapping[str, Exception] = MappingProxyType({})

    def __init__(self, message: str, failed: Mapping[str, Exception] = failed) -> None:
        super().__init__(message)
        self.failed = failed


class OptimizerNotMade(OptimizerError, ConfigurationError):
    """Some workers could not create their part of an optimizer, or of a new parameter group; nothing was added."""


class OptimizerStepFailed(OptimizerError):
    """Some workers did not step, or did not confirm it.

    Calling `step` again with the same contexts repeats it for those workers only.

    Attributes:
        stepped: Names of the workers that stepped.
        failed: Errors of the other workers, by name.
    """

    stepped: tuple[str, ...] = ()

    def __init__(
        self, message: str, stepped: tuple[str, ...] = (), failed: Mapping[str, Exception] = OptimizerError.failed
    ) -> None:
        super().__init__(message, failed)
        self.stepped = stepped


class CheckpointError(GradwireError, RuntimeError):
    """A checkpoint could not be saved or loaded; the message names the directory, the file or the value.

    Attributes:
        file: Name of the file concerned, or "".
        tensor: Name of the tensor concerned, or "".
    """

    def __init__(self, message: str, file: str = "", tensor: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class CannotSave(CheckpointError, TypeError):
    """A value cannot be stored in a checkpoint; the message says where it is and what to save instead."""


class CheckpointBusy(CheckpointError):
    """Another process is using that directory: it is saving to it, or removing old files."""


class CheckpointWriteFailed(CheckpointError):
    """A worker could not write its part; the previous checkpoint is intact."""


class CheckpointMissing(CheckpointError, FileNotFoundError):
    """There is no checkpoint in that directory, or one of its files is missing."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is truncated, altered, or not a checkpoint file at all."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint does not match the objects to load it into; none of them was changed.

    Attributes:
        problems: One line for each mismatch.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems
