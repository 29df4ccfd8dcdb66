"""The `gradwire` command, run as people run it: in a process of its own, which is a fork where not said otherwise."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path
from typing import Any

import gradwire
import quick_python
from cluster.processes import processes_with
from gradwire.testing import wait_until

_SOURCE = str(Path(gradwire.__file__).parents[1])
_END_S = 60.0


def environment(**variables: str) -> dict[str, str]:
    """What a command runs with: neither a terminal's width nor colours depend on where the tests run."""
    unwanted = ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "PYTHONPATH": _SOURCE, **variables}


def run_command(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``gradwire <arguments>`` to its end."""
    command = [sys.executable, "-m", "gradwire_command", *arguments]
    return quick_python.run(command, timeout=_END_S, env=environment(**variables), cwd=cwd)


def run_fresh_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As `run_command`, in an interpreter that has imported nothing."""
    command = [sys.executable, "-m", "gradwire_command", *arguments]
    return subprocess.run(
        command, timeout=_END_S, env=environment(**variables), capture_output=True, text=True, check=False
    )


def run_in_terminal(*arguments: str, press: bytes, after: bytes, **variables: str) -> int:
    """Runs ``gradwire <arguments>`` in a terminal of its own, presses a key once a text is shown, and returns its code."""
    near, far = pty.openpty()
    try:
        command = [sys.executable, "-m", "gradwire_command", *arguments]
        place = environment(TERM="xterm", **variables)
        with quick_python.Popen(
            command, env=place, stdin=far, stdout=far, stderr=far, start_new_session=True
        ) as process:
            shown, until = b"", time.monotonic() + _END_S
            try:
                while after not in shown:
                    assert select.select([near], [], [], max(0.0, until - time.monotonic()))[0], shown
                    shown += os.read(near, 1 << 16)
                os.write(near, press)
                return process.wait(_END_S)
            finally:
                process.kill()
    finally:
        os.close(near)
        os.close(far)


class Running:
    """A command that is running. Leaving the block checks that no process is left of it.

    Args:
        *arguments: Of ``gradwire``, or of the program.
        program: A script to run in its place.
        variables: Of its environment.
        **options: For `subprocess.Popen`.
    """

    def __init__(
        self, *arguments: str, program: str | None = None, variables: dict[str, str] | None = None, **options: Any
    ) -> None:
        name, value = "TEST_MARK", uuid.uuid4().hex
        self._mark = f"{name}={value}"
        self.process = quick_python.Popen(
            [sys.executable, *(["-m", "gradwire_command"] if program is None else [program]), *arguments],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
            env=environment(**{name: value, **(variables or {})}),
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=_END_S)
        self.wait_gone()

    def wait_gone(self) -> None:
        """Waits until no process is left that this command has started."""
        wait_until(lambda: not processes_with(self._mark), _END_S, f"the end of {processes_with(self._mark)}")

    def lines(self, count: int) -> list[str]:
        """The next lines of its output, sorted: ranks print in any order."""
        assert self.process.stdout is not None
        return sorted(self.process.stdout.readline().rstrip("\n") for _ in range(count))

    def finish(self) -> tuple[int, str, str]:
        """Waits for its end: code, the rest of its output, its errors."""
        out, err = self.process.communicate(timeout=_END_S)
        return self.process.returncode, out, err


def write_program(folder: Path, text: str, name: str = "program.py") -> str:
    """Writes a program for a command to run."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)
