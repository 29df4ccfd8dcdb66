"""Operations of the owners of parts in a save or a load.

    the worker that saves or loads            each owner
    describe(parts)            ------->       checks that everything can be saved; returns how many bytes that is
    write(parts)               ------->       writes its file, on disk when it answers
                               <-------       reports what is in the file
    fit(parts, saved state)    ------->       compares them; changes nothing
    check(tensors)             ------->       compares the bytes in files with their checksums
    fill(parts, saved state)   ------->       loads

Descriptions of tensors are sent as JSON, in bytes; tensors themselves are not sent.

Any worker can call these operations with any data. Every request is checked before anything is done: its types when it
is decoded, names, places and forms by the functions that check an index (`gradwire.checkpoint.index`), and what is to
be filled by a comparison with it. With ``trust="data"`` an owner only touches directories that were allowed there
(`allow_directory`), and calls `state_dict` and `load_state_dict` only of modules, optimizers, and classes that have
exposed them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import torch
from torch import nn

from gradwire.checkpoint.directory import Directory, Folder, check_file_name, file_name
from gradwire.checkpoint.index import GENERATION, FileEntry, TensorEntry, check_entries, check_files, check_state
from gradwire.checkpoint.participants import worker_name
from gradwire.checkpoint.safetensors_io import (
    OnBytes,
    TensorReader,
    TensorSet,
    check_headers,
    check_tensors,
    write_file,
)
from gradwire.checkpoint.stateful import Fit, Part, PartState, fill_stateful, fill_tensors, fit, parameters_of, state_of
from gradwire.checkpoint.tree import Claim, Encoder
from gradwire.errors import (
    CannotSave,
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
    DecodeError,
    NotExposed,
)
from gradwire.observe import events
from gradwire.optim import LocalOptimizer
from gradwire.params import snapshots
from gradwire.rpc.api import current_agent
from gradwire.rpc.functions import expose
from gradwire.rref import RRef, context
from gradwire.rref.owner import check_exposed
from gradwire.shard import ShardedTensor
from gradwire.wire.messages import read_plain

T = TypeVar("T")

DESCRIBE: Final = "gradwire.checkpoint.describe"
WRITE: Final = "gradwire.checkpoint.write"
FIT: Final = "gradwire.checkpoint.fit"
CHECK: Final = "gradwire.checkpoint.check"
FILL: Final = "gradwire.checkpoint.fill"

_allowed: list[Path] = []


def allow_directory(path: str | os.PathLike[str]) -> None:
    """Let other workers save to and load from a directory, and those below it, on this worker. For ``trust="data"``.

    Args:
        path: The directory.
    """
    real = Path(os.path.realpath(path))
    if real not in _allowed:
        _allowed.append(real)


# -- messages -----------------------------------------------------------------------------------------------------------


class WriteReport(msgspec.Struct, frozen=True):
    parts: list[PartState]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    def __post_init__(self) -> None:
        check_files(self.files)
        check_entries(self.tensors)
        for part in self.parts:
            check_state([part.state, part.metadata], self.tensors)


class SavedPart(msgspec.Struct, frozen=True):
    """The saved state of a part: that of its object, as a node, and the versions of modules in it."""

    state: Any
    metadata: dict[str, dict[str, Any]] | None


class LoadOrder(msgspec.Struct, frozen=True):
    parts: list[SavedPart]
    tensors: dict[str, TensorEntry]
    is_strict: bool

    def __post_init__(self) -> None:
        check_entries(self.tensors)
        for part in self.parts:
            check_state(part.state, self.tensors)


class CheckOrder(msgspec.Struct, frozen=True):
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    def __post_init__(self) -> None:
        check_files(self.files)
        check_entries(self.tensors)


class FitReport(msgspec.Struct, frozen=True):
    fits: list[Fit]


_decoders: Final[dict[Any, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind) for kind in (WriteReport, LoadOrder, CheckOrder, FitReport)
}
encode_struct: Final = msgspec.json.Encoder().encode
for _kind, _empty in ((WriteReport, b'{"parts":[],"files":{},"tensors":{}}'), (FitReport, b'{"fits":[]}')):
    encode_struct(_decoders[_kind].decode(_empty))  # msgspec prepares the types here, not in two threads at once


def decode_struct(data: bytes, kind: type[T]) -> T:
    """Decode a message; raise msgspec's errors if it is not valid."""
    found: T = _decoders[kind].decode(data)
    return found


# -- on the owner -------------------------------------------------------------------------------------------------------


def _refuse_sharded(path: str, value: Any) -> None:
    if isinstance(value, ShardedTensor):
        raise CannotSave(
            f"'{path}' on worker {worker_name()} is a sharded tensor whose shards are on other workers; only a worker "
            f"that holds the object itself, not a reference to it, can save it: pass the sharded tensor in a call, and "
            f"save it there"
        )


def describe(place: Directory, generation: str, parts: Sequence[Part], claim: Claim = _refuse_sharded) -> int:
    tensors = TensorSet()
    with place.open_announced(generation, worker_name()):
        _encode(parts, tensors, claim)
    return tensors.num_bytes


def write(
    place: Directory,
    generation: str,
    parts: Sequence[Part],
    tensors: TensorSet,
    on_bytes: OnBytes,
    claim: Claim = _refuse_sharded,
    worker: str = "",
) -> WriteReport:
    """Write this worker's file: its parts, and `tensors` besides them.

    `claim` returns the nodes of sharded tensors in the parts. `worker` is the name in files; ranks have their own.
    """
    worker = worker or worker_name()
    name = file_name(generation, worker)
    check_file_name(name, generation)
    # An optimizer locks itself, then its parameters: read its state before the parameters are locked.
    parts = [replace(part, state=state_of(part)) if isinstance(part.value, LocalOptimizer) else part for part in parts]
    with events.Span("checkpoint", "write", lambda: worker) as span, place.open_announced(generation, worker) as folder:
        with snapshots.standing_still(parameters_of(parts)):
            reports = _encode(parts, tensors, claim)
            span.num_bytes = tensors.num_bytes
            if not tensors.tensors:
                return WriteReport(reports, {}, {})
            entry, entries = write_file(folder, name, tensors.tensors, worker, socket.gethostname(), on_bytes)
        folder.sync()
    return WriteReport(reports, {name: entry}, entries)


def _encode(parts: Sequence[Part], tensors: TensorSet, claim: Claim) -> list[PartState]:
    encoder = Encoder(tensors.place, claim)
    reports = []
    for part in parts:
        state = part.state or state_of(part)
        node = encoder.encode(state.state, part.path)
        metadata = Encoder(tensors.place).encode(state.metadata, part.path)
        reports.append(PartState(state.kind, state.type_name, node, metadata))
    return reports


def fit_all(order: LoadOrder, parts: Sequence[Part]) -> FitReport:
    pairs = zip(parts, order.parts, strict=True)
    return FitReport([fit(part, saved.state, order.tensors, order.is_strict) for part, saved in pairs])


def check(place: Directory, order: CheckOrder, on_bytes: OnBytes) -> None:
    with _open(place) as folder:
        check_headers(folder, order.files)
        check_tensors(folder, order.tensors, on_bytes)


def fill(place: Directory, order: LoadOrder, parts: Sequence[Part]) -> None:
    """Load this worker's parts. Only an error about a file that has changed since it was checked may leave some filled."""
    problems = tuple(problem for found in fit_all(order, parts).fits for problem in found.problems)
    if problems:
        raise CheckpointMismatch(f"nothing was changed on worker {worker_name()}: {'; '.join(problems)}", problems)
    saved = [(part, item.state, item.metadata) for part, item in zip(parts, order.parts, strict=True)]
    try:
        with (
            events.Span("checkpoint", "fill", worker_name),
            _open(place) as folder,
            TensorReader(folder, order.tensors) as reader,
        ):
            fill_stateful(saved, reader)
            with snapshots.stepping(parameters_of(parts), ()), torch.no_grad():
                fill_tensors(saved, reader)
    except CheckpointError as error:
        raise _located(error, " (some objects may already be filled)") from error


def _located(error: CheckpointError, when: str = "") -> CheckpointError:
    """Return an error about a file that also names the worker that could not read it; other errors as they are."""
    if type(error) not in (CheckpointError, CheckpointMissing, CheckpointDamaged):
        return error
    text = f"on worker {worker_name()} at {socket.gethostname()}{when}: {error}"
    return type(error)(text, error.file, error.tensor)


def _open(place: Directory) -> Folder:
    try:
        return place.open()
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        kind = CheckpointMissing if is_missing else CheckpointError
        raise kind(f"cannot open the directory {place.path}: {error.strerror}", str(place.path)) from error


# -- requests of other workers ------------------------------------------------------------------------------------------

SentPart = tuple[str, str, RRef[Any], tuple[str, ...]]
_SentParts = Annotated[list[tuple[str, str, Any, tuple[str, ...]]], msgspec.Meta(min_length=1)]


def send(part: Part) -> SentPart:
    return part.path, part.prefix, part.value, part.names


def _read_parts(sent: Any, method: str) -> list[Part]:
    found = read_plain(sent, _SentParts, "invalid parts of a checkpoint request")
    if not all(isinstance(rref, RRef) for _, _, rref, _ in found):
        raise DecodeError("invalid parts of a checkpoint request: each needs a reference")
    parts = [Part(path, prefix, rref.local_value(), names=names) for path, prefix, rref, names in found]
    if context.here().agent.trust == "data":
        for part in parts:
            if not isinstance(part.value, LocalOptimizer | nn.Module | torch.Tensor | torch.optim.Optimizer):
                check_exposed(part.value, method)
    return parts


def _read_order(order: Any, kind: type[T]) -> T:
    try:
        return decode_struct(order, kind)
    except (msgspec.MsgspecError, RecursionError, TypeError) as error:
        raise DecodeError(f"invalid checkpoint request: {error}") from error


def _read_load(order: Any, sent: Any) -> tuple[LoadOrder, list[Part]]:
    read, parts = _read_order(order, LoadOrder), _read_parts(sent, "load_state_dict")
    if len(parts) != len(read.parts):
        raise DecodeError(f"a request to load {len(read.parts)} parts came with {len(parts)}")
    return read, parts


def _read_generation(generation: Any) -> str:
    if type(generation) is not str or not GENERATION.fullmatch(generation):
        raise DecodeError(f"{generation!r:.200} is not a valid checkpoint generation")
    return generation


def _read_directory(directory: Any) -> Directory:
    if type(directory) is not str or not directory or "\0" in directory:
        raise DecodeError(f"{directory!r:.200} is not a valid directory path")
    if context.here().agent.trust != "data":
        return Directory(directory)
    real = Path(os.path.realpath(directory))
    for root in _allowed:
        if real.is_relative_to(root):
            return Directory(real, root)
    raise NotExposed(
        f'trust="data": worker {worker_name()} does not let other workers save to or load from {directory}; call '
        "gradwire.checkpoint.allow_directory there"
    )


def _check_wanted(_: int) -> None:
    """Raise if the caller no longer waits, to stop reading: a file can be very large."""
    current_agent().server.time_left(0.0)


def _serve_describe(directory: Any, generation: Any, sent: Any) -> int:
    place = _read_directory(directory)
    return describe(place, _read_generation(generation), _read_parts(sent, "state_dict"))


def _serve_write(directory: Any, generation: Any, sent: Any) -> bytes:
    place = _read_directory(directory)
    parts = _read_parts(sent, "state_dict")
    return encode_struct(write(place, _read_generation(generation), parts, TensorSet(), _check_wanted))


def _serve_fit(order: Any, sent: Any) -> bytes:
    return encode_struct(fit_all(*_read_load(order, sent)))


def _serve_check(directory: Any, order: Any) -> None:
    place = _read_directory(directory)
    try:
        check(place, _read_order(order, CheckOrder), _check_wanted)
    except CheckpointError as error:
        raise _located(error) from error


def _serve_fill(directory: Any, order: Any, sent: Any) -> None:
    place = _read_directory(directory)
    fill(place, *_read_load(order, sent))


for _name, _function in {
    DESCRIBE: _serve_describe,
    WRITE: _serve_write,
    FIT: _serve_fit,
    CHECK: _serve_check,
    FILL: _serve_fill,
}.items():
    expose(_function, name=_name)


# -- on the worker that saves or loads ------------------------------------------------------------------------------------


class Parts:
    """The parts of a save or a load, by the worker that has them."""

    def __init__(self) -> None:
        self.here: list[Part] = []
        self.elsewhere: dict[str, list[Part]] = {}

    def add(self, part: Part) -> tuple[str, int]:
        """Add a part, and return the position of its report: the worker ("" for this one), and its number there."""
        if isinstance(part.value, RRef) and not part.value.is_owner():
            name, found = part.value.owner_name(), self.elsewhere.setdefault(part.value.owner_name(), [])
        else:
            value = part.value.local_value() if isinstance(part.value, RRef) else part.value
            name, found, part = "", self.here, replace(part, value=value)
        found.append(part)
        return name, len(found) - 1

    def calls(
        self, operation: str, args_of: Callable[[str], tuple[Any, ...]]
    ) -> list[tuple[str, str, tuple[Any, ...]]]:
        """Return a call to every other worker, with some arguments for it and then its parts."""
        return [
            (worker, operation, (*args_of(worker), [send(part) for part in parts]))
            for worker, parts in self.elsewhere.items()
        ]
