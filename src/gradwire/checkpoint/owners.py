"""What the workers that own something do for a save or a load.

    the worker that saves                     each owner
    describe(parts)            ------->       is everything savable, and how much is it?
    write(parts)               ------->       writes its file, on disk when it answers
                               <-------       what is in the file
    fit(parts, saved state)    ------->       would it fit? changes nothing
    check(tensors)             ------->       are the bytes what was written?
    fill(parts, saved state)   ------->       loads

What is said about tensors travels as JSON, in bytes; tensors themselves do not travel. With ``trust="data"`` an owner only
touches directories that were allowed there (`allow_directory`): others must not choose where it writes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from gradwire.checkpoint import filling, objects, reading, writing
from gradwire.checkpoint._index import FileEntry, TensorEntry
from gradwire.checkpoint._tree import Claim, Encoder
from gradwire.checkpoint.directory import Directory, check_file_name, file_name
from gradwire.checkpoint.objects import Part
from gradwire.errors import CannotSave, CheckpointDamaged, CheckpointMissing, NotExposed, NotInitialized
from gradwire.rpc.functions import expose
from gradwire.rref import RRef, references
from gradwire.shard import ShardedTensor

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


class SavedPart(msgspec.Struct, frozen=True):
    """What a part is to be filled with: the state of its object, as a node."""

    state: Any
    metadata: Any


class LoadOrder(msgspec.Struct, frozen=True):
    """What an owner has to know to load."""

    parts: list[SavedPart]
    tensors: dict[str, TensorEntry]
    is_strict: bool


class CheckOrder(msgspec.Struct, frozen=True):
    """Whose bytes to compare."""

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


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
    _allowed.append(Path(os.path.realpath(path)))


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


def describe(directory: str, generation: str, parts: Sequence[Part], known: Known | None = None) -> int:
    """How many bytes this worker would write.

    Raises:
        CannotSave: Something cannot be saved.
        CheckpointWriteFailed: This worker does not see the directory.
    """
    Directory(directory).check_announced(generation, worker_name())
    tensors = writing.TensorSet()
    _encode(parts, tensors, known or _NOTHING_KNOWN)
    return tensors.num_bytes


def write(
    directory: str,
    generation: str,
    parts: Sequence[Part],
    tensors: writing.TensorSet,
    on_bytes: writing.OnBytes,
    known: Known | None = None,
    worker: str = "",
) -> WriteReport:
    """Writes this worker's file.

    Args:
        directory: Where.
        generation: Of the save.
        parts: What to write.
        tensors: What to write besides them.
        on_bytes: Told how many more bytes are written.
        known: What is known of the parts.
        worker: What this one is called in files, if it has another name there.

    Raises:
        CheckpointWriteFailed: It cannot be written.
    """
    place, worker = Directory(directory), worker or worker_name()
    name = file_name(generation, worker)
    check_file_name(name, generation)
    place.check_announced(generation, worker)
    known = known or _NOTHING_KNOWN
    early = {number: objects.state_of(part) for number, part in enumerate(parts) if objects.locks_itself(part)}
    with objects.standing_still(parts):
        reports = _encode(parts, tensors, Known({**known.states, **early}, known.claim))
        if not tensors.tensors:
            return WriteReport(reports, {}, {})
        entry, entries = writing.write_file(place.path / name, tensors.tensors, worker, socket.gethostname(), on_bytes)
    place.sync()
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


def check(directory: Path, order: CheckOrder, on_bytes: writing.OnBytes) -> None:
    """Compares files and tensors with the index.

    Raises:
        CheckpointMissing, CheckpointDamaged: Something is not what was written.
    """
    reading.check_files(directory, order.files)
    reading.check_tensors(directory, order.tensors, on_bytes)


def fill(directory: Path, order: LoadOrder, parts: Sequence[Part]) -> None:
    """Loads this worker's parts."""
    reader = reading.TensorReader(directory, order.tensors)
    saved = [(part, item.state, item.metadata) for part, item in zip(parts, order.parts, strict=True)]
    filling.fill_stateful(saved, reader)
    with objects.changing(parts):
        filling.fill_tensors(saved, reader)


def fit_all(order: LoadOrder, parts: Sequence[Part]) -> FitReport:
    """Compares this worker's parts with what was saved."""
    pairs = zip(parts, order.parts, strict=True)
    return FitReport([objects.fit(part, saved.state, order.tensors, order.is_strict) for part, saved in pairs])


# -- the same, asked for by others ----------------------------------------------------------------------------------

SentPart = tuple[str, str, RRef[Any], tuple[str, ...]]


def send(part: Part) -> SentPart:
    return part.path, part.prefix, part.value, part.names


def _receive(sent: Sequence[SentPart]) -> list[Part]:
    return [Part(path, prefix, rref.local_value(), names=tuple(names)) for path, prefix, rref, names in sent]


def _serve_describe(directory: str, generation: str, sent: Sequence[SentPart]) -> int:
    _check_allowed(directory)
    return describe(directory, generation, _receive(sent))


def _serve_write(directory: str, generation: str, sent: Sequence[SentPart]) -> bytes:
    _check_allowed(directory)
    return _encoder.encode(write(directory, generation, _receive(sent), writing.TensorSet(), lambda _: None))


def _serve_fit(order: bytes, sent: Sequence[SentPart]) -> bytes:
    return _encoder.encode(fit_all(_decoders[LoadOrder].decode(order), _receive(sent)))


def _serve_check(directory: str, order: bytes) -> None:
    _check_allowed(directory)
    try:
        check(Path(directory), _decoders[CheckOrder].decode(order), lambda _: None)
    except (CheckpointMissing, CheckpointDamaged) as error:
        text = f"on worker {worker_name()} at {socket.gethostname()}: {error}"
        raise type(error)(text, error.file, error.tensor) from error


def _serve_fill(directory: str, order: bytes, sent: Sequence[SentPart]) -> None:
    _check_allowed(directory)
    fill(Path(directory), _decoders[LoadOrder].decode(order), _receive(sent))


def _check_allowed(directory: str) -> None:
    """
    Raises:
        NotExposed: Others may not choose that directory.
    """
    if references.here().agent.trust != "data":
        return
    real = Path(os.path.realpath(directory))
    if not any(real.is_relative_to(allowed) for allowed in _allowed):
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
