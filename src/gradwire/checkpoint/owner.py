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
names, places and forms by the functions that check an index (`gradwire.checkpoint.index`), and what is to be filled by a
comparison with it. With ``trust="data"`` an owner only touches directories that were allowed there (`allow_directory`), and
calls `state_dict` and `load_state_dict` only of modules, optimizers, and classes that have exposed them.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import torch
from torch import nn

from gradwire import rpc
from gradwire.checkpoint import safetensors_io as reading
from gradwire.checkpoint import safetensors_io as writing
from gradwire.checkpoint import stateful as objects
from gradwire.checkpoint.directory import Directory, Folder, check_file_name, file_name
from gradwire.checkpoint.index import (
    DTYPES,
    GENERATION,
    FileEntry,
    TensorEntry,
    check_entries,
    check_files,
    check_state,
)
from gradwire.checkpoint.safetensors_io import TensorReader, stored
from gradwire.checkpoint.stateful import Part, decode_state, module_state
from gradwire.checkpoint.tree import Claim, Encoder, Node, decode, is_tensor, items_of, put
from gradwire.errors import (
    CannotSave,
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
    DecodeError,
    NotExposed,
    NotInitialized,
)
from gradwire.optim import LocalOptimizer
from gradwire.rpc.api import current_agent
from gradwire.rpc.functions import expose
from gradwire.rpc.futures import CallFuture
from gradwire.rref import RRef
from gradwire.rref import context as references
from gradwire.rref.owner import check_exposed
from gradwire.shard import ShardedTensor
from gradwire.shard.sharded_optim import ShardedOptimizer
from gradwire.wire.messages import read_plain

Filled = tuple[Part, Node, dict[str, Any] | None]
"""A part, the saved state of its object, and the versions of its modules."""


def fill_stateful(parts: Sequence[Filled], reader: TensorReader) -> None:
    """Loads what has a `load_state_dict` of its own and is no module. If one refuses, all are put back.

    Raises:
        CheckpointError: An object's `load_state_dict` raised, or its state could not be read.
    """
    undo: list[Callable[[], Any]] = []
    for part, node, _ in parts:
        if isinstance(part.value, nn.Module | torch.Tensor):
            continue
        try:
            _fill_stateful(part, node, reader, undo)
        except Exception as error:
            for put_back in reversed(undo):
                put_back()
            if isinstance(error, CheckpointError):
                raise
            text = f"{type(part.value).__name__} did not take its state: {type(error).__name__}: {error}"
            raise CheckpointError(f"'{part.path}' was not loaded: {text}") from error


def fill_tensors(parts: Sequence[Filled], reader: TensorReader) -> None:
    """Loads modules and tensors, which are known to fit."""
    for part, node, metadata in parts:
        if isinstance(part.value, nn.Module):
            _fill_module(part, node, metadata, reader)
        elif isinstance(part.value, torch.Tensor):
            put(part.value, node, reader)


def _fill_stateful(part: Part, node: Node, reader: TensorReader, undo: list[Callable[[], Any]]) -> None:
    value = part.value
    if isinstance(value, LocalOptimizer):
        saved = items_of(node) or {}
        state = {name: decode(saved[name], reader.copied, reader) for name in part.names if name in saved}
        before = value.named_state()
        undo.append(lambda: value.load_named_state(before))
        value.load_named_state(state)
    else:
        before = value.state_dict()
        undo.append(lambda: value.load_state_dict(before))
        value.load_state_dict(_decode(value, node, reader))


def _decode(value: Any, node: Node, reader: TensorReader) -> Any:
    if isinstance(value, ShardedOptimizer):
        return decode_state(value, node, reader)
    return decode(node, reader.copied, reader)


def _fill_module(part: Part, node: Node, metadata: dict[str, Any] | None, reader: TensorReader) -> None:
    """Read from the files straight into the parameters, where the module copies from the state that it is given."""
    module, saved = part.value, items_of(node) or {}
    copied = _copied_names(part)
    failures: list[CheckpointError] = []
    state: Any = OrderedDict()
    for name, target in module_state(module, part.is_own_only).items():
        if part.prefix + name not in saved or isinstance(target, ShardedTensor):
            continue
        item = saved[part.prefix + name]
        if name in copied and isinstance(target, torch.Tensor) and is_tensor(item):
            dtype, shape = reader.form_of(item)
            fill = functools.partial(put, node=item, source=reader)
            state[name] = stored(shape, DTYPES[dtype], fill, failures)
        else:
            state[name] = decode(item, reader.copied, reader)
    # Torch would replace parameters instead of filling them if the metadata told it to.
    saved_versions = {
        key: {name: value for name, value in item.items() if name != "assign_to_params_buffers"}
        for key, item in (metadata or {}).items()
    }
    versions = {key[len(part.prefix) :]: item for key, item in saved_versions.items() if key.startswith(part.prefix)}
    versions.setdefault("", saved_versions.get(part.prefix.rstrip("."), {}))
    state._metadata = versions
    try:
        if part.is_own_only:
            errors: list[str] = []
            module._load_from_state_dict(state, "", versions[""], False, [], [], errors)
            if errors:
                raise RuntimeError("; ".join(errors))
        else:
            module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        if failures:  # torch has made a line of text of it
            raise failures[0] from error
        raise


def _copied_names(part: Part) -> set[str]:
    """Return the names of what torch's own code loads: it copies from tensors of a state, and keeps none of them."""
    if not part.is_own_only and not _is_torchs(part.value, "load_state_dict"):
        return set()
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in part.value.named_modules(remove_duplicate=False)
        if _is_torchs(module, "_load_from_state_dict")
        for name in (*module._parameters, *module._buffers)
    }


def _is_torchs(module: nn.Module, method: str) -> bool:
    return getattr(getattr(module, method), "__func__", None) is getattr(nn.Module, method)


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
    """One `gradwire.checkpoint.stateful.Fit` for each part."""

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
            fill_stateful(saved, reader)
            with objects.changing(parts):
                fill_tensors(saved, reader)
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
        return decode_struct(order, kind)
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


def encode_struct(message: Any) -> bytes:
    """A message for an owner."""
    return _encoder.encode(message)


def decode_struct(data: bytes, kind: type[T]) -> T:
    """An owner's answer."""
    found: T = _decoders[kind].decode(data)
    return found


_POLL_S: Final = 0.1


class Parts:
    """The parts of a save or a load, by the worker that has them."""

    def __init__(self) -> None:
        self.here: list[Part] = []
        self.elsewhere: dict[str, list[Part]] = {}

    def add(self, part: Part) -> tuple[str, int]:
        """Takes a part; returns where its report will be: the worker ("" for this one), and its number there."""
        if isinstance(part.value, RRef) and not part.value.is_owner():
            name, found = part.value.owner_name(), self.elsewhere.setdefault(part.value.owner_name(), [])
        else:
            value = part.value.local_value() if isinstance(part.value, RRef) else part.value
            name, found, part = "", self.here, replace(part, value=value)
        found.append(part)
        return name, len(found) - 1

    def sent(self, worker: str) -> list[SentPart]:
        """The parts of a worker, as they travel."""
        return [send(part) for part in self.elsewhere[worker]]


class Round:
    """One question to many workers, and something to do here meanwhile.

    Args:
        doing: What is being done, for errors: ``saving to /a/b``.
        timeout_s: How long each worker may take.
    """

    def __init__(self, doing: str, timeout_s: float) -> None:
        self._doing = doing
        self._timeout_s = timeout_s
        self._futures: list[tuple[str, CallFuture[Any] | Exception]] = []
        self._settled = threading.Semaphore(0)  # counts answers

    def ask(self, worker: str, function: str, *args: Any, on_done: Callable[[], None] = lambda: None) -> None:
        """Asks a worker; `on_done` is called when it has answered."""
        try:
            with torch.no_grad():  # has no part in any graph
                future = rpc.rpc_async(worker, function, args, timeout=self._timeout_s)
        except Exception as error:
            self._futures.append((worker, error))
            return
        self._futures.append((worker, future))

        def on_answer(_: Any) -> None:
            on_done()
            self._settled.release()

        future.add_done_callback(on_answer)

    def finish(
        self, here: Callable[[], T], on_poll: Callable[[], None] = lambda: None
    ) -> tuple[T, list[tuple[str, Any]]]:
        """Does this worker's part, then waits for the others.

        Args:
            here: This worker's part.
            on_poll: Called now and then while others are waited for.

        Returns:
            What came of this worker's part, and every answer with the worker's name, in the order of the questions.

        Raises:
            CheckpointError: Something went wrong somewhere; everybody has come to an end.
        """
        failures: list[tuple[str, Exception]] = []
        try:
            own = here()
        except Exception as error:
            failures.append((worker_name(), error))
        self._wait_settled(on_poll)
        answers = []
        for worker, future in self._futures:
            try:
                if isinstance(future, Exception):
                    raise future
                answers.append((worker, future.wait()))
            except Exception as error:
                failures.append((worker, error))
        if failures:
            raise self._failed(failures)
        return own, answers

    def _wait_settled(self, on_poll: Callable[[], None]) -> None:
        """Every call ends by its own deadline, so this does, too."""
        for _ in range(sum(not isinstance(future, Exception) for _, future in self._futures)):
            while not self._settled.acquire(timeout=_POLL_S):
                on_poll()
            on_poll()

    def _failed(self, failures: list[tuple[str, Exception]]) -> Exception:
        for _, error in failures:
            if isinstance(error, CheckpointError):
                return error
        worker, error = failures[0]
        more = f" (and on {len(failures) - 1} more)" if len(failures) > 1 else ""
        failed = CheckpointError(f"{self._doing} failed on worker {worker}{more}: {type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed


def groups_of(entries: Mapping[str, TensorEntry], group_bytes: int) -> list[dict[str, TensorEntry]]:
    """Tensors in groups of about that many bytes."""
    groups: list[dict[str, TensorEntry]] = []
    size = group_bytes
    for name, entry in entries.items():
        if size >= group_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = entry
        size += entry.num_bytes
    return groups
