"""Builds one worker: transports, agent, and whatever the layers above add to it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

from gradwire.config import WorkerConfig
from gradwire.errors import InvalidName
from gradwire.rpc.agent import Agent
from gradwire.rpc.directory import Directory
from gradwire.transports import registry
from gradwire.transports.folder import SocketFolder
from gradwire.types import Trust, WorkerAddress, WorkerInfo, is_worker_name, make_incarnation

attachments: list[Callable[[Agent], None]] = []
"""What the layers above do to every new agent before it starts (register control operations, add interceptors)."""

_LIFE_NS = 86_400 * 10**9
"""How far ahead a worker begins whose clock was set back: the layers above count ids from the incarnation on, and the one
before it may have given out as many as belong to that time."""


def start_worker(
    info: WorkerInfo,
    config: WorkerConfig,
    directory: Directory,
    *,
    folder: Path | None = None,
    after: int = 0,
    on_close: Callable[[], None] = lambda: None,
) -> Agent:
    """Builds a worker and starts it.

    Args:
        info: Its name and rank.
        config: How it runs.
        directory: Who else is there.
        folder: Private folder (0700) for its socket; a temporary one if not given.
        after: The worker's earlier incarnation, if known: this one's is higher, even if the clock was set back.
        on_close: Called when the worker is closed.

    Raises:
        ConfigurationError: A setting or address cannot be used; nothing is left running.
    """
    check_name(info.name, config.limits.name_bytes)
    own_folder = SocketFolder() if folder is None else None

    def clean_up() -> None:
        if own_folder is not None:
            own_folder.close()
        on_close()

    try:
        trust: Trust = config.trust or ("data" if config.tls is not None else "code")
        incarnation = make_incarnation()
        if incarnation <= after:  # the clock was set back
            incarnation = after + _LIFE_NS
        address = WorkerAddress(info, incarnation, registry.host_identity(), (), _digest_of_main())
        transports = registry.make_transports(config, trust, own_folder.path if own_folder is not None else folder)
        agent = Agent(address, config, trust, directory, transports, clean_up)
        for attach in attachments:
            attach(agent)
        agent.start()
    except BaseException:
        clean_up()
        raise
    return agent


def _digest_of_main() -> str:
    """Tells whether two workers run the same script; empty in a notebook or an interactive interpreter."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32] if path else ""
    except OSError:
        return ""


def check_name(name: str, limit: int) -> None:
    """Refuses names that would be confusing in messages, paths or logs.

    Raises:
        InvalidName: The name is empty, too long or has characters beyond letters, digits and ``-_:.``.
    """
    if not name:
        raise InvalidName("a worker's name must be non-empty")
    if len(name.encode()) > limit:
        raise InvalidName(f"a worker's name must be shorter than {limit} characters or as long, unlike {name!r}")
    if not is_worker_name(name):
        raise InvalidName(f"Worker name must match letters, digits, '-', '_', ':' and '.', unlike {name!r}")
