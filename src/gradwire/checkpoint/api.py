"""The public functions `save`, `load`, `read`, `verify` and `inspect`, and the summary of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gradwire.checkpoint.directory import Directory
from gradwire.checkpoint.index import Index
from gradwire.checkpoint.loader import load_from
from gradwire.checkpoint.participants import worker_name
from gradwire.checkpoint.progress import ByteProgress, ProgressOption
from gradwire.checkpoint.safetensors_io import TensorReader, check_headers, check_tensors
from gradwire.checkpoint.saver import save_into
from gradwire.checkpoint.stateful import find_sharded, group_of
from gradwire.checkpoint.tree import SHARDED, Node, items_of, tag_of, tensor_names
from gradwire.observe import events

PathLike = str | os.PathLike[str]

_TIMEOUT_S: Final = 3600.0
_MAX_VALUE: Final = 60  # characters of a value that a summary shows
_MAX_ENTRIES: Final = 20


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of a checkpoint.

    Attributes:
        name: File name in the directory of the checkpoint.
        num_bytes: Size of the file.
        worker: The worker that wrote it.
        host: The machine of that worker.
    """

    name: str
    num_bytes: int
    worker: str
    host: str


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """One entry of the dict that was saved.

    Attributes:
        path: The key that it was saved under.
        kind: ``module``, ``optimizer``, ``stateful``, ``tensor`` or ``value``.
        text: Its class, or the value itself, for people to read.
        num_tensors: Number of tensors; a shared one counts once.
        num_bytes: Size of the tensors.
        workers: The workers that wrote them.
    """

    path: str
    kind: str
    text: str
    num_tensors: int
    num_bytes: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """Contents and size of a checkpoint, and by which worker and when it was saved.

    Attributes:
        directory: Path of the checkpoint.
        generation: Distinguishes saves to one directory.
        created: When it was saved, in UTC.
        writer: Worker, process and machine that saved it.
        versions: Versions of gradwire and torch that saved it.
        entries: One for each key of the dict that was saved.
        files: One for each worker that wrote.
        num_tensors: Number of tensors.
        num_bytes: Size of all files.
    """

    directory: Path
    generation: str
    created: str
    writer: str
    versions: dict[str, str]
    entries: tuple[SavedEntry, ...]
    files: tuple[SavedFile, ...]
    num_tensors: int
    num_bytes: int

    def __repr__(self) -> str:
        tensors, files = _count(self.num_tensors, "tensor"), _count(len(self.files), "file")
        lines = [
            f"<Checkpoint {self.directory}: {tensors}, {_show_bytes(self.num_bytes)} in {files}; generation "
            f"{self.generation}, saved {self.created} by {self.writer}"
        ]
        width = max((len(entry.path) for entry in self.entries), default=0)
        for entry in self.entries[:_MAX_ENTRIES]:
            line = f"  {entry.path:{width}}  {entry.kind:9}  {entry.text}"
            if entry.num_tensors:
                size = f"{_count(entry.num_tensors, 'tensor')}, {_show_bytes(entry.num_bytes)}"
                line += f"  {size}, by {', '.join(entry.workers)}"
            lines.append(line)
        if len(self.entries) > _MAX_ENTRIES:
            lines.append(f"  and {len(self.entries) - _MAX_ENTRIES} more")
        # A checkpoint must not be able to move the cursor of the terminal that shows it.
        return "\n".join("".join(char if char.isprintable() else "?" for char in line) for line in lines) + ">"


def save(
    directory: PathLike,
    state: dict[str, Any],
    *,
    progress: ProgressOption = None,
    timeout: float = _TIMEOUT_S,
    process_group: Any = None,
) -> Summary:
    """Save a checkpoint: all workers write their own objects in parallel, and the new checkpoint replaces the old one.

    Over RPC workers, one of them calls it. With sharded tensors of a process group, every rank calls it with the same names:
    each rank writes its shards, and rank 0 everything else.

    If a worker crashes, the directory holds the old checkpoint or the new one. Do not train during a save: each worker
    saves its parameters at one moment, but the moments of two workers may differ by a step.

    Args:
        directory: A directory that all workers share; created if necessary. It holds one checkpoint.
        state: Objects to save, by name: `RemoteModule`, `DistributedOptimizer`, references to tensors or modules, modules,
            local optimizers and schedulers, sharded and plain tensors, plain values; and dicts, lists and tuples
            of these.
        progress: None shows a bar in a terminal, False shows nothing; a function is called with the bytes written and the
            total bytes.
        timeout: Seconds to wait for a worker before it counts as failed; for ranks, the timeout of their process group
            applies.
        process_group: The group whose ranks save together; needed only if all sharded tensors are inside objects that
            are neither modules nor sharded optimizers.

    Returns:
        A summary of the checkpoint.

    Raises:
        CannotSave: A value cannot be saved; nothing was written.
        CheckpointBusy: Another process is saving to that directory.
        CheckpointWriteFailed: A worker could not write; the previous checkpoint is intact.
        CheckpointError: A worker died or did not answer; the previous checkpoint is intact.
        ConfigurationError: The sharded tensors are in several process groups.
    """
    place, group = Directory(directory), group_of(state, process_group)
    with events.Span("checkpoint", "save", worker_name, details=lambda: {"path": str(place.path)}) as span:
        summary = _summarize(place.path, save_into(place, state, progress, timeout, group))
        span.num_bytes = summary.num_bytes
    return summary


def load(
    directory: PathLike,
    objects: dict[str, Any] | None = None,
    *,
    strict: bool = True,
    progress: ProgressOption = None,
    timeout: float = _TIMEOUT_S,
    process_group: Any = None,
) -> dict[str, Any]:
    """Fill objects from a checkpoint, on any workers, and return the values that were saved beside them.

    Sharded tensors may be sharded differently than when they were saved: each shard reads its own region. With sharded
    tensors of a process group, every rank calls this with the same names.

    Everything is compared and checked before anything is changed. Entries of the checkpoint without an object are ignored.

    Args:
        directory: Directory of the checkpoint, which all workers with objects to fill must see.
        objects: Objects to fill, by the names that they were saved under.
        strict: Require the same names and dtypes in objects and checkpoint. If False, common names are loaded, and
            converted. Shapes must always be the same.
        progress: As for `save`.
        timeout: Seconds to wait for a worker before it counts as failed, in each phase.
        process_group: As for `save`.

    Returns:
        The values (numbers, strings, tensors and so on), in the dicts that they were saved in.

    Raises:
        CheckpointMissing: There is no checkpoint, or a file of it is missing; nothing was changed.
        CheckpointDamaged: A file has changed since it was written. No object was changed, unless the message says so: a file
            may be damaged while objects are being filled.
        CheckpointMismatch: The checkpoint does not fit the objects; nothing was changed.
        CheckpointBusy: Another process is removing old files from the directory.
        CheckpointError: A file cannot be opened, or the index has another format or version; nothing was changed. Or
            `load_state_dict` of an object raised, or a worker died; other objects may have been filled.
        ConfigurationError: The sharded tensors are in several process groups.
    """
    place, wanted = Directory(directory), {} if objects is None else objects
    group = group_of(wanted, process_group)
    for tensor in find_sharded(wanted):
        tensor._backend.settle()  # operations that still read it end first
    with events.Span("checkpoint", "load", worker_name, details=lambda: {"path": str(place.path)}):
        return load_from(place, wanted, strict, progress, timeout, group)


def read(directory: PathLike, *, progress: ProgressOption = None) -> dict[str, Any]:
    """Return the whole checkpoint as plain values, in this process only: modules as state dicts of tensors.

    Args:
        directory: Directory of the checkpoint.
        progress: As for `save`.

    Raises:
        CheckpointMissing: There is no checkpoint, or a file of it is missing.
        CheckpointDamaged: A file has changed since it was written.
        CheckpointBusy: Another process is removing old files from the directory.
        CheckpointError: The index cannot be read, or has another format or version.
    """
    place = Directory(directory)
    with place.reading() as index:
        _check(place, index, tensor_names(index.state), progress)
        with place.open() as folder, TensorReader(folder, index.tensors) as reader:
            found: dict[str, Any] = reader.decode(index.state, keeps_ties=True)
    return found


def verify(directory: PathLike, *, progress: ProgressOption = None) -> Summary:
    """Read all files of a checkpoint, and compare them with its index.

    Args:
        directory: Directory of the checkpoint.
        progress: As for `save`.

    Raises:
        CheckpointMissing: There is no checkpoint, or a file of it is missing.
        CheckpointDamaged: A file has changed since it was written; the message names the file and the tensor.
        CheckpointBusy: Another process is removing old files from the directory.
        CheckpointError: The index cannot be read, or has another format or version.
    """
    place = Directory(directory)
    with place.reading() as index:
        _check(place, index, index.tensors, progress)
        return _summarize(place.path, index)


def inspect(directory: PathLike) -> Summary:
    """Return contents and sizes of a checkpoint and the workers that wrote it, from its index alone.

    Args:
        directory: Directory of the checkpoint.

    Raises:
        CheckpointMissing: There is no index.
        CheckpointDamaged: The index is damaged.
        CheckpointError: The index cannot be read, or has another format or version.
    """
    place = Directory(directory)
    return _summarize(place.path, place.read_index())


def _check(place: Directory, index: Index, names: Iterable[str], option: ProgressOption) -> None:
    entries = {name: index.tensors[name] for name in names}
    with ByteProgress("checking", option) as progress, place.open() as folder:
        progress.total = sum(entry.num_bytes for entry in entries.values())
        check_headers(folder, index.files)
        check_tensors(folder, entries, progress.advance)


def _summarize(directory: Path, index: Index) -> Summary:
    writer = index.writer
    return Summary(
        directory=directory,
        generation=index.generation,
        created=index.created,
        writer=f"worker {writer.worker}, process {writer.pid} on {writer.host}",
        versions={"gradwire": writer.gradwire, "torch": writer.torch},
        entries=tuple(_entry(index, str(key), node) for key, node in (items_of(index.state) or {}).items()),
        files=tuple(SavedFile(name, item.num_bytes, item.worker, item.host) for name, item in index.files.items()),
        num_tensors=len(index.tensors),
        num_bytes=sum(item.num_bytes for item in index.files.values()),
    )


def _entry(index: Index, key: str, node: Node) -> SavedEntry:
    tensors = {name: index.tensors[name] for name in tensor_names(node)}
    workers = sorted({index.files[entry.file].worker for entry in tensors.values()})
    kind, text = _describe(node)
    return SavedEntry(key, kind, text, len(tensors), sum(item.num_bytes for item in tensors.values()), tuple(workers))


def _describe(node: Node) -> tuple[str, str]:
    tag = tag_of(node)
    body = node if tag is None else node[tag]
    if tag == "$object":
        return body["kind"], body["type"]
    if tag == "$tensor":
        return "tensor", ""
    if tag == SHARDED:
        return "tensor", f"{_count(len(body['pieces']), 'piece')} of {tuple(body['shape'])}"
    if tag in ("$tuple", "$size") or isinstance(node, list):
        text = f"{len(body)} items"
    elif (items := items_of(node)) is not None:
        text = f"{len(items)} keys: {', '.join(map(str, items))}"
    else:
        text = str(body) if tag else repr(node)
    return "value", text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _show_bytes(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
