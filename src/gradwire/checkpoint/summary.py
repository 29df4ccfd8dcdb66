"""What is in a checkpoint, to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.checkpoint._index import Index
from gradwire.checkpoint._pieces import SHARDED
from gradwire.checkpoint._tree import Node, items_of, tag_of, tensor_names

_MAX_VALUE = 60
_MAX_ENTRIES = 20


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of a checkpoint.

    Attributes:
        name: In the directory of the checkpoint.
        num_bytes: Its size.
        worker: Who wrote it.
        host: And on which machine.
    """

    name: str
    num_bytes: int
    worker: str
    host: str


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """One thing that was saved.

    Attributes:
        path: The key it was saved under.
        kind: ``module``, ``optimizer``, ``stateful``, ``tensor`` or ``value``.
        text: Its class, or the value itself, for people to read.
        num_tensors: How many tensors it has; a shared one counts once.
        num_bytes: How large they are.
        workers: Who wrote them.
    """

    path: str
    kind: str
    text: str
    num_tensors: int
    num_bytes: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """What is in a checkpoint, how large it is, and who wrote it when.

    Attributes:
        directory: Where it is.
        generation: Distinguishes saves to one directory.
        created: When it was saved, in UTC.
        writer: Who saved it: worker, process and machine.
        versions: Of gradwire and torch then.
        entries: One for each key of the dict that was saved.
        files: One for each worker that wrote.
        num_tensors: How many tensors there are.
        num_bytes: How large all files are together.
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
            f"<Checkpoint {self.directory}: {tensors}, {show_bytes(self.num_bytes)} in {files}; generation "
            f"{self.generation}, saved {self.created} by {self.writer}"
        ]
        width = max((len(entry.path) for entry in self.entries), default=0)
        for entry in self.entries[:_MAX_ENTRIES]:
            line = f"  {entry.path:{width}}  {entry.kind:9}  {entry.text}"
            if entry.num_tensors:
                size = f"{_count(entry.num_tensors, 'tensor')}, {show_bytes(entry.num_bytes)}"
                line += f"  {size}, by {', '.join(entry.workers)}"
            lines.append(line)
        if len(self.entries) > _MAX_ENTRIES:
            lines.append(f"  and {len(self.entries) - _MAX_ENTRIES} more")
        return "\n".join(map(_printable, lines)) + ">"


def summarize(directory: Path, index: Index) -> Summary:
    """What an index says."""
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
    if tag_of(node) == "$object":
        return node["$object"]["kind"], node["$object"]["type"]
    if tag_of(node) == "$tensor":
        return "tensor", ""
    if tag_of(node) == SHARDED:
        return "tensor", f"{_count(len(node[SHARDED]['pieces']), 'piece')} of {tuple(node[SHARDED]['shape'])}"
    text = _show(node)
    return "value", text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."


def _show(node: Any) -> str:
    tag = tag_of(node)
    if tag in ("$tuple", "$size") or isinstance(node, list):
        return f"{len(node if tag is None else node[tag])} items"
    if (items := items_of(node)) is not None:
        return f"{len(items)} keys: {', '.join(map(str, items))}"
    return str(node[tag]) if tag else repr(node)


def _printable(text: str) -> str:
    """Whoever wrote the checkpoint must not be able to move the cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def show_bytes(num_bytes: float) -> str:
    """A size for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
