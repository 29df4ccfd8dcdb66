"""Programs that are forks behave as those in interpreters of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import quick_python
from gradwire.testing import wait_until

PROGRAM = """
import atexit, os, sys, threading, __main__
print(__name__, __file__, sys.argv, sys.path[:3], os.getcwd(), sorted(os.environ)[:3], os.environ["COLOUR"])
print(__main__.__dict__ is globals(), os.getsid(0) == os.getpid(), sys.stdin.read(), sys.stdout.isatty())
print(b"COLOUR=blue" in open("/proc/self/environ", "rb").read().split(b"\\0"), threading.active_count())
atexit.register(print, "at exit")
def outlive():
    threading.main_thread().join()
    print("a thread")
threading.Thread(target=outlive).start()
def end():
    END
print("to the other stream", file=sys.stderr)
end()
"""
ENDS = {
    "by itself": "pass",
    "with a code": "sys.exit(7)",
    "with a text": "sys.exit('no more')",
    "with an error": "raise ValueError('on purpose')",
    "by Ctrl-C": "raise KeyboardInterrupt",
    "at once": "sys.stdout.flush(); os._exit(3)",
    "by a signal": "sys.stdout.flush(); os.kill(os.getpid(), 9)",
}
Outcome = tuple[int, str, str]


def run(popen: type[subprocess.Popen[str]], folder: Path, *arguments: str) -> Outcome:
    environment = {**os.environ, "COLOUR": "blue", "PYTHONPATH": str(folder / "path")}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with popen(
        [sys.executable, *arguments], env=environment, cwd=folder, text=True, start_new_session=True, **streams
    ) as process:
        out, err = process.communicate("what it reads", timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("end", ENDS)
def test_a_script(tmp_path: Path, end: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("END", ENDS[end]))
    arguments = ("program.py", "a", "-b")
    assert run(quick_python.Popen, tmp_path, *arguments) == run(subprocess.Popen, tmp_path, *arguments)


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("END", "return 1"))
    arguments = ("-m", "program", "-b")
    assert run(quick_python.Popen, tmp_path, *arguments) == run(subprocess.Popen, tmp_path, *arguments)


def test_an_orphan_of_another_program_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of a process ends while a program is being forked: this process becomes its parent."""
    command = ["sh", "-c", "sleep 60 >&2 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        answer = quick_python._Source.answer

        def orphan_it(self: quick_python._Source) -> int:
            parent.kill()
            wait_until(lambda: quick_python._parents()[pid] == os.getpid(), 20.0, "that it is a child of this process")
            os.kill(pid, signal.SIGKILL)
            return answer(self)

        quick_python.prepare()
        monkeypatch.setattr(quick_python._Source, "answer", orphan_it)
        assert quick_python.run([sys.executable, "-c", "pass"], timeout=60).returncode == 0
        wait_until(lambda: pid not in quick_python._parents(), 20.0, "that the orphan is reaped")


def test_it_is_a_child_that_is_waited_for_and_has_what_was_passed() -> None:
    program = "import os, sys; os.write(int(sys.argv[1]), b'x'); print(os.getpid(), os.getppid(), flush=True); input()"
    theirs, ours = os.pipe()
    with quick_python.Popen(
        [sys.executable, "-c", program, str(ours)],
        pass_fds=[ours],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(ours)
        assert process.stdout is not None
        assert process.stdout.readline().split() == [str(process.pid), str(os.getpid())]
        assert os.read(theirs, 2) == b"x"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
    os.close(theirs)


def test_programs_of_a_program_are_its_children_and_end_as_others_do() -> None:
    inner = "import os; print(os.getppid()); raise SystemExit(5)"
    program = (
        "import os, subprocess, sys\n"
        f"done = subprocess.run([sys.executable, '-c', {inner!r}], capture_output=True, text=True)\n"
        "print(type(subprocess.Popen(['true'])).__name__, done.returncode, int(done.stdout) == os.getpid())"
    )
    environment = {**os.environ, quick_python.NESTED: "1"}
    run = quick_python.run([sys.executable, "-c", program], timeout=60, env=environment)
    assert (run.stdout, run.stderr) == ("PopenOfPrograms 5 True\n", "")


SPAWNS = """
import multiprocessing, os, sys

def work(queue):
    queue.put((__name__, os.getppid(), "torch" in sys.modules))
    sys.exit(5)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    process = spawn.Process(target=work, args=(queue,))
    process.start()
    name, parent, is_fork = queue.get()
    process.join(60)
    print(name, parent == os.getpid(), is_fork, process.exitcode)
"""


@pytest.mark.parametrize("nested", ["", "1"])
def test_processes_of_multiprocessing_in_a_program_are_its_children(tmp_path: Path, nested: str) -> None:
    (tmp_path / "program.py").write_text(SPAWNS)
    environment = {**os.environ, quick_python.NESTED: nested}
    run = quick_python.run([sys.executable, str(tmp_path / "program.py")], timeout=60, env=environment)
    assert (run.stdout, run.stderr) == (f"__mp_main__ True {bool(nested)} 5\n", "")


def test_the_source_of_a_program_ends_with_it() -> None:
    program = "import os; print(*open('/proc/self/task/%d/children' % os.getpid()).read().split(), flush=True); input()"
    with quick_python.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, quick_python.NESTED: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        (source,) = process.stdout.readline().split()
        process.kill()
        wait_until(lambda: not Path(f"/proc/{source}").exists(), 20.0)
