"""`gradwire run`: ranks that find each other, output, exit codes, and the end of everything it started."""

from __future__ import annotations

import os
import pty
import re
import signal
from pathlib import Path

import pytest

import gradwire
import quick_python
from cli.commands import Running, run_command, run_fresh_command, write_program
from cluster.processes import children_of
from documents import shown_in

PRINTS = """
    import os, sys
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GRADWIRE_RANK", "MASTER_ADDR")
    print(*(os.environ[name] for name in names), *sys.argv[1:])
    print("to stderr", file=sys.stderr)
    """
STARTS_ANOTHER = """
    import subprocess, sys, time
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("started")
    time.sleep(600)
    """
STUBBORN = """
    import os, signal, sys, time
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: print("ignored"))
    print("ready")
    while os.environ["RANK"] == "0" or os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(5)
    """


def test_ranks_get_their_environment_and_all_arguments(tmp_path: Path) -> None:
    program = write_program(tmp_path, PRINTS)
    done = run_command("run", "-n", "2", program, "-n", "7", "--help", "-m", "x")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        "[rank0] 0 2 0 0 127.0.0.1 -n 7 --help -m x",
        "[rank1] 1 2 1 1 127.0.0.1 -n 7 --help -m x",
    ]
    assert sorted(done.stderr.splitlines()) == ["[rank0] to stderr", "[rank1] to stderr"]


def test_a_module_is_found_as_python_finds_it(tmp_path: Path) -> None:
    write_program(tmp_path, "import sys; print(sys.argv[1:])", "mine.py")
    done = run_command("run", "-m", "mine", "--module", "-n", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[rank0] ['--module', '-n']\n")


def test_init_rpc_meets_in_every_rank(tmp_path: Path) -> None:
    """The program of the documentation, with the output that is shown there."""
    (shown,) = shown_in("docs/guides/command-line.md")
    assert shown.output is not None
    done = run_fresh_command("run", "-n", str(shown.num_ranks), write_program(tmp_path, shown.text))
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, sorted(shown.output.splitlines())), done.stderr


@pytest.mark.skipif(not hasattr(gradwire.Cluster, "from_env"), reason="this version has no Cluster.from_env")
def test_from_env_makes_a_cluster_of_the_ranks(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        """
        import torch
        import gradwire
        if __name__ == "__main__":
            with gradwire.Cluster.from_env() as cluster:
                print([worker.call(torch.add, torch.tensor(1), 1).item() for worker in cluster.workers])
        """,
    )
    done = run_command("run", "-n", "3", program, **{quick_python.NESTED: "1"})
    assert (done.returncode, done.stdout) == (0, "[rank0] [2, 2]\n"), done.stderr
    assert "2 workers on 1 host" in done.stderr


def test_a_rank_that_fails_ends_the_others_and_gives_its_code(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(600)
        """,
    )
    done = run_command("run", "-n", "3", program)
    assert done.returncode == 7
    assert "gradwire run: rank 1 exited with code 7; stopping ranks 0, 2" in done.stderr


def test_a_rank_that_a_signal_kills_gives_128_and_its_number(tmp_path: Path) -> None:
    program = write_program(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    done = run_command("run", program)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "rank 0 was killed by SIGSEGV" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_end_of_the_command_is_the_end_of_all_it_started(tmp_path: Path, how: signal.Signals) -> None:
    """SIGKILL leaves the command no time: the kernel ends the ranks, and the guard what these have started."""
    with Running("run", "-n", "2", write_program(tmp_path, STARTS_ANOTHER)) as command:
        assert command.lines(2) == ["[rank0] started", "[rank1] started"]
        command.process.send_signal(how)
        command.wait_gone()
        code, _, err = command.finish()
        assert code == (-9 if how == signal.SIGKILL else 128 + how)
        assert ("KeyboardInterrupt" in err) == (how == signal.SIGINT)


def test_ranks_end_with_the_command_even_if_the_guard_was_killed(tmp_path: Path) -> None:
    program = write_program(tmp_path, "import os, time; print(os.getpid()); time.sleep(600)")
    with Running("run", "-n", "2", program) as command:
        ranks = {int(line.split()[1]) for line in command.lines(2)}
        (guard,) = set(children_of(command.process.pid)) - ranks
        os.kill(guard, signal.SIGKILL)
        command.process.kill()
        command.wait_gone()


def test_what_a_rank_leaves_running_ends_with_it(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("done")
        """,
    )
    with Running("run", program) as command:
        assert command.finish()[:2] == (0, "[rank0] done\n")


def test_ranks_that_ignore_the_request_are_killed(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    with Running("run", "-n", "2", "--grace", "0.2", write_program(tmp_path, STUBBORN), str(flag)) as command:
        assert command.lines(2) == ["[rank0] ready", "[rank1] ready"]
        flag.unlink()
        code, _, err = command.finish()
    assert code == 5
    assert "rank 1 exited with code 5; stopping rank 0" in err
    assert "killing rank 0: still running after 0.2 s" in err


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    program = write_program(tmp_path, STUBBORN)
    with Running("run", "-n", "2", "--grace", "600", program, str(flag)) as command:
        command.lines(2)
        command.process.send_signal(signal.SIGINT)
        assert command.lines(2) == ["[rank0] ignored", "[rank1] ignored"]
        command.process.send_signal(signal.SIGINT)
        assert command.finish()[0] == 130


def test_lines_are_coloured_on_a_terminal(tmp_path: Path) -> None:
    program = write_program(tmp_path, "print('hello'); raise SystemExit(3)")
    here, there = pty.openpty()
    with Running("run", program, stdout=there, stderr=there) as command:
        os.close(there)
        assert command.process.wait(60.0) == 3
        shown = os.read(here, 1 << 16).decode()
        os.close(here)
    assert "\x1b[36m[rank0]\x1b[0m hello" in shown
    assert re.search(r"\x1b\[1;31mgradwire run:\x1b\[0m rank 0 exited with code 3", shown)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nosuch.py"], "no such file: nosuch.py"),
        ([], "Missing argument"),
        (["-n", "0", "x.py"], "-n"),
        (["-n", "two", "x.py"], "integer"),
    ],
)
def test_wrong_usage_is_two(arguments: list[str], text: str) -> None:
    done = run_command("run", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
