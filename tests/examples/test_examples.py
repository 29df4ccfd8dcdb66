"""Every example runs as people run it, and ends with the line it promises; so does every program in the documents.

Two run at a time. Most of them do not import torch themselves (`quick_python`), and programs of documents share an
interpreter.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import quick_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SEVERAL = Path(__file__).with_name("several.py")
LAST_LINES = {
    "checkpoint.py": r"checkpoint: 12 losses are the same bit for bit: True",
    "demo.py": r"demo: 9\d\.\d% of 1,000 new images are read right",
    "embedding_table.py": r"embedding_table: 50% of new reviews were told right before, [78]\d% now",
    "end_to_end.py": r"end_to_end: same parameters as in one process, bit for bit: True",
    "exposed_only.py": r"exposed_only: prediction is right: True, refused: 3 of 3",
    "on_ray.py": r"on_ray: 30 losses fell from 0\.\d+ to 0\.\d+, as in one process: True",
    "parameter_average.py": r"parameter_average: loss fell from 0\.\d+ to 0\.0[01]\d",
    "parameter_server.py": r"parameter_server: loss fell from 0\.67 to 0\.0\d or less, with every way to share",
    "remote_calls.py": r"remote_calls: \d+ calls answered, no worker left behind",
    "sharded_mlp.py": r"sharded_mlp: 30 losses fell from 0\.\d+ to 0\.\d+, the same up to rounding",
    "split_model.py": r"split_model: 40 losses fell from 0\.976 to 0\.0\d\d, the same bit for bit",
    "survives_kills.py": r"survives_kills: 5 kills, 40 losses are the same bit for bit: True",
    "torch_style.py": r"torch_style: the sum is \[30\.0, 36\.0\], expected \[30\.0, 36\.0\]",
    "under_torchrun.py": r"under_torchrun: 2 workers, loss fell from 0\.\d+ to 0\.0\d+",
    "two_hosts_tls.py": r"two_hosts_tls: both workers ended with \[0, 0\]",
}
MORE_LINES = {
    "demo.py": [
        r"epoch 1 of 1: loss \d\.\d{3}, [\d,]+ samples/s",
        *(rf"{phase} +\d+\.\d\d +\d+\.\d\d +\d+% .*" for phase in ("forward calls", "backward", "optimizer", "other")),
        r"  float32 \d\.\de[+-]\d\d, float64 \d\.\de[+-]\d\d",  # the demo fails if these are more than next to nothing
    ]
}
LOGGED = re.compile(
    r"(gradwire: 2 workers on 1 host from torchrun, run id \S+; rank 0 of 3 is the driver\n)?"
    r"(worker worker\d is lost: killed by SIGKILL; it is being restarted, .*\n)*"
)
ARGUMENTS = {"demo.py": ["--epochs", "1"], "parameter_server.py": ["--steps", "60"]}
LAUNCHERS = {"under_torchrun.py": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]}
FRESH = ("demo.py", "on_ray.py")  # in interpreters of their own from the start; all others are forks
DEADLINE_S = 150  # each takes seconds; a busy machine may need more
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    if PROGRAM.search(path.read_text())
)


class Ran(NamedTuple):
    """A program that has ended."""

    program: Path
    code: int
    out: str
    err: str


Outcomes = dict[str, Future[dict[str, list[Ran]]]]


def run(program: Path, folder: Path, *arguments: str, **environment: str) -> Ran:
    """Runs a program in a folder of its own: it must not depend on where it is started."""
    fresh = program.name in FRESH
    popen = subprocess.Popen if fresh else quick_python.Popen
    with popen(
        [sys.executable, *LAUNCHERS.get(program.name, []), str(program), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),  # without an installed package, too
            **({} if fresh else {quick_python.NESTED: "1"}),
            **environment,
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    return Ran(program, process.returncode, out, err)


def run_example(name: str, folder: Path) -> dict[str, list[Ran]]:
    threads = {"OMP_NUM_THREADS": "1"} if name in LAUNCHERS else {}  # else torchrun says that it has set it
    ran = run(EXAMPLES / name, folder, *ARGUMENTS.get(name, []), **threads)
    assert list(folder.iterdir()) == [], "files that it has left"
    return {name: [ran]}


def run_documents(documents: list[str], folder: Path) -> dict[str, list[Ran]]:
    """In order, and those of a document in one folder, because the second may use what the first has written."""
    programs: dict[str, list[Path]] = {document: [] for document in documents}
    for document, found in programs.items():
        place = folder / document
        place.mkdir(parents=True)
        for number, text in enumerate(PROGRAM.findall((ROOT / document).read_text())):
            found.append(place / f"program{number}.py")
            found[-1].write_text(text)
    all_of_them = [str(program) for found in programs.values() for program in found]
    runner = run(SEVERAL, folder, *all_of_them)
    return {document: [_result(program, runner) for program in found] for document, found in programs.items()}


def _result(program: Path, runner: Ran) -> Ran:
    if not program.with_suffix(".code").exists():  # the end of one is that of all after it
        return runner._replace(program=program, err=f"the runner has ended: {runner.err}")
    code, out, err = (program.with_suffix(suffix).read_text() for suffix in (".code", ".out", ".err"))
    return Ran(program, int(code), out, err)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """What the tests that were asked for want to look at, in their order."""
    wanted: dict[str, list[str]] = {"example": [], "document": []}
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            for kind, name in item.callspec.params.items():
                wanted[kind].append(name)
    pool = ThreadPoolExecutor(2, "runs-programs")
    found: Outcomes = {}
    for name in wanted["example"]:
        found[name] = pool.submit(run_example, name, tmp_path_factory.mktemp("example"))
    for documents in ([name for name in wanted["document"] if _changes_torch(name) == kind] for kind in (False, True)):
        found |= dict.fromkeys(documents, pool.submit(run_documents, documents, tmp_path_factory.mktemp("documents")))
    yield found
    pool.shutdown(cancel_futures=True)


def _changes_torch(document: str) -> bool:
    """Whether its programs put gradwire in the place of parts of torch: others must not run after them."""
    return any("gradwire.compat" in text for text in PROGRAM.findall((ROOT / document).read_text()))


def test_no_example_is_left_out() -> None:
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == set(LAST_LINES)


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("example", sorted(LAST_LINES))
def test_example(example: str, outcomes: Outcomes) -> None:
    (ran,) = outcomes[example].result(2 * DEADLINE_S)[example]
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    assert re.fullmatch(LAST_LINES[example], ran.out.splitlines()[-1]), ran.out
    for line in MORE_LINES.get(example, []):
        assert re.search(rf"^{line}$", ran.out, re.MULTILINE), ran.out
    assert not set("\x1b\r") & set(ran.out), "a terminal's control characters in a pipe"
    assert LOGGED.fullmatch(ran.err), ran.err


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_programs_in_documents(document: str, outcomes: Outcomes) -> None:
    for ran in outcomes[document].result(2 * DEADLINE_S)[document]:
        assert ran.code == 0, f"{ran.program.read_text()}\n{ran.out}\n{ran.err}"
        assert LOGGED.fullmatch(ran.err), f"{ran.program.read_text()}\n{ran.err}"
