"""What the workers that own something do for a save or a load.

    the worker that saves                     each owner
    describe(parts)            ------->       is everything savable, and how much is it?
    write(parts)               ------->       writes its file, on disk when it answers
                               <-------       what is in the file
    fit(parts, saved state)    ------->       would it fit? changes nothing
    check(tensors)             ------->       are the bytes what was written?
    fill(parts, saved state)   ------->       loads

What is said about tensors travels as JSON, in bytes; tensors themselves do not travel.

Any worker can ask for this, with any data. Every order is checked before anything is done: its types when it is decoded,
names, places and forms by the functions that check an index (`gradwire.checkpoint._index`), and what is to be filled by a
comparison with it. With ``trust="data"`` an owner only touches directories that were allowed there (`allow_directory`), and
calls `state_dict` and `load_state_dict` only of modules, optimizers, and classes that have exposed them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import torch
from torch import nn

from gradwire.checkpoint import filling, objects, reading, writing
from gradwire.checkpoint._index import GENERATION, FileEntry, TensorEntry, check_entries, check_files, check_state
from gradwire.checkpoint._tree import Claim, Encoder
from gradwire.checkpoint.directory import Directory, check_file_name, file_name
from gradwire.checkpoint.folder import Folder
from gradwire.checkpoint.objects import Part
from gradwire.errors import (
    CannotSave,
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointMissing,
    DecodeError,
    NotExposed,
    NotInitialized,
)
from gradwire.optim import LocalOptimizer
from gradwire.rpc.api import current_agent
from gradwire.rpc.functions import expose
from gradwire.rref import RRef, references
from gradwire.rref.operations import check_exposed
from gradwire.shard import ShardedTensor
from gradwire.wire.messages import read_plain

T = TypeVar("T")

DESCRIBE: Final = "gradwire.checkpoint.describe"
WRITE: Final = "gradwire.checkpoint.write"
FIT: Final = "gradwire.checkpoint.fit"
CHECK: Final = "gradwire.checkpoint.check"
FILL: Final = "gradwire.checkpoint.fill"

_allowed: list[Path] = []


class PartReport(msgspec.Struct, frozen=True):
    """What was saved of one part."""

    kind: str
    type_name: str
    state: Any
    metadata: Any


class WriteReport(msgspec.Struct, frozen=True):
    """What one worker has written."""

    parts: list[PartReport]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    def __post_init__(self) -> None:
        check_files(self.files)
        check_entries(self.tensors)
        for part in self.parts:
            check_state([part.state, part.metadata], self.tensors)


class SavedPart(msgspec.Struct, frozen=True):
    """What a part is to be filled with: the state of its object, as a node; and the versions of modules in it."""

    state: Any
    metadata: dict[str, dict[str, Any]] | None


class LoadOrder(msgspec.Struct, frozen=True):
    """What an owner has to know to load."""

    parts: list[SavedPart]
    tensors: dict[str, TensorEntry]
    is_strict: bool

    def __post_init__(self) -> None:
        check_entries(self.tensors)
        for part in self.parts:
            check_state(part.state, self.tensors)


class CheckOrder(msgspec.Struct, frozen=True):
    """Whose bytes to compare."""

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    def __post_init__(self) -> None:
        check_files(self.files)
        check_entries(self.tensors)


class FitReport(msgspec.Struct, frozen=True):
    """One `gradwire.checkpoint.objects.Fit` for each part."""

    fits: list[objects.Fit]


_decoders: Final[dict[Any, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind) for kind in (WriteReport, LoadOrder, CheckOrder, FitReport)
}
_encoder: Final = msgspec.json.Encoder()
for _kind, _empty in ((WriteReport, b'{"parts":[],"files":{},"tensors":{}}'), (FitReport, b'{"fits":[]}')):
    _encoder.encode(_decoders[_kind].decode(_empty))  # msgspec learns types here, not in two threads at once


def allow_directory(path: str | os.PathLike[str]) -> None:
    """Lets others save to and load from that directory, and those below it, on this worker. For ``trust="data"``.

    Args:
        path: The directory.
    """
    real = Path(os.path.realpath(path))
    if real not in _allowed:
        _allowed.append(real)


def worker_name() -> str:
    """What this worker is called, in files and messages."""
    try:
        return references.here().agent.info.name
    except NotInitialized:
        return "local"


# -- what an owner does ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of parts before they are written.

    Attributes:
        states: Of some of them, by number.
        claim: Gives the nodes of sharded tensors in them.
    """

    states: dict[int, objects.State]
    claim: Claim


def describe(place: Directory, generation: str, parts: Sequence[Part], known: Known | None = None) -> int:
    """How many bytes this worker would write.

    Raises:
        CannotSave: Something cannot be saved.
        CheckpointWriteFailed: This worker does not see the directory.
    """
    tensors = writing.TensorSet()
    with place.announced(generation, worker_name()):
        _encode(parts, tensors, known or _NOTHING_KNOWN)
    return tensors.num_bytes


def write(
    place: Directory,
    generation: str,
    parts: Sequence[Part],
    tensors: writing.TensorSet,
    on_bytes: writing.OnBytes,
    known: Known | None = None,
    worker: str = "",
) -> WriteReport:
    """Writes this worker's file.

    Args:
        place: Where.
        generation: Of the save.
        parts: What to write.
        tensors: What to write besides them.
        on_bytes: Told how many more bytes are written.
        known: What is known of the parts.
        worker: What this one is called in files, if it has another name there.

    Raises:
        CheckpointWriteFailed: It cannot be written.
    """
    worker = worker or worker_name()
    name = file_name(generation, worker)
    check_file_name(name, generation)
    known = known or _NOTHING_KNOWN
    early = {number: objects.state_of(part) for number, part in enumerate(parts) if objects.locks_itself(part)}
    with place.announced(generation, worker) as folder:
        with objects.standing_still(parts):
            reports = _encode(parts, tensors, Known({**known.states, **early}, known.claim))
            if not tensors.tensors:
                return WriteReport(reports, {}, {})
            host = socket.gethostname()
            entry, entries = writing.write_file(folder, name, tensors.tensors, worker, host, on_bytes)
        folder.sync()
    return WriteReport(reports, {name: entry}, entries)


def _refuse_sharded(path: str, value: Any) -> None:
    if isinstance(value, ShardedTensor):
        raise CannotSave(
            f"'{path}' on worker {worker_name()} is a sharded tensor whose shards are on other workers; only who has its "
            "object here, and not by reference, can save it: pass the sharded tensor itself in a call, and save that"
        )


_NOTHING_KNOWN: Final = Known({}, _refuse_sharded)


def _encode(parts: Sequence[Part], tensors: writing.TensorSet, known: Known) -> list[PartReport]:
    encoder = Encoder(tensors.place, known.claim)
    reports = []
    for number, part in enumerate(parts):
        state = known.states[number] if number in known.states else objects.state_of(part)
        node = encoder.encode(state.values, part.path)
        metadata = Encoder(tensors.place).encode(state.metadata, part.path)
        reports.append(PartReport(state.kind, state.type_name, node, metadata))
    return reports


def check(place: Directory, order: CheckOrder, on_bytes: writing.OnBytes) -> None:
    """Compares files and tensors with the index.

    Raises:
        CheckpointMissing, CheckpointDamaged: Something is not what was written.
    """
    with _opened(place) as folder:
        reading.check_files(folder, order.files)
        reading.check_tensors(folder, order.tensors, on_bytes)


def fill(place: Directory, order: LoadOrder, parts: Sequence[Part]) -> None:
    """Loads this worker's parts.

    Raises:
        CheckpointMismatch: A part is not what the order says; nothing was changed.
        CheckpointMissing, CheckpointDamaged: A file has changed since it was checked; some parts may be filled already.
    """
    problems = tuple(problem for fit in fit_all(order, parts).fits for problem in fit.problems)
    if problems:
        raise CheckpointMismatch(f"nothing was changed on worker {worker_name()}: {'; '.join(problems)}", problems)
    saved = [(part, item.state, item.metadata) for part, item in zip(parts, order.parts, strict=True)]
    try:
        with _opened(place) as folder, reading.TensorReader(folder, order.tensors) as reader:
            filling.fill_stateful(saved, reader)
            with objects.changing(parts):
                filling.fill_tensors(saved, reader)
    except (CheckpointMissing, CheckpointDamaged) as error:
        raise _located(error, ", while objects were being filled, some of which may be filled already") from error


def _located(error: CheckpointMissing | CheckpointDamaged, when: str = "") -> CheckpointMissing | CheckpointDamaged:
    """Return an error about a file that also says which worker could not read it."""
    text = f"on worker {worker_name()} at {socket.gethostname()}{when}: {error}"
    return type(error)(text, error.file, error.tensor)


def _opened(place: Directory) -> Folder:
    try:
        return place.open()
    except OSError as error:
        raise CheckpointMissing(f"cannot open the directory {place.path}: {error.strerror}", str(place.path)) from error


def fit_all(order: LoadOrder, parts: Sequence[Part]) -> FitReport:
    """Compares this worker's parts with what was saved."""
    pairs = zip(parts, order.parts, strict=True)
    return FitReport([objects.fit(part, saved.state, order.tensors, order.is_strict) for part, saved in pairs])


# -- the same, asked for by others ----------------------------------------------------------------------------------

SentPart = tuple[str, str, RRef[Any], tuple[str, ...]]


def send(part: Part) -> SentPart:
    return part.path, part.prefix, part.value, part.names


_SentParts = Annotated[list[tuple[str, str, Any, tuple[str, ...]]], msgspec.Meta(min_length=1)]


def _receive(sent: Any, method: str) -> list[Part]:
    """The parts that an order is about.

    Args:
        sent: What came.
        method: What will be called of objects of unknown classes.

    Raises:
        DecodeError: These are no parts.
        NotExposed: ``trust="data"``, and a part is of a class that does not let others call that.
    """
    found = read_plain(sent, _SentParts, "not the parts of an order")
    if not all(isinstance(rref, RRef) for _, _, rref, _ in found):
        raise DecodeError("not the parts of an order: each needs a reference")
    parts = [Part(path, prefix, rref.local_value(), names=names) for path, prefix, rref, names in found]
    if references.here().agent.trust == "data":
        for part in parts:
            if not isinstance(part.value, LocalOptimizer | nn.Module | torch.Tensor | torch.optim.Optimizer):
                check_exposed(part.value, method)
    return parts


def _read(order: Any, kind: type[T]) -> T:
    """
    Raises:
        DecodeError: It is no such order.
    """
    try:
        return decode(order, kind)
    except (msgspec.MsgspecError, RecursionError, TypeError) as error:
        raise DecodeError(f"not an order for the owner of something in a checkpoint: {error}") from error


def _read_load(order: Any, sent: Any) -> tuple[LoadOrder, list[Part]]:
    read, parts = _read(order, LoadOrder), _receive(sent, "load_state_dict")
    if len(parts) != len(read.parts):
        raise DecodeError(f"an order to load {len(read.parts)} parts came with {len(parts)}")
    return read, parts


def _serve_describe(directory: Any, generation: Any, sent: Any) -> int:
    place = _allowed_place(directory)
    return describe(place, _generation(generation), _receive(sent, "state_dict"))


def _serve_write(directory: Any, generation: Any, sent: Any) -> bytes:
    place = _allowed_place(directory)
    parts = _receive(sent, "state_dict")
    return _encoder.encode(write(place, _generation(generation), parts, writing.TensorSet(), _check_wanted))


def _serve_fit(order: Any, sent: Any) -> bytes:
    return _encoder.encode(fit_all(*_read_load(order, sent)))


def _serve_check(directory: Any, order: Any) -> None:
    place = _allowed_place(directory)
    try:
        check(place, _read(order, CheckOrder), _check_wanted)
    except (CheckpointMissing, CheckpointDamaged) as error:
        raise _located(error) from error


def _serve_fill(directory: Any, order: Any, sent: Any) -> None:
    place = _allowed_place(directory)
    fill(place, *_read_load(order, sent))


def _check_wanted(_: int) -> None:
    """Stop reading for a worker that does not wait any more: a file can be as large as it likes.

    Raises:
        RpcTimeout: The call's deadline has passed.
        CallCancelled: The worker that asked has given up.
    """
    current_agent().server.time_left(0.0)


def _generation(generation: Any) -> str:
    if type(generation) is not str or not GENERATION.fullmatch(generation):
        raise DecodeError(f"{generation!r:.200} is not a generation of a checkpoint")
    return generation


def _allowed_place(directory: Any) -> Directory:
    """The directory that another worker has named.

    Raises:
        DecodeError: It is not the name of one.
        NotExposed: Others may not choose that directory.
    """
    if type(directory) is not str or not directory or "\0" in directory:
        raise DecodeError(f"{directory!r:.200} is not the path of a directory")
    if references.here().agent.trust != "data":
        return Directory(directory)
    real = Path(os.path.realpath(directory))
    for root in _allowed:
        if real.is_relative_to(root):
            return Directory(real, root)
    raise NotExposed(
        f'trust="data": worker {worker_name()} lets nobody save to or load from {directory}; call '
        "gradwire.checkpoint.allow_directory there"
    )


for _name, _function in {
    DESCRIBE: _serve_describe,
    WRITE: _serve_write,
    FIT: _serve_fit,
    CHECK: _serve_check,
    FILL: _serve_fill,
}.items():
    expose(_function, name=_name)


# -- messages -------------------------------------------------------------------------------------------------------


def encode(message: Any) -> bytes:
    """A message for an owner."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """An owner's answer."""
    found: T = _decoders[kind].decode(data)
    return found
