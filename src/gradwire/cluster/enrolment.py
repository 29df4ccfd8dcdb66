"""How a process that a scheduler started becomes a worker: its key stays where it was made.

    driver                                              process
    Introduce                      ------------->       makes a key
                                   <-------------       Introduction: certificate request, host, versions
    Assign: name and rank, the     ------------->       listens
    signed certificate, the token
    sealed for that key            <-------------       Ready: its address

The messages go over the scheduler's channel, which others may read: nothing in them is secret. The driver signs for a name
only what came from a process that it had started itself.
"""

from __future__ import annotations

import msgspec

from gradwire.types import WorkerAddress, WorkerInfo


class Introduce(msgspec.Struct, frozen=True, tag=True):
    """Ask the process who it is."""


class Versions(msgspec.Struct, frozen=True):
    """What must be the same on both sides."""

    python: str
    torch: str
    gradwire: str


class Introduction(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Introduce`."""

    certificate_request: bytes  # PEM
    host: str  # host name, for people
    address: str  # where the others reach this machine
    local_index: int  # counts the processes of one machine, where the scheduler says so
    pid: int
    versions: Versions


class Assign(msgspec.Struct, frozen=True, tag=True):
    """The driver's decision about a process."""

    info: WorkerInfo
    certificate: bytes  # PEM
    authority: bytes  # PEM
    sealed_token: bytes  # can be opened with the process's key alone
    driver: WorkerAddress
    settings: bytes  # encoded `WorkerSettings`: no secrets


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Assign`: the worker listens."""

    address: WorkerAddress


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The answer of a process that cannot become a worker, with its traceback."""

    text: str
