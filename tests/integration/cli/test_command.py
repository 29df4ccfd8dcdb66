"""What all commands have in common, and the ones that hand over to another program."""

from __future__ import annotations

import json
import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import gradwire
from cli.commands import environment, run_command, run_fresh_command, write_program


def test_version_and_help_come_without_torch() -> None:
    """The bar is 0.3 s. Processor time is compared: on a busy machine a program takes as long as the others let it."""
    code = "import sys; sys.argv = ['gradwire', '--help']; import gradwire_command\ntry: gradwire_command.main()\n"
    code += "finally: print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "False\n")
    for command in ("run", "compat", "status", "doctor", "keys"):
        assert re.search(rf"\b{command}\b", done.stdout)
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run_fresh_command("--version")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert (done.returncode, done.stdout) == (0, f"gradwire {gradwire.__version__}\n")
    assert statistics.median(times) < 1.0


def test_python_m_gradwire_is_the_same() -> None:
    command = [sys.executable, "-m", "gradwire", "keys", "--help"]
    done = subprocess.run(command, env=environment(), timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == run_command("keys", "--help").stdout


def test_without_a_command_the_help_is_shown() -> None:
    done = run_command()
    assert done.returncode == 2
    assert "Usage: gradwire" in done.stdout + done.stderr


def test_an_unknown_command_is_wrong_usage_and_a_similar_one_is_named() -> None:
    done = run_command("stauts")
    assert done.returncode == 2
    assert "Did you mean 'status'?" in done.stderr


def test_errors_are_one_line_and_code_one(tmp_path: Path) -> None:
    done = run_command("keys", "sign", str(tmp_path / "none.csr"), "--name", "ps", "--keys", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: cannot read {tmp_path}/none.csr: No such file or directory\n"


def test_completion_is_for_the_command() -> None:
    done = run_command(_GRADWIRE_COMPLETE="complete_bash", COMP_WORDS="gradwire key", COMP_CWORD="1")
    assert done.stdout.split() == ["keys"]


def test_compat_runs_an_unmodified_program_and_passes_its_code_on(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        """
        import sys
        from torch.distributed import rpc
        print(__name__, sys.argv[1:], rpc.rpc_sync.__module__.split('.')[0])
        sys.exit(4)
        """,
    )
    done = run_command("compat", program, "--help", "-m")
    assert (done.returncode, done.stdout) == (4, "__main__ ['--help', '-m'] gradwire\n")


def test_compat_needs_a_program_that_exists() -> None:
    done = run_command("compat", "nosuch.py")
    assert done.returncode == 2
    assert "no such file: nosuch.py" in done.stderr


def test_the_doctor_starts_a_worker_and_compares_a_gradient() -> None:
    done = run_fresh_command("doctor", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["passed"]) == (0, True), done.stdout
    found = {item["name"]: item for item in report["findings"]}
    assert found["gradient"]["detail"] == "across two processes, bit-identical to one process"
    assert re.fullmatch(r"\d+ us round trip .*", found["call"]["detail"])


def test_the_doctor_fails_where_the_self_test_does(tmp_path: Path) -> None:
    """A worker that cannot start, since torch is broken, is a finding with a next step, and code 1."""
    write_program(tmp_path, "raise ImportError('torch is broken')", "torch.py")
    source = environment()["PYTHONPATH"]
    done = run_fresh_command("doctor", PYTHONPATH=f"{tmp_path}:{source}")
    assert done.returncode == 1
    assert "ImportError: torch is broken" in done.stdout
    assert "gradwire does not work here." in done.stdout
