"""A program written for torch runs on gradwire unchanged, with the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.compat.__main__ import main

PROGRAM = Path(__file__).with_name("torch_program.py")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradwire.compat", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_ranks_in_fresh_interpreters_are_gradwire_s(tmp_path: Path) -> None:
    done = run(str(PROGRAM), str(tmp_path / "meeting"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gradwire.compat._calls", "weight", "0.5"]  # 2 - 0.5 * d(2 * 3)/d2 = 2 - 0.5 * 3


def test_the_script_sees_itself_as_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(__name__, sys.argv[1:], sys.path[0], beside.VALUE)\nsys.exit(3)\n")
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    done = run(str(script), "a", "b")
    assert done.returncode == 3
    assert done.stdout.split() == ["__main__", "['a',", "'b']", str(tmp_path), "7"]


@pytest.mark.slow
def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    script = tmp_path / "script.py"
    child = "import sys; print('torch' in sys.modules); import torch; print(torch.distributed.rpc.rpc_sync.__module__)"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)\n")
    done = run(str(script), PYTHONPATH=str(tmp_path))
    assert done.stdout.split() == ["theirs", "theirs", "False", "gradwire.compat._calls"], done.stderr


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("--help",), 0), (("/no/such/script.py",), 2)])
def test_without_a_script_it_says_how_it_is_used(
    arguments: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    written = capsys.readouterr()
    assert "usage: python -m gradwire.compat" in (written.err if code else written.out)
