"""Every example runs and ends with the line that it promises; so does every program in the documents.

What the documentation shows of an example's output is stored: it has the same lines as the run here, numbers aside.

Most of the time of a program is spent on importing torch, so programs share interpreters (`program_runner`), two of which
run at a time. Examples that start other processes themselves run in one of their own, as people start them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import quick_python
from cluster.ray_nodes import nodes_of_a_program
from documents import Shown, is_as_shown, python_in_other_blocks, shown_in

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RUNNER = Path(__file__).with_name("program_runner.py")
LAST_LINES = {
    "checkpoint.py": r"checkpoint: all 12 losses equal those of the undisturbed run, bit for bit",
    "demo.py": r"demo: 9\d\.\d% of 1,000 new images were classified correctly",
    "embedding_table.py": r"embedding_table: the accuracy on new reviews rose from 50% to [78]\d%",
    "end_to_end.py": r"end_to_end: the parameters equal those of one process, bit for bit",
    "exposed_only.py": r"exposed_only: the prediction is correct, and 3 of 3 forbidden calls were refused",
    "on_ray.py": r"on_ray: the loss fell from 0\.\d+ to 0\.\d+, as in one process",
    "parameter_average.py": r"parameter_average: the loss fell from 0\.\d+ to 0\.0[01]\d",
    "parameter_server.py": r"parameter_server: the loss fell from 0\.67 to 0\.0\d or less in every mode",
    "pipeline.py": r"pipeline: after 3 steps with each schedule, weights differ from those of one process by \d\.\de-\d\d",
    "reinforcement_learning.py": r"reinforcement_learning: the mean return rose from -\d\d\.\d to -\d\.\d in 60 updates",
    "remote_calls.py": r"remote_calls: the workers served \d+ calls and have exited",
    "sharded_mlp.py": r"sharded_mlp: the loss fell from 0\.\d+ to 0\.\d+, as in one process up to rounding",
    "split_learning.py": (
        r"split_learning: the loss fell from 0\.692 to 0\.2\d\d, all 40 losses as in one process; "
        r"3 of 3 forbidden calls were refused"
    ),
    "split_model.py": r"split_model: the loss fell from 0\.976 to 0\.0\d\d, all 40 losses equal bit for bit",
    "survives_kills.py": r"survives_kills: after 5 kills all 40 losses equal those of the undisturbed run, bit for bit",
    "torch_style.py": r"torch_style: two ranks added up the rows of a matrix: \[30\.0, 36\.0\], as expected",
    "two_hosts_tls.py": r"two_hosts_tls: both workers called each other over TLS and have exited",
    "under_torchrun.py": r"under_torchrun: the loss fell from 0\.\d+ to 0\.0\d+",
}
MORE_LINES = {
    "demo.py": [
        "look at it from another terminal: gradwire top, gradwire dashboard",
        r"epoch 1 of 1: loss \d\.\d{3}, [\d,]+ samples/s",
        *(rf"{phase} +\d+\.\d\d +\d+\.\d\d +\d+% .*" for phase in ("forward calls", "backward", "optimizer", "other")),
        r"  float32 \d\.\de[+-]\d\d, float64 \d\.\de[+-]\d\d",  # the demo fails if these are more than next to nothing
    ]
}
OUTPUTS = ROOT / "docs" / "examples" / "output"
command_of = runpy.run_path(str(ROOT / "docs" / "scripts" / "run_examples.py"))["command_of"]
GLOO = re.compile(r"^(?:\[\w+\] )?\[Gloo\].*\n", re.MULTILINE)  # printed by torch 2.8
NUMBER = re.compile(r"-?\d[\d,.]*(?:e[+-]\d+)?")
WORD = re.compile(r"(?!(?:ms|us|min|B|KiB|MiB|GiB)\b)\b[A-Za-z][A-Za-z_]+")  # without units, which depend on the number
VARIES = {  # besides numbers: parts of lines that are different in every run
    "checkpoint.py": r"(?<=: )\w+$",  # the kind of an error
    "demo.py": r"[■▄▀█]+",
    "on_ray.py": r"[━─┳╇┴]+| ",
    "pipeline.py": r"(?<=stage\d )\S+",
    "survives_kills.py": r"\w+(?= at step)",
}
UNORDERED = {"two_hosts_tls.py"}  # its processes print at the same time
LOGGED = re.compile(
    r"((\[rank0\] )?gradwire: \d workers on 1 host from (torchrun|gradwire run), run id \S+; rank 0 of \d is the driver\n)?"
    r"((\[rank\d\] )?\S+/torch/\S+ \w+Warning: .*\n(\[rank\d\] )?  .*\n)*"  # of torch.distributed.rpc and .optim
    r"(worker worker\d is lost: killed by SIGKILL; it is being restarted, .*\n)*"
)
ARGUMENTS = {"demo.py": ["--epochs", "1"]}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
TORCHRUN_IS_QUIET = {"OMP_NUM_THREADS": "1"}  # else it logs that it has set it
LAUNCHERS = {"under_torchrun.py": [*TORCHRUN, "--nproc-per-node=3"]}
ENVIRONMENTS = {"under_torchrun.py": TORCHRUN_IS_QUIET}
START_PROCESSES = {"on_ray.py", "torch_style.py", "two_hosts_tls.py", "under_torchrun.py"}
DEADLINE_S = 150  # each takes seconds; a busy machine may need more
GROUP_DEADLINE_S = 400  # of all programs that share an interpreter
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))


class Ran(NamedTuple):
    """A program that has ended."""

    program: Path
    code: int
    out: str
    err: str


PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if "_build" not in path.parts)
DOCUMENTS = [document for document in (str(path.relative_to(ROOT)) for path in PAGES) if shown_in(document)]


Outcomes = dict[str, Future[dict[str, list[Ran]]]]


def run(
    program: Path,
    folder: Path,
    *arguments: str,
    launcher: Sequence[str] = (),
    timeout_s: float = DEADLINE_S,
    **environment: str,
) -> Ran:
    """Run a program in a process of its own, and in a folder of its own: it must not depend on where it is started."""
    with quick_python.Popen(
        [sys.executable, *launcher, str(program), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": PYTHONPATH,  # without an installed package, too
            quick_python.NESTED: "1",
            **environment,
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return Ran(program, process.returncode, out, err)


def run_together(jobs: list[tuple[Path, Path, list[str]]], folder: Path) -> list[Ran]:
    """Run programs one after the other in one interpreter, each in its folder and with its arguments."""
    results = [folder / f"results{number}" for number in range(len(jobs))]
    described = [
        (str(program), str(place), str(result), arguments)
        for (program, place, arguments), result in zip(jobs, results, strict=True)
    ]
    runner = run(RUNNER, folder, json.dumps(described), timeout_s=GROUP_DEADLINE_S)
    return [_result(program, result, runner) for (program, _, _), result in zip(jobs, results, strict=True)]


def _result(program: Path, result: Path, runner: Ran) -> Ran:
    if not result.with_suffix(".code").exists():  # a program that ends the runner ends all programs after it
        return runner._replace(program=program, err=f"the runner has ended: {runner.err}")
    code, out, err = (result.with_suffix(suffix).read_text() for suffix in (".code", ".out", ".err"))
    return Ran(program, int(code), out, err)


def run_example(name: str, folder: Path) -> dict[str, list[Ran]]:
    arguments, launcher = ARGUMENTS.get(name, []), LAUNCHERS.get(name, [])
    ran = run(EXAMPLES / name, folder, *arguments, launcher=launcher, **ENVIRONMENTS.get(name, {}))
    return {name: [_without_files(ran, folder)]}


def run_examples(names: list[str], folder: Path) -> dict[str, list[Ran]]:
    folders = [folder / name for name in names]
    for place in folders:
        place.mkdir()
    jobs = [(EXAMPLES / name, place, ARGUMENTS.get(name, [])) for name, place in zip(names, folders, strict=True)]
    found = run_together(jobs, folder)
    return {name: [_without_files(ran, place)] for name, ran, place in zip(names, found, folders, strict=True)}


def _without_files(ran: Ran, folder: Path) -> Ran:
    left = sorted(path.name for path in folder.iterdir())
    return ran._replace(code=1, err=f"it has left files: {left}") if left else ran


def run_documents(documents: list[str], folder: Path) -> dict[str, list[Ran]]:
    """Those of a document in one folder and in order, as the second may use what the first has written.

    Programs that need processes of their own come last.
    """
    programs: dict[str, list[tuple[Path, Shown]]] = {document: [] for document in documents}
    for document, found in programs.items():
        place = folder / document
        place.mkdir(parents=True)
        for number, shown in enumerate(shown_in(document)):
            found.append((place / (shown.name or f"program{number}.py"), shown))
            for name, text in ((found[-1][0].name, shown.text), *shown.modules):
                (place / name).write_text(text)
    jobs: list[tuple[Path, Path, list[str]]] = [
        (program, program.parent, []) for found in programs.values() for program, shown in found if _may_share(shown)
    ]
    ran = iter(run_together(jobs, folder) if jobs else [])
    return {
        document: [next(ran) if _may_share(shown) else run_alone(program, shown) for program, shown in found]
        for document, found in programs.items()
    }


def _may_share(shown: Shown) -> bool:
    """Whether a program may run in an interpreter with others: what its modules change there would stay."""
    return not (shown.num_ranks or shown.modules)


def run_alone(program: Path, shown: Shown) -> Ran:
    """Run it with ``gradwire run`` if it has ranks.

    One that runs on torch alone is started with torchrun, which serves the store: if rank 0 does, torch's
    ``rpc.shutdown`` fails on another rank that still reads from the store when rank 0 has ended.
    """
    if not shown.num_ranks:
        return run(program, program.parent)
    if "gradwire" in shown.text:
        return run(program, program.parent, launcher=["-m", "gradwire", "run", "-n", str(shown.num_ranks)])
    return run(
        program, program.parent, launcher=[*TORCHRUN, f"--nproc-per-node={shown.num_ranks}"], **TORCHRUN_IS_QUIET
    )


def run_notebook(name: str, folder: Path) -> dict[str, list[Ran]]:
    return {
        name: [
            run(ROOT / "docs" / "scripts" / "run_tour.py", folder, str(folder / name))._replace(program=folder / name)
        ]
    }


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """What the tests that were asked for want to look at."""
    wanted: dict[str, list[str]] = {"example": [], "document": [], "notebook": []}
    for item in request.session.items:
        if item.path == request.path and "outcomes" in item.fixturenames:
            for kind, name in item.callspec.params.items():
                if name not in wanted[kind]:
                    wanted[kind].append(name)
    pool = ThreadPoolExecutor(2, "runs-programs")
    found: Outcomes = {}
    groups = (
        (run_examples, [name for name in wanted["example"] if name not in START_PROCESSES]),
        (run_documents, [name for name in wanted["document"] if not _changes_torch(name)]),
        (run_documents, [name for name in wanted["document"] if _changes_torch(name)]),
    )
    with contextlib.ExitStack() as stack:
        if "on_ray.py" in wanted["example"] or any(map(_needs_ray, wanted["document"])):
            address = stack.enter_context(nodes_of_a_program({"num_cpus": 5}))  # for two programs at a time
            stack.enter_context(pytest.MonkeyPatch.context()).setenv("RAY_ADDRESS", address)
        for function, names in groups:  # the longest first
            if names:
                found |= dict.fromkeys(names, pool.submit(function, names, tmp_path_factory.mktemp("programs")))
        for name in START_PROCESSES.intersection(wanted["example"]):
            found[name] = pool.submit(run_example, name, tmp_path_factory.mktemp("example"))
        for name in wanted["notebook"]:
            found[name] = pool.submit(run_notebook, name, tmp_path_factory.mktemp("notebook"))
        yield found
        pool.shutdown(cancel_futures=True)


def _needs_ray(document: str) -> bool:
    """Whether one of its programs would start Ray, if there were none that it can join."""
    return any("Cluster.ray(" in shown.text for shown in shown_in(document))


def _changes_torch(document: str) -> bool:
    """Whether its programs put gradwire in the place of parts of torch: others must not run after them."""
    return any("gradwire.compat" in shown.text for shown in shown_in(document) if _may_share(shown))


def test_no_example_is_left_out() -> None:
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == set(LAST_LINES)


@pytest.mark.parametrize("page", ["examples/README.md", "docs/examples/index.md"])
def test_lists_of_examples_are_complete(page: str) -> None:
    """Each has a link and a picture, which ``docs/scripts/example_pictures.py`` draws."""
    text = (ROOT / page).read_text()
    pictures = re.findall(r"images/examples/(\w+)\.svg", text)
    links = re.findall(r"\((\w+)\.py\)|^:link: programs/(\w+)$", text, re.MULTILINE)
    names = sorted(name.removesuffix(".py") for name in LAST_LINES)
    assert sorted(pictures) == sorted("".join(link) for link in links) == names
    assert sorted(path.stem for path in (ROOT / "docs/images/examples").iterdir()) == names
    assert "tour.ipynb" in text


@pytest.mark.slow
@pytest.mark.timeout(2 * GROUP_DEADLINE_S)
@pytest.mark.parametrize("example", sorted(LAST_LINES))
def test_example(example: str, outcomes: Outcomes) -> None:
    (ran,) = outcomes[example].result(2 * GROUP_DEADLINE_S)[example]
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    assert re.fullmatch(LAST_LINES[example], ran.out.splitlines()[-1]), ran.out
    for line in MORE_LINES.get(example, []):
        assert re.search(rf"^{line}$", ran.out, re.MULTILINE), ran.out
    assert not set("\x1b\r") & set(ran.out), "a terminal's control characters in a pipe"
    assert LOGGED.fullmatch(ran.err), ran.err


def test_every_example_has_a_stored_output() -> None:
    assert sorted(path.stem for path in OUTPUTS.iterdir()) == sorted(name.removesuffix(".py") for name in LAST_LINES)


@pytest.mark.slow
@pytest.mark.timeout(2 * GROUP_DEADLINE_S)
@pytest.mark.parametrize("example", sorted(LAST_LINES))
def test_stored_output_is_current(example: str, outcomes: Outcomes) -> None:
    (ran,) = outcomes[example].result(2 * GROUP_DEADLINE_S)[example]
    command, *stored = (OUTPUTS / example).with_suffix(".txt").read_text().splitlines()
    advice = f"run make docs-examples EXAMPLES={example.removesuffix('.py')}"
    assert command == f"$ {command_of(EXAMPLES / example)}", advice
    assert re.fullmatch(LAST_LINES[example], stored[-1]), advice
    varies, order = VARIES.get(example), sorted if example in UNORDERED else list
    assert order(kinds_of_lines(stored, varies)) == order(kinds_of_lines(ran.out.splitlines(), varies)), advice


def kinds_of_lines(lines: list[str], varies: str | None) -> list[str]:
    """The lines without numbers, spaces and what varies; of several in a row that are the same then, one."""
    if varies:
        lines = [re.sub(varies, "", line) for line in lines]
    kinds = ("".join(NUMBER.sub("0", line).split()) for line in lines)
    return [kind for kind, _ in itertools.groupby(filter(None, kinds))]


@pytest.mark.slow
@pytest.mark.timeout(2 * GROUP_DEADLINE_S)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_programs_in_documents(document: str, outcomes: Outcomes) -> None:
    programs = outcomes[document].result(2 * GROUP_DEADLINE_S)[document]
    for shown, ran in zip(shown_in(document), programs, strict=True):
        what = f"{shown.text}\n{ran.out}\n{ran.err}"
        if shown.traceback is None:
            assert ran.code == 0, what
            assert LOGGED.fullmatch(ran.err), what
        else:
            assert ran.code == 1, what
            assert is_as_shown("... " + " ".join(shown.traceback.split()), " ".join(["", *ran.err.split()])), what
        if shown.output is not None:
            # blank lines at the end are not seen on a page
            expected, printed = shown.output.rstrip("\n"), GLOO.sub("", ran.out).rstrip("\n")
            assert is_as_shown(expected, printed, shown.is_about, shown.is_unordered), what


@pytest.mark.parametrize("document", [str(path.relative_to(ROOT)) for path in PAGES])
def test_code_in_documents_is_run(document: str) -> None:
    assert python_in_other_blocks(document) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * GROUP_DEADLINE_S)
@pytest.mark.parametrize("notebook", ["tour.ipynb"])
def test_notebook(notebook: str, outcomes: Outcomes) -> None:
    """It prints what is stored in it; cells with the tag ``varies`` print as much, of the same kind."""
    (ran,) = outcomes[notebook].result(2 * GROUP_DEADLINE_S)[notebook]
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    stored, found = (code_cells(path) for path in (EXAMPLES / notebook, ran.program))
    for expected, cell in zip(stored, found, strict=True):
        assert printed(cell) == printed(expected), "".join(cell["source"])


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> list[tuple[str, str]]:
    """What a cell shows: pairs of a kind (a stream, or the formats of a value) and what is the same in every run."""
    shown, tags = [], cell["metadata"].get("tags", [])
    for output in cell["outputs"]:
        kind = output.get("name") or " ".join(sorted(output["data"]))
        text = "".join(output.get("text") or output["data"].get("text/plain", ""))
        if "numbers-vary" in tags:
            text = " ".join(WORD.findall(text))
        shown.append((kind, "" if "varies" in tags else text))
    return shown


def test_ctrl_c_stops_the_demo_with_a_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradwire.Cluster.local", interrupt)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:  # the latter would end pytest
        runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    assert repr(ended.value) == "SystemExit(130)"
    assert capsys.readouterr() == ("stopped\n", "")
