"""The index of a checkpoint: one JSON file with its contents, their places in files, and checksums.

    {"format": "gradwire.checkpoint", "version": 2, "checksum": "crc32:...", "content": {...}}

The checksum is of the bytes of ``content``. The version is checked first, so that a checkpoint of a later gradwire raises
an error about its version, not about damage.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from math import prod
from typing import Any, Final

import msgspec
import torch

from gradwire.checkpoint.tree import bodies, check_node, find_problem, find_unlike, tensor_names
from gradwire.errors import CheckpointDamaged, CheckpointError

STORED_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",  # safetensors does not have these two: real and imaginary parts are the last dimension
    "complex32": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The safetensors dtype of the stored bytes, by torch's name of the dtype."""

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in STORED_NAMES if hasattr(torch, name)}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

FORMAT: Final = "gradwire.checkpoint"
VERSION: Final = 2
_READABLE: Final = (1, 2)  # version 1 had no tensors in pieces
MAX_DIMS: Final = 64
_MAX_BYTES: Final = 2**62  # of a file; what is beyond overflows elsewhere
GENERATION: Final = re.compile(r"g[0-9]{4,12}-[0-9a-f]{8}")
FILE_NAME: Final = re.compile(rf"(?P<generation>{GENERATION.pattern})-[A-Za-z0-9_.:-]{{1,160}}\.safetensors")


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Place, dtype, shape and checksum of a tensor. In its safetensors file it has the same name as in the index."""

    file: str
    offset: int  # of its bytes in the file
    dtype: str  # torch's name
    shape: tuple[int, ...]
    checksum: str

    @property
    def num_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * prod(self.shape)


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_bytes: int
    header_bytes: int  # how many of them come before the tensors
    checksum: str  # of the header
    worker: str
    host: str


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    worker: str
    host: str
    pid: int
    gradwire: str
    torch: str


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the index; files and tensors are found by name."""

    generation: str  # distinguishes this save from others to the same directory; its files begin with it
    created: str  # in UTC
    writer: Writer
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    state: Any  # what was saved, as a node (`gradwire.checkpoint.tree`)


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
    return show_checksum(zlib.crc32(data))


def show_checksum(number: int) -> str:
    return f"crc32:{number:08x}"


def dump(index: Index) -> bytes:
    content = msgspec.json.format(msgspec.json.encode(index), indent=1)
    envelope = _Envelope(FORMAT, VERSION, checksum_of(content), msgspec.Raw(content))
    return msgspec.json.encode(envelope) + b"\n"


def parse(data: bytes, where: str) -> Index:
    """Return the index in the bytes of a file; errors name it by `where`."""
    try:
        head = _decode_head(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged(where, f"it is not complete JSON ({error})") from error
    if head.format != FORMAT:
        raise CheckpointError(
            f"{where} is not the index of a checkpoint: its format is {head.format!r}, not {FORMAT!r}", where
        )
    if head.version not in _READABLE:
        raise CheckpointError(
            f"{where} has version {head.version} of the format and this gradwire reads versions up to {VERSION}; load "
            f"it with the gradwire that saved it",
            where,
        )
    try:
        envelope = _decode_envelope(data)
        if checksum_of(envelope.content) != envelope.checksum:
            raise _damaged(where, "its checksum is wrong")
        index = _decode_index(envelope.content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged(where, str(error)) from error
    check(index, where)
    return index


def check(index: Index, where: str) -> None:
    """Check what types alone cannot express: one part of an index must not contradict another."""
    try:
        if not GENERATION.fullmatch(index.generation):
            raise ValueError(f"{index.generation!r} is not a valid generation")
        check_files(index.files)
        check_entries(index.tensors)
        for name, entry in index.tensors.items():
            file = index.files.get(entry.file)
            if file is None or entry.offset < file.header_bytes or entry.offset + entry.num_bytes > file.num_bytes:
                raise ValueError(f"tensor '{name}' is outside {entry.file!r}")
        if not isinstance(index.state, dict):
            raise ValueError("it has no state")
        check_state(index.state, index.tensors)
        for body in bodies(index.state):
            if problem := find_problem(body, index.tensors):
                raise ValueError(problem)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, str(error)) from error


def _damaged(where: str, why: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"the index {where} is damaged: {why}. Load another checkpoint", where)


# An index, an order to a worker and a worker's report are made of the same things, and are checked by these functions.
# They raise ValueError.


def check_files(files: Mapping[str, FileEntry]) -> None:
    for name, file in files.items():
        _check_file_name(name)
        if not 0 <= file.header_bytes <= file.num_bytes <= _MAX_BYTES:
            raise ValueError(f"{name!r} cannot have {file.num_bytes} bytes, {file.header_bytes} of them in its header")
        if not (file.worker.isprintable() and file.host.isprintable()):
            raise ValueError(f"{name!r} was written by a worker whose name cannot be printed")


def check_entries(entries: Mapping[str, TensorEntry]) -> None:
    for name, entry in entries.items():
        _check_file_name(entry.file)
        is_shape = len(entry.shape) <= MAX_DIMS and all(0 <= size <= _MAX_BYTES for size in entry.shape)
        if entry.dtype not in DTYPES or not is_shape:
            raise ValueError(f"tensor '{name}' has an unknown dtype or shape: {entry.dtype:.40}, {entry.shape!s:.200}")
        if not (entry.offset >= 0 and entry.offset + entry.num_bytes <= _MAX_BYTES):
            raise ValueError(f"tensor '{name}' is not in any file")


def _check_file_name(name: str) -> None:
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r:.200} is not a valid checkpoint file name")


def check_state(node: Any, entries: Mapping[str, TensorEntry]) -> None:
    """Check the node of a state: its form, that its tensors have entries, and that pieces of a tensor are alike."""
    try:
        check_node(node)
    except ValueError as error:
        raise ValueError(f"its state has an unknown form ({error})") from error
    unknown = next((name for name in tensor_names(node) if name not in entries), None)
    if unknown is not None:
        raise ValueError(f"it has no tensor '{unknown}'")
    for body in bodies(node):
        if body["dtype"] not in DTYPES or len(body["shape"]) > MAX_DIMS:
            raise ValueError(f"unknown dtype {body['dtype']:.40} or shape")
        if problem := find_unlike(body, entries):
            raise ValueError(problem)
