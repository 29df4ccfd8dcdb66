"""Every example runs as people run it, and ends with the line it promises; so does every program in the documents.

They run two at a time: each of them uses one core most of the time, to import torch in one process after the other.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAST_LINES = {
    "checkpoint.py": r"checkpoint: 12 losses are the same bit for bit: True",
    "demo.py": r"demo: 9\d\.\d% of 1,000 new images are read right",
    "end_to_end.py": r"end_to_end: same parameters as in one process, bit for bit: True",
    "exposed_only.py": r"exposed_only: prediction is right: True, refused: 3 of 3",
    "parameter_average.py": r"parameter_average: loss fell from 0\.\d+ to 0\.0[01]\d",
    "parameter_server.py": r"parameter_server: loss fell from 0\.67 to 0\.0\d or less, with every way to share",
    "remote_calls.py": r"remote_calls: \d+ calls answered, no worker left behind",
    "split_model.py": r"split_model: 40 losses fell from 0\.976 to 0\.0\d\d, the same bit for bit",
    "torch_style.py": r"torch_style: the sum is \[30\.0, 36\.0\], expected \[30\.0, 36\.0\]",
    "two_hosts_tls.py": r"two_hosts_tls: both workers ended with \[0, 0\]",
}
MORE_LINES = {
    "demo.py": [
        r"epoch 1 of 1: loss \d\.\d{3}, [\d,]+ samples/s",
        *(rf"{phase} +\d+\.\d\d +\d+\.\d\d +\d+% .*" for phase in ("forward calls", "backward", "optimizer", "other")),
        r"  float32 \d\.\de[+-]\d\d, float64 \d\.\de[+-]\d\d",  # the demo fails if these are more than next to nothing
    ]
}
ARGUMENTS = {"demo.py": ["--epochs", "1"], "parameter_server.py": ["--steps", "60"]}
DEADLINE_S = 90  # each takes seconds; a busy machine may need more
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    if PROGRAM.search(path.read_text())
)


class Ran(NamedTuple):
    """A program that has ended."""

    program: Path
    done: subprocess.CompletedProcess[str]


Outcomes = dict[str, Future[list[Ran]]]


def run(program: Path, folder: Path, *arguments: str, **environment: str) -> Ran:
    """Runs a program in a folder of its own: it must not depend on where it is started."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        # Without an installed package, too; and without the warning of a torch store whose host has left first.
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TORCH_CPP_LOG_LEVEL": "ERROR", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return Ran(program, done)


def run_example(name: str, folder: Path) -> list[Ran]:
    ran = run(EXAMPLES / name, folder, *ARGUMENTS.get(name, []))
    assert list(folder.iterdir()) == [], "files that it has left"
    return [ran]


def run_document(document: str, folder: Path) -> list[Ran]:
    """In order and in one folder, because the second may use what the first has written; as a world of one worker."""
    found = []
    for number, text in enumerate(PROGRAM.findall((ROOT / document).read_text())):
        program = folder / f"program{number}.py"
        program.write_text(text)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        found.append(run(program, folder, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
    return found


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """What the tests that were asked for want to look at, in their order."""
    pool = ThreadPoolExecutor(2, "runs-programs")
    found: Outcomes = {}
    for item in request.session.items:
        params = item.callspec.params if item.path == request.path and hasattr(item, "callspec") else {}
        for kind, name in params.items():
            runner = run_example if kind == "example" else run_document
            found[name] = pool.submit(runner, name, tmp_path_factory.mktemp("program"))
    yield found
    pool.shutdown(cancel_futures=True)


def test_no_example_is_left_out() -> None:
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == set(LAST_LINES)


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(LAST_LINES))
def test_example(example: str, outcomes: Outcomes) -> None:
    ((_, done),) = outcomes[example].result(2 * DEADLINE_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.fullmatch(LAST_LINES[example], done.stdout.splitlines()[-1]), done.stdout
    for line in MORE_LINES.get(example, []):
        assert re.search(rf"^{line}$", done.stdout, re.MULTILINE), done.stdout
    assert not set("\x1b\r") & set(done.stdout), "a terminal's control characters in a pipe"
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_programs_in_documents(document: str, outcomes: Outcomes) -> None:
    for program, done in outcomes[document].result(2 * DEADLINE_S):
        assert done.returncode == 0, f"{program.read_text()}\n{done.stdout}\n{done.stderr}"
        assert done.stderr == "", program.read_text()
