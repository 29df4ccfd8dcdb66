"""`Cluster.from_env`: rank 0 drives, the other ranks serve and end with it, whatever way it ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import quick_python
from cluster.ranks import outside_environment, program, started
from gradwire.cluster.message_auth import write_secret
from gradwire.testing import wait_until

ADDRESSES = ("10.213.79.1", "10.213.79.2")


def test_rank_0_drives_and_the_others_end_with_it(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
assert [worker.call(whoami) for worker in cluster.workers] == [worker.pid for worker in cluster.workers]
x = torch.ones(3, requires_grad=True)
with gw.autograd.context() as context:
    y = cluster.workers[1].call(torch.mul, cluster.workers[0].call(torch.exp, x), 2).sum()
    gw.autograd.backward(context, [y])
    assert torch.equal(gw.autograd.get_gradients(context)[x], 2 * torch.exp(x.detach()))
print("says", cluster.workers[0].call(print, "hello"))
print(cluster.describe())
try:
    cluster.add_workers(1)
except gw.errors.ConfigurationError as error:
    print(f"refused: {error}")
""",
    )
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="gw") as folder:  # short: sockets go there
        with started(script, 3, fresh=(0, 1), TMPDIR=folder) as ranks:
            (code, out, err), *others = [rank.end() for rank in ranks]
        assert os.listdir(folder) == [], "files that were left"
    assert code == 0, err
    assert re.search(
        r"^gradwire: 2 workers on 1 host from GRADWIRE_RANK, run id \w+; rank 0 of 3 is the driver$", err, re.M
    )
    assert out.splitlines()[-1] == "after the block in rank 0"
    assert re.search(r"worker0.* hello$", out, re.M)
    assert "refused: GRADWIRE_RANK owns the processes of this cluster" in out
    assert len(re.findall(r"tcp://127\.0\.0\.1:\d+\?tls", out)) == len(re.findall("tcp://", out)) >= 3, (
        "others than loopback"
    )
    assert [(code, out) for code, out, _ in others] == [(0, ""), (0, "")], others


def test_ranks_fail_where_the_program_of_the_driver_fails(tmp_path: Path) -> None:
    """A launcher that starts a program again looks at exit codes, on each machine by itself."""
    script = program(tmp_path, "raise ValueError('no data')")
    report = tmp_path / "error.json"
    with started(script, 2, TORCHELASTIC_ERROR_FILE=str(report)) as (driver, worker):
        code, _, err = worker.end()
        assert (code, driver.end()[0]) == (1, 1)
    assert "rank 1 (worker0) is exiting: the program failed in rank 0: ValueError: no data" in err
    assert "ValueError: no data" in report.read_text()


@pytest.mark.slow
def test_ranks_end_when_the_driver_is_killed(tmp_path: Path) -> None:
    script = program(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    with started(script, 3) as (driver, *workers):
        assert driver.end()[0] == -9
        for worker in workers:
            code, _, err = worker.end()
            assert code == 1
            assert f"rank {worker.number} (worker{worker.number - 1}) is exiting: the driver was lost" in err


@pytest.mark.slow
def test_a_rank_that_never_arrives_is_named(tmp_path: Path) -> None:
    script = program(tmp_path, "pass")
    with started(script, 4, ranks=range(2), START_S="3") as (driver, worker):
        code, out, err = driver.end()
        assert code == 1
        assert "ranks 2, 3 never arrived" in err
        assert "after" not in out
        code, _, err = worker.end()
        assert code == 1
        assert "the driver aborted the start: ranks 2, 3 never arrived" in err


def test_ranks_meet_at_a_store_with_a_shared_secret(tmp_path: Path, free_port: int) -> None:
    script = program(tmp_path, "print(cluster.workers[0].call(whoami) == cluster.workers[0].pid)")
    master = {"GRADWIRE_MASTER": f"127.0.0.1:{free_port}"}
    secret = {"GRADWIRE_SECRET_FILE": str(write_secret(tmp_path / "secret"))}
    with started(script, 2, **master, **secret) as (driver, worker):
        code, out, err = driver.end()
        assert code == 0, err
        assert out.startswith("True")
        assert worker.end() == (0, "", "")


@pytest.mark.slow
def test_a_worker_ignores_ctrl_c_and_ends_with_its_driver(tmp_path: Path) -> None:
    """A terminal sends it to all ranks; the driver's block decides."""
    gate = tmp_path / "gate"
    script = program(tmp_path, f"open({str(gate)!r}, 'w').close()\ntime.sleep(60)")
    with started(script, 2) as (driver, worker):
        wait_until(gate.exists, 60)
        for rank in (worker, driver):
            rank.process.send_signal(2)
        assert driver.end()[0] != 0
        code, _, err = worker.end()
        assert code == 1
        assert "KeyboardInterrupt" in err.splitlines()[-1]
        assert "Traceback" not in err


PROGRAM = Path(__file__).resolve().parents[3] / "docs" / "tutorial" / "7_two_machines.py"


@contextlib.contextmanager
def torchrun_on_two_nodes(
    script: Path, port: int, num_ranks: int, *options: str, **more: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Two agents of torchrun that meet on loopback, with so many ranks each; `more` goes to the environment."""
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two-agents"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *meeting,
        f"--nproc-per-node={num_ranks}",
        *options,
        str(script),
    ]
    agents: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            agents.append(
                quick_python.Popen(
                    command,
                    env=outside_environment() | {"OMP_NUM_THREADS": "1", quick_python.NESTED: "1", **more},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield agents
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
            agent.communicate(timeout=60)


@pytest.mark.slow
def test_the_program_of_the_tutorial_runs_under_two_agents_of_torchrun(free_port: int) -> None:
    with torchrun_on_two_nodes(PROGRAM, free_port, 2) as agents:
        ended = [agent.communicate(timeout=100) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ended
    out, err = ("".join(parts) for parts in zip(*ended, strict=True))
    assert "3 workers on 1 host from torchrun, run id two-agents; rank 0 of 4 is the driver" in err
    assert re.fullmatch(r"right: (9\d|100)% of new reviews\n", out), out


@pytest.mark.slow
def test_torchrun_starts_all_ranks_again_when_the_driver_fails(tmp_path: Path, free_port: int) -> None:
    """The ranks of the other agent fail as well: if they left in good order, that agent would not come to the next round."""
    tried = tmp_path / "tried"
    script = program(
        tmp_path,
        f"""
if not os.path.exists({str(tried)!r}):
    open({str(tried)!r}, "w").close()
    raise ValueError("the first attempt")
print("second attempt:", [worker.call(max, 1, 2) for worker in cluster.workers])
""",
    )
    secret = {"GRADWIRE_SECRET_FILE": str(write_secret(tmp_path / "secret"))}  # so both rounds meet at torchrun's store
    with torchrun_on_two_nodes(script, free_port, 1, "--max-restarts=1", **secret) as agents:
        ended = [agent.communicate(timeout=110) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ended
    out, err = ("".join(parts) for parts in zip(*ended, strict=True))
    assert "second attempt: [2]" in out
    assert "ValueError: the first attempt" in err


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """Two network namespaces that reach each other: words for the front of a command that runs there."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    names = [f"gwe{os.getpid() % 100000}{letter}" for letter in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", "gw0", "netns", names[0], "type", "veth", "peer", "name", "gw0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr!r}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "gw0")
            for device in ("lo", "gw0"):
                ip("-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in names]


def listening_beyond_loopback(host: list[str]) -> list[str]:
    """TCP sockets that listen there and can be reached from other machines, as the kernel lists them."""
    lines: list[str] = []
    for table in ("tcp", "tcp6"):
        shown = subprocess.run(
            [*host, "cat", f"/proc/net/{table}"], check=True, capture_output=True, text=True, timeout=20
        )
        lines += [line.split()[1] for line in shown.stdout.splitlines()[1:] if line.split()[3] == "0A"]
    return [address for address in lines if not address.startswith(("0100007F", "00000000000000000000000001000000"))]


@pytest.mark.slow
@pytest.mark.root
def test_ranks_on_two_hosts_meet_with_a_secret_and_speak_tls(hosts: list[list[str]], tmp_path: Path) -> None:
    script = program(
        tmp_path,
        """
print(cluster.describe())
print("norm", cluster.workers[1].call(torch.ones(10_000).norm).item())
peer = cluster.workers[1].name
print("peer", cluster.workers[0].call(gw.rpc.rpc_sync, peer, whoami) == cluster.workers[1].pid)
""",
    )
    master = {"GRADWIRE_MASTER": f"{ADDRESSES[0]}:29577"}
    secret = {"GRADWIRE_SECRET_FILE": str(write_secret(tmp_path / "secret"))}
    with started(script, 3, before={0: hosts[0], 1: hosts[0], 2: hosts[1]}, **master, **secret) as ranks:
        (code, out, err), *others = [rank.end() for rank in ranks]
    assert code == 0, err
    assert "2 workers on 2 hosts from GRADWIRE_RANK" in err
    assert re.search(rf"tcp://{re.escape(ADDRESSES[1])}:\d+\?tls", out), out
    assert "norm 100.0" in out
    assert "peer True" in out
    assert [code for code, _, _ in others] == [0, 0], others


@pytest.mark.slow
@pytest.mark.root
def test_two_hosts_without_a_proof_are_refused_before_anything_listens(hosts: list[list[str]], tmp_path: Path) -> None:
    script = program(tmp_path, "pass")
    master = {"GRADWIRE_MASTER": f"{ADDRESSES[0]}:29577", "START_S": "2"}
    with started(script, 2, before=dict(enumerate(hosts)), **master) as (driver, worker):
        code, _, err = worker.end()
        assert code == 1
        assert "Give every rank the same secret (GRADWIRE_SECRET_FILE=" in err
        assert "or keys (GRADWIRE_KEYS=" in err
        for host in hosts:
            assert listening_beyond_loopback(host) == []
        code, _, err = driver.end()
        assert code == 1
        assert "rank 1 never arrived" in err


@pytest.mark.slow
@pytest.mark.root
def test_a_rank_with_another_secret_is_refused(hosts: list[list[str]], tmp_path: Path) -> None:
    script = program(tmp_path, "pass")
    master = {"GRADWIRE_MASTER": f"{ADDRESSES[0]}:29577", "START_S": "20"}
    secrets = [str(write_secret(tmp_path / name)) for name in "ab"]
    before = {rank: [*hosts[rank], "env", f"GRADWIRE_SECRET_FILE={secrets[rank]}"] for rank in range(2)}
    with started(script, 2, before=before, **master) as (driver, worker):
        code, _, err = driver.end()
        assert code == 1
        assert "a message from rank 1 cannot be trusted: it was signed with another secret" in err
        assert worker.end()[0] == 1
