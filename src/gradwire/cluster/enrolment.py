"""How a process started by a scheduler becomes a worker without its private key leaving it.

    driver                                              process
    Introduce                      ------------->       makes a key
                                   <-------------       Introduction: certificate request, host, versions
    Assign: name and rank, the     ------------->       listens
    signed certificate, settings
    sealed for that key            <-------------       Ready: its address

The messages go over the scheduler's channel, which others may read: secrets in them (the cluster's token and the workers'
environment) are sealed for the key of the process. Others must not be able to write to the channel: a scheduler that starts
programs for them has already admitted them. The driver signs requests only from processes that it started itself.

This module defines the messages and the driver's decisions about them. It does not send any.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from gradwire.config import WorkerConfig
from gradwire.errors import DecodeError, LimitExceeded
from gradwire.types import Rank, WorkerAddress, WorkerInfo
from gradwire.versions import Versions
from gradwire.wire.exceptions import clean
from gradwire.wire.messages import check_address, check_text

MAX_MESSAGE_BYTES = 4 << 20
"""For a message of enrolment: the environment of a worker and the path of modules are the largest parts."""

_MAX_TEXT_BYTES = 1024
_MAX_FAILURE_BYTES = 64 << 10
_MAX_PEM_BYTES = 16 << 10

_Text = Annotated[str, Meta(max_length=_MAX_TEXT_BYTES)]
_Pem = Annotated[bytes, Meta(max_length=_MAX_PEM_BYTES)]


class Introduce(msgspec.Struct, frozen=True, tag=True):
    """Ask the process to introduce itself."""

    driver_host: _Text  # where the driver listens: the process is reached at its own address on the way there
    interface: _Text | None = None  # or at the address of this network interface


class Introduction(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Introduce`."""

    certificate_request: _Pem
    host: _Text  # host name, for messages
    address: _Text  # where the others reach this machine
    local_index: Annotated[int, Meta(ge=0, le=1 << 20)]  # counts the processes of one machine
    pid: Annotated[int, Meta(ge=0, le=1 << 31)]
    versions: Versions


class WorkerSettings(msgspec.Struct, frozen=True):
    """How a worker is to run. Holds the cluster's token, so it is sealed wherever it travels."""

    config: WorkerConfig
    num_threads: int  # of one torch operation
    environment: dict[str, str]  # on top of what the process has
    imports: tuple[str, ...]  # modules to import before anything is served
    path: tuple[str, ...]  # the driver's `sys.path`
    start_timeout_s: float  # after which a worker that the driver has not connected to ends


class Assign(msgspec.Struct, frozen=True, tag=True):
    """The driver's decision about a process."""

    name: _Text
    rank: Rank
    certificate: _Pem
    authority: _Pem
    driver: WorkerAddress
    sealed_settings: bytes  # encoded `WorkerSettings`, which the process's key alone can open
    after: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # its incarnation must be later than this

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.rank)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Assign`: the worker listens."""

    address: WorkerAddress


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The answer of a process that cannot become a worker, with its traceback."""

    text: str


Question = Introduce | Assign
Answer = Introduction | Ready | Failed

_M = TypeVar("_M")


def _rebuild(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_question = msgspec.msgpack.Decoder(Question)
_answer = msgspec.msgpack.Decoder(Answer)
_settings = msgspec.msgpack.Decoder(WorkerSettings, dec_hook=_rebuild)


def decode_question(data: bytes) -> Question:
    """Decode a message from the driver.

    Raises:
        DecodeError: It is not a valid message.
    """
    question: Question = _decode(_question, data, "a message from the driver")
    if isinstance(question, Assign):
        check_text(question.name, "a worker's name", _MAX_TEXT_BYTES)
    return question


def decode_answer(data: bytes, kind: type[_M], limits_of: WorkerConfig) -> _M | Failed:
    """Decode the reply of a process: one of `kind`, or `Failed` with a text that is safe to print.

    Raises:
        DecodeError: It is not a valid message, or of another kind.
    """
    answer: Answer = _decode(_answer, data, "the reply of a process")
    if isinstance(answer, Failed):
        return Failed(clean(answer.text, _MAX_FAILURE_BYTES))
    if not isinstance(answer, kind):
        raise DecodeError(f"expected {kind.__name__}, not {type(answer).__name__}")
    if isinstance(answer, Ready):
        check_address(answer.address, limits_of.limits)
    if isinstance(answer, Introduction):
        for text in (answer.host, answer.address, *msgspec.structs.astuple(answer.versions)):
            check_text(text, "a text in an introduction", _MAX_TEXT_BYTES)
    return answer


def decode_settings(data: bytes) -> WorkerSettings:
    settings: WorkerSettings = _decode(_settings, data, "a message with a worker's settings")
    return settings


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes, what: str) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise LimitExceeded(f"{what} has {len(data):,} bytes; at most {MAX_MESSAGE_BYTES:,} are accepted")
    try:
        return decoder.decode(data)
    except (ValueError, OverflowError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise DecodeError(f"{what} is not valid: {error}") from error


def order_of(introductions: Sequence[Introduction]) -> list[int]:
    """Return the indices of processes in the order in which they get names and ranks: by host, then by local index.

    So neighbours by rank are neighbours by machine, and a second start in the same places gives the same names.
    """

    def key(index: int) -> tuple[Any, ...]:
        item = introductions[index]
        return _natural(item.host), _natural(item.address), item.local_index, item.pid, index

    return sorted(range(len(introductions)), key=key)


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts node2 before node10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def host_name() -> str:
    """Return the name of this machine, for messages."""
    return socket.gethostname()[:_MAX_TEXT_BYTES]
