"""Run examples as their docstrings say, and store what they print for the gallery.

    python docs/scripts/run_examples.py                 # all
    python docs/scripts/run_examples.py demo on_ray     # some

The command is the first one in the docstring. The first line of a stored file is that command, the rest is its output.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "docs" / "examples" / "output"
DEADLINE_S = 600
_COMMAND = re.compile(r"^ +((?:python|torchrun) .*?)(?:  +#.*)?$", re.MULTILINE)


def command_of(example: Path) -> str:
    """Return the first command in the docstring of an example.

    Raises:
        ValueError: There is none.
    """
    found = _COMMAND.search(ast.get_docstring(ast.parse(example.read_text()), clean=False) or "")
    if found is None:
        raise ValueError(f"{example.name}: its docstring has no indented line that starts with python or torchrun")
    return found[1]


def run(command: str, folder: str) -> str:
    """Run a command in a folder of its own and return what it printed, without paths of this machine."""
    program, *arguments = shlex.split(command)
    start = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[program]
    arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in arguments]
    done = subprocess.run(
        [*start, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout.replace(f"{ROOT}/", "")


def main(names: list[str]) -> None:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for example in sorted((ROOT / "examples").glob("*.py")):
        if names and example.stem not in names:
            continue
        command = command_of(example)
        print(f"$ {command}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            printed = run(command, folder)
        lines = [f"$ {command}", *(line.rstrip() for line in printed.strip("\n").splitlines())]
        (OUTPUT / f"{example.stem}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(lines[-1], flush=True)


if __name__ == "__main__":
    main([name.removesuffix(".py") for name in sys.argv[1:]])
