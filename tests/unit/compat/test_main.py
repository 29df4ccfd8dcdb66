"""A program written for torch runs on gradwire unchanged, with the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quick_python
from gradwire.compat.__main__ import main

PROGRAM = Path(__file__).with_name("torch_program.py")


COMPAT = ("-m", "gradwire.compat")
WHERE = """
import sys
print(__name__, __file__, __package__, getattr(__spec__, "name", None), type(__loader__).__name__, sorted(globals()))
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
def fail(error):
    raise error
"""


def python(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program on gradwire, as a fork; those that it starts have interpreters of their own."""
    command = [sys.executable, *COMPAT, *arguments]
    return quick_python.run(command, timeout=100, cwd=cwd, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (WHERE + "fail(ValueError('on purpose'))", ("programs/program.py", "a", "-b")),
        (WHERE + "fail(KeyboardInterrupt())", ("-m", "programs.program", "a", "-b")),
        pytest.param("value = (", ("programs/program.py",), marks=pytest.mark.slow),
    ],
    ids=["script", "module", "syntax error"],
)
def test_a_program_gets_what_python_gives_it(tmp_path: Path, text: str, arguments: tuple[str, ...]) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "program.py").write_text(text)
    plain, ours = python(*arguments, cwd=tmp_path), run(*arguments, cwd=tmp_path)
    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, plain.returncode)
    assert plain.returncode != 0


AT_EXIT = """
import atexit, sys, threading
import torch.distributed.rpc as rpc

rank, others_main_ended = int(sys.argv[1]), threading.Event()

def note_end():
    others_main_ended.set()

def double(value):
    return 2 * value

def leave():
    if rank:
        rpc.rpc_sync("worker0", note_end)
    elif others_main_ended.wait(60):
        print(rpc.rpc_sync("worker1", double, args=(4,)))
    rpc.shutdown()

options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[2]}")
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
atexit.register(leave)
"""


def test_functions_of_the_program_can_be_called_while_it_exits(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(AT_EXIT)
    commands = [[sys.executable, *COMPAT, str(script), str(rank), str(tmp_path / "meeting")] for rank in range(2)]
    ranks = [
        quick_python.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    written = [rank.communicate(timeout=100) for rank in ranks]
    assert written == [("8\n", ""), ("", "")]


def test_pytest_runs_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "from torch.distributed.rpc import rpc_sync\n"
        "def test_it():\n"
        "    assert rpc_sync.__module__.startswith('gradwire.')\n"
        "    assert sys.modules['__main__'].__spec__.name == 'pytest.__main__'\n"
    )
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "test_it.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_a_rank_in_a_fresh_interpreter_is_gradwire_s(tmp_path: Path) -> None:
    done = run(str(PROGRAM), str(tmp_path / "meeting"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gradwire.compat.torch_api", "weight", "0.5"]  # 2 - 0.5 * d(2 * 3)/d2 = 2 - 0.5 * 3


CLUSTER = """
import gradwire, torch

def ask():
    import torch.distributed.rpc as rpc
    return rpc.get_worker_info().name, rpc.rpc_sync("driver", torch.add, args=(1, 1)).item()

if __name__ == "__main__":
    with gradwire.Cluster.local(1) as cluster:
        print(cluster.workers[0].call(ask))
"""


@pytest.mark.slow
def test_workers_of_a_cluster_have_torch_s_names_too(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CLUSTER)
    done = run(str(tmp_path / "program.py"))
    assert (done.stdout, done.stderr) == ("('worker0', 2)\n", "")


@pytest.mark.slow
def test_a_folder_is_run_with_its_modules(tmp_path: Path) -> None:
    text = "import sys, beside\nprint(__name__, sys.argv[1:], sys.path[0], beside.VALUE)\nsys.exit(3)\n"
    (tmp_path / "__main__.py").write_text(text)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    done = run(str(tmp_path), "a", "b")
    assert done.returncode == 3
    assert done.stdout.split() == ["__main__", "['a',", "'b']", str(tmp_path), "7"]


CHILD = """
import sys
print('torch' in sys.modules)
import gradwire, torch.distributed.rpc
print(torch.distributed.rpc.rpc_sync.__module__)
"""


def test_an_interpreter_that_imports_gradwire_before_torch_has_both(tmp_path: Path) -> None:
    """As the process does that workers of a cluster are forked from. Another ``sitecustomize`` still runs in it."""
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}], check=True)\n")
    done = python(*COMPAT, str(script), PYTHONPATH=str(tmp_path))
    assert (done.stdout.split(), done.stderr) == (["theirs", "theirs", "False", "gradwire.compat.torch_api"], "")


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("--help",), 0), (("-m",), 2), (("/no/such/script.py",), 2)])
def test_without_a_script_it_says_how_it_is_used(
    arguments: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    written = capsys.readouterr()
    assert "usage: python -m gradwire.compat" in (written.err if code else written.out)
