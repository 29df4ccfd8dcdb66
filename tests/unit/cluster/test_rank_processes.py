"""When ranks are ended, with which code the command ends, and what a rank finds in its environment."""

from __future__ import annotations

import signal
import socket

import pytest

from gradwire.cluster.environment import detect
from gradwire.cluster.rank_processes import (
    RunState,
    Say,
    SignalRanks,
    make_environment,
    python_command,
    reserve_port,
    threads_for,
)

_FAILED = 7 << 8  # as os.waitpid gives it
_SEGFAULT = int(signal.SIGSEGV)


def test_ends_with_zero_when_all_ranks_do() -> None:
    state = RunState(2, grace_s=5.0)
    assert state.on_exited(1, 0, now=0.0) == []
    assert not state.is_over
    assert state.on_exited(0, 0, now=100.0) == []
    assert state.is_over
    assert state.exit_code is None


def test_the_first_that_fails_ends_the_others_and_gives_its_code() -> None:
    state = RunState(3, grace_s=5.0)
    say, signals = state.on_exited(1, _FAILED, now=10.0)
    assert say == Say("rank 1 exited with code 7; stopping ranks 0, 2")
    assert signals == SignalRanks((0, 2), signal.SIGTERM)
    assert state.deadline == 15.0
    assert state.on_exited(0, int(signal.SIGTERM), now=11.0) == []
    assert state.on_exited(2, 1 << 8, now=11.0) == []
    assert state.exit_code == 7


def test_a_rank_that_a_signal_killed_counts_as_failed() -> None:
    state = RunState(2, grace_s=5.0)
    say, _ = state.on_exited(0, _SEGFAULT, now=0.0)
    assert say == Say("rank 0 was killed by SIGSEGV; stopping rank 1")
    assert state.exit_code == 128 + signal.SIGSEGV


def test_a_single_rank_that_fails_is_told_without_others() -> None:
    state = RunState(1, grace_s=5.0)
    assert state.on_exited(0, _FAILED, now=0.0) == [Say("rank 0 exited with code 7")]
    assert state.is_over


def test_ranks_that_do_not_end_in_time_are_killed_once() -> None:
    state = RunState(3, grace_s=5.0)
    state.on_exited(1, _FAILED, now=10.0)
    assert state.on_time(14.9) == []
    say, signals = state.on_time(15.0)
    assert say == Say("killing ranks 0, 2: still running after 5 s")
    assert signals == SignalRanks((0, 2), signal.SIGKILL)
    assert state.on_time(1000.0) == []


def test_nothing_is_killed_as_long_as_all_is_well() -> None:
    assert RunState(3, grace_s=5.0).on_time(1e9) == []


def test_ctrl_c_is_passed_on_and_the_second_one_kills() -> None:
    state = RunState(2, grace_s=5.0)
    assert state.on_signal(signal.SIGINT, now=0.0) == [SignalRanks((0, 1), signal.SIGINT)]
    assert state.on_signal(signal.SIGINT, now=1.0) == [SignalRanks((0, 1), signal.SIGKILL)]
    state.on_exited(0, 1 << 8, now=1.0)
    assert state.exit_code == 130


def test_ctrl_c_while_ranks_are_being_ended_kills_them_and_keeps_the_code() -> None:
    state = RunState(2, grace_s=5.0)
    state.on_exited(0, _FAILED, now=0.0)
    assert state.on_signal(signal.SIGINT, now=1.0) == [SignalRanks((1,), signal.SIGKILL)]
    assert state.exit_code == 7


def test_the_environment_is_what_from_env_and_torch_look_for() -> None:
    found = make_environment(1, 4, "run1", 4711, 2, {"HOME": "/home/me", "TORCHELASTIC_RUN_ID": "outer"})
    here = detect(found)
    assert (here.rank, here.world_size, here.run_id, here.is_one_host) == (1, 4, "run1", True)
    assert here.launcher == "gradwire run"
    expected = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}
    assert expected.items() <= found.items()
    assert (found["HOME"], found["OMP_NUM_THREADS"]) == ("/home/me", "2")
    assert "TORCHELASTIC_RUN_ID" not in found


def test_what_the_user_decided_about_threads_stays() -> None:
    assert make_environment(0, 1, "run", 1, 2, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert threads_for(100_000) == 1


def test_a_module_runs_as_python_runs_it() -> None:
    assert python_command("package.module", ["-n", "1"], is_module=True)[1:] == ["-m", "package.module", "-n", "1"]


def test_the_port_is_kept_from_others_but_not_from_a_rank() -> None:
    with reserve_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()  # as rank 0 does
