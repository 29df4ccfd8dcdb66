"""Programs that start clusters, run as people run them: in an interpreter of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import uuid
from pathlib import Path
from typing import Any

import gradwire
import quick_python
from cluster.processes import processes_with
from gradwire.testing import wait_until

_SOURCE = str(Path(gradwire.__file__).parents[1])
_END_S = 60.0
"""Ending an interpreter that has imported torch takes 0.7 s of a processor; others may want the processor, too."""


class Script:
    """A running program. Leaving the block checks that neither a process nor a file is left of it.

    Args:
        folder: Where it runs.
        text: The program; without it, an interactive interpreter is started that reads what `enter` gives it.
        fresh: Whether it and what it starts have interpreters of their own from the start; else they are forks.
        starts_fresh: Whether what it starts has, though the program itself is a fork.
        **streams: For `subprocess.Popen`.
    """

    def __init__(
        self,
        folder: Path,
        text: str | None = None,
        *,
        fresh: bool = False,
        starts_fresh: bool = False,
        **streams: Any,
    ) -> None:
        self.mark = f"TEST_MARK={uuid.uuid4().hex}"
        self.temp = Path(tempfile.mkdtemp(prefix="gwt-", dir="/tmp"))  # short: sockets have short paths
        arguments = ["-i", "-q"]
        if text is not None:
            path = folder / "program.py"
            path.write_text(textwrap.dedent(text))
            arguments = [str(path)]
        name, value = self.mark.split("=")
        environment = {**os.environ, name: value, "TMPDIR": str(self.temp), "PYTHONPATH": _SOURCE}
        popen: type[subprocess.Popen[Any]] = subprocess.Popen
        if not fresh and text is not None:
            popen, environment[quick_python.NESTED] = quick_python.Popen, "" if starts_fresh else "1"
        self.process = popen(
            [sys.executable, *arguments],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
            **({"stdin": subprocess.PIPE} if text is None else {}),
            env=environment,
            cwd=folder,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process.poll() is None:
                self.process.kill()
            self.process.communicate(timeout=_END_S)
            wait_until(lambda: not processes_with(self.mark), _END_S, f"the end of {processes_with(self.mark)}")
            wait_until(lambda: not os.listdir(self.temp), _END_S, f"the removal of {os.listdir(self.temp)}")
        finally:
            shutil.rmtree(self.temp, ignore_errors=True)

    def enter(self, cell: str) -> None:
        """Types a block of code into an interactive interpreter."""
        assert self.process.stdin is not None
        self.process.stdin.write(textwrap.dedent(cell).strip() + "\n\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def finish(self, timeout_s: float = 30.0) -> tuple[int, str, str]:
        """Waits for its end: status, the rest of its output, its errors."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err
