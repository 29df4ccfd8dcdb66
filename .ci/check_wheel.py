"""Install the wheel in dist/ alone into a new environment and run the README's program. `make dist-check` runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900.0
WHERE = "import gradwire; print(gradwire.__version__, gradwire.__file__)"


def main() -> None:
    (wheel,) = (ROOT / "dist").glob("gradwire-*.whl")
    readme = (ROOT / "README.md").read_text()
    program = re.search(r"^```python\n(.*?)^```\n+^```output\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    if program is None:
        sys.exit("README.md has no Python program with its output")
    with tempfile.TemporaryDirectory(prefix="gradwire-wheel-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        run(folder, python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel))
        run(folder, python, "-m", "pip", "check")
        printed = run(folder, python, "-c", WHERE)
        if not printed.startswith(wheel.name.split("-")[1]) or folder not in printed:
            sys.exit(f"{wheel.name} is not what was imported: {printed}")
        run(folder, f"{folder}/bin/gradwire", "--version")
        Path(folder, "program.py").write_text(program[1])
        if run(folder, python, "-W", "error", "program.py", may_warn=False) != program[2]:
            sys.exit(f"the README's program should print: {program[2]}")
    print(f"{wheel.name}: installed alone, and the README's program ran")


def run(folder: str, *command: str, may_warn: bool = True) -> str:
    """Run a command in the folder, outside of this checkout, and return what it printed."""
    print("$", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    print(done.stdout + done.stderr, end="", flush=True)
    if done.returncode != 0 or (done.stderr and not may_warn):
        sys.exit(f"{Path(command[0]).name} ended with status {done.returncode}, and wrote the errors above")
    return done.stdout


if __name__ == "__main__":
    main()
