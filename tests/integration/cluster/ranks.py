"""Programs that are started on every rank, as launchers do."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import quick_python

PREFIX = """
import os, signal, sys, time
import torch
import gradwire as gw

def whoami():
    return os.getpid()

def main():
    with gw.Cluster.from_env(start_timeout_s=float(os.environ.get("START_S", "40"))) as cluster:
        {block}
    print("after the block in rank", os.environ.get("GRADWIRE_RANK"), flush=True)

if __name__ == "__main__":
    main()
"""

_LAUNCHERS = ("GRADWIRE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "SKYPILOT_", "MASTER_", "RANK", "WORLD_SIZE")


def outside_environment() -> dict[str, str]:
    """The environment of this process, without what launchers of ranks set."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}


def program(folder: Path, block: str) -> Path:
    """A script whose driver runs these lines."""
    path = folder / "program.py"
    path.write_text(PREFIX.format(block=block.replace("\n", "\n        ")))
    return path


class Rank:
    """A process that was started as one rank."""

    def __init__(self, number: int, command: list[str], environment: Mapping[str, str], fresh: bool) -> None:
        self.number = number
        popen = subprocess.Popen if fresh else quick_python.Popen
        self.process = popen(command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self, timeout_s: float = 90.0) -> tuple[int, str, str]:
        """Its exit code, and what it printed."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            spy = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(self.process.pid)]
            stacks = subprocess.run(spy, capture_output=True, text=True, timeout=20, check=False).stdout
            raise AssertionError(
                f"rank {self.number} has not ended within {timeout_s:g} s; it is here:\n{stacks}"
            ) from None
        return self.process.returncode, out, err


@contextlib.contextmanager
def started(
    script: Path,
    world_size: int,
    *,
    ranks: range | None = None,
    before: Mapping[int, list[str]] | None = None,
    fresh: Container[int] = (),
    **more: str,
) -> Iterator[list[Rank]]:
    """All ranks of a program.

    Args:
        script: The program.
        world_size: The number of ranks.
        ranks: Those that are started; all of them if not given.
        before: Words for the front of a rank's command.
        fresh: Those that have an interpreter of their own from the start; others are forks.
        **more: For the environment.
    """
    outside = outside_environment() | {
        "GRADWIRE_RUN_ID": secrets.token_hex(8),
        "GRADWIRE_WORLD_SIZE": str(world_size),
        **more,
    }
    running: list[Rank] = []
    try:
        for number in ranks or range(world_size):
            command = [*(before or {}).get(number, []), sys.executable, str(script)]
            running.append(Rank(number, command, outside | {"GRADWIRE_RANK": str(number)}, number in fresh))
        yield running
    finally:
        for rank in running:
            rank.process.kill()
            rank.process.wait(10)
            for stream in (rank.process.stdout, rank.process.stderr):
                if stream is not None:
                    stream.close()
