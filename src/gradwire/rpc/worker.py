"""Builds one worker: transports, agent, and whatever the layers above add to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError
from gradwire.rpc.agent import Agent
from gradwire.rpc.directory import Directory
from gradwire.transports import registry
from gradwire.types import Trust, WorkerAddress, WorkerInfo, make_incarnation

attachments: list[Callable[[Agent], None]] = []
"""What the layers above do to every new agent before it starts (register control operations, add interceptors)."""


def start_worker(
    info: WorkerInfo,
    config: WorkerConfig,
    directory: Directory,
    *,
    folder: Path | None = None,
    on_close: Callable[[], None] = lambda: None,
) -> Agent:
    """Builds a worker and starts it.

    Args:
        info: Its name and rank.
        config: How it runs.
        directory: Who else is there.
        folder: Private folder (0700) for its socket; a temporary one if not given.
        on_close: Called when the worker is closed.

    Raises:
        ConfigurationError: A setting or address cannot be used; nothing is left running.
    """
    check_name(info.name, config.limits.name_bytes)
    own_folder = Path(tempfile.mkdtemp(prefix="gradwire-")) if folder is None else None

    def clean_up() -> None:
        if own_folder is not None:
            shutil.rmtree(own_folder, ignore_errors=True)
        on_close()

    try:
        trust: Trust = config.trust or ("data" if config.tls is not None else "code")
        address = WorkerAddress(info, make_incarnation(), registry.host_identity(), ())
        transports = registry.make_transports(config, folder or own_folder)
        agent = Agent(address, config, trust, directory, transports, clean_up)
        for attach in attachments:
            attach(agent)
        agent.start()
    except BaseException:
        clean_up()
        raise
    return agent


def check_name(name: str, limit: int) -> None:
    """Refuses names that would be confusing in messages, paths or logs.

    Raises:
        ConfigurationError: The name is empty, too long or has characters beyond letters, digits and ``-_:.``.
    """
    if not name or len(name.encode()) > limit or not all(char.isalnum() or char in "-_:." for char in name):
        raise ConfigurationError(
            f"a worker's name must have 1 to {limit} letters, digits, '-', '_', ':' or '.', unlike {name!r}"
        )
