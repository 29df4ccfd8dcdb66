"""The index of a checkpoint: one JSON file that says what is in it, where, and how to tell whether it is whole.

    {"format": "gradwire.checkpoint", "version": 2, "checksum": "crc32:...", "content": {...}}

The checksum is of the bytes of ``content``. The version is looked at before anything else, so that a checkpoint of a later
gradwire says so instead of looking damaged.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Final

import msgspec

from gradwire.checkpoint._dtypes import DTYPES, num_bytes_of
from gradwire.checkpoint._pieces import bodies, find_problem
from gradwire.checkpoint._tree import check_node, tensor_names
from gradwire.errors import CheckpointDamaged, CheckpointError

FORMAT: Final = "gradwire.checkpoint"
VERSION: Final = 2
_READABLE: Final = (1, 2)  # version 1 had no tensors in pieces
GENERATION: Final = re.compile(r"g[0-9]{4,12}-[0-9a-f]{8}")
FILE_NAME: Final = re.compile(rf"(?P<generation>{GENERATION.pattern})-[A-Za-z0-9_.:-]{{1,160}}\.safetensors")


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor is and what it must be.

    Attributes:
        file: Name of the safetensors file, where the tensor has the same name as here.
        offset: Where its bytes begin in that file.
        dtype: torch's name of its dtype.
        shape: Its shape.
        checksum: Of its bytes.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes in the file."""
        return num_bytes_of(DTYPES[self.dtype], self.shape)


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file, written by one worker.

    Attributes:
        num_bytes: Its size.
        header_bytes: How many of them come before the tensors.
        checksum: Of those.
        worker: Who wrote it.
        host: And on which machine.
    """

    num_bytes: int
    header_bytes: int
    checksum: str
    worker: str
    host: str


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who saved the checkpoint, and with what."""

    worker: str
    host: str
    pid: int
    gradwire: str
    torch: str


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it.

    Attributes:
        generation: Distinguishes this save from others to the same directory; its files begin with it.
        created: When, in UTC.
        writer: Who saved it.
        files: By name.
        tensors: By name.
        state: What was saved, as a node (`gradwire.checkpoint._tree`).
    """

    generation: str
    created: str
    writer: Writer
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    state: Any


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    checksum: str
    content: msgspec.Raw


_decode_head: Final = msgspec.json.Decoder(_Head).decode  # here, so that msgspec learns types before there are threads
_decode_envelope: Final = msgspec.json.Decoder(_Envelope).decode
_decode_index: Final = msgspec.json.Decoder(Index).decode


def checksum_of(data: Any) -> str:
    """The checksum of bytes."""
    return show_checksum(zlib.crc32(data))


def show_checksum(number: int) -> str:
    """A checksum as the index has it."""
    return f"crc32:{number:08x}"


def dump(index: Index) -> bytes:
    """The bytes of an index."""
    content = msgspec.json.format(msgspec.json.encode(index), indent=1)
    envelope = _Envelope(FORMAT, VERSION, checksum_of(content), msgspec.Raw(content))
    return msgspec.json.encode(envelope) + b"\n"


def parse(data: bytes, where: str) -> Index:
    """The index that those bytes are.

    Args:
        data: All of the file.
        where: Its path, for errors.

    Raises:
        CheckpointDamaged: They are no index, or not what was written.
        CheckpointError: It is of a version that this gradwire does not know.
    """
    try:
        head = _decode_head(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged(where, f"it is not a whole JSON file ({error})") from error
    if head.format != FORMAT:
        raise CheckpointError(
            f"{where} is no index of a checkpoint: its format is {head.format!r}, not {FORMAT!r}", where
        )
    if head.version not in _READABLE:
        raise CheckpointError(
            f"{where} has version {head.version} of the format and this gradwire reads versions up to {VERSION}; load it "
            "with the gradwire that saved it",
            where,
        )
    try:
        envelope = _decode_envelope(data)
        if checksum_of(envelope.content) != envelope.checksum:
            raise _damaged(where, "its checksum is wrong")
        index = _decode_index(envelope.content)
        _check(index, where)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged(where, str(error)) from error
    return index


def _check(index: Index, where: str) -> None:
    """What types alone cannot say. Names of files must not lead out of the directory."""
    if not GENERATION.fullmatch(index.generation):
        raise _damaged(where, f"{index.generation!r} is no generation")
    for name in index.files:
        if not FILE_NAME.fullmatch(name):
            raise _damaged(where, f"{name!r} is not the name of a file of a checkpoint")
    for name, entry in index.tensors.items():
        file = index.files.get(entry.file)
        if entry.dtype not in DTYPES or any(size < 0 for size in entry.shape):
            raise _damaged(where, f"tensor '{name}' has an unknown dtype or shape: {entry.dtype}, {entry.shape}")
        if file is None or entry.offset < file.header_bytes or entry.offset + entry.num_bytes > file.num_bytes:
            raise _damaged(where, f"tensor '{name}' has no place in {entry.file!r}")
    if not isinstance(index.state, dict):
        raise _damaged(where, "it has no state")
    try:
        check_node(index.state)
    except ValueError as error:
        raise _damaged(where, f"its state has an unknown form ({error})") from error
    unknown = [name for name in tensor_names(index.state) if name not in index.tensors]
    if unknown:
        raise _damaged(where, f"it has no tensor '{unknown[0]}'")
    for body in bodies(index.state):
        problem = find_problem(body, index.tensors) if body["dtype"] in DTYPES else f"unknown dtype {body['dtype']}"
        if problem:
            raise _damaged(where, problem)


def _damaged(where: str, why: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"the index {where} is damaged: {why}. Load another checkpoint", where)
