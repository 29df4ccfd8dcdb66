"""`detect` tells every launcher by its variables, and says what it looked for where there is none."""

from __future__ import annotations

import socket

import pytest

from gradwire.cluster.environment import LaunchEnvironment, detect, first_host, is_here
from gradwire.errors import ConfigurationError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node1-99@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2026-task",
}
OWN = {"GRADWIRE_RANK": "0", "GRADWIRE_WORLD_SIZE": "3", "GRADWIRE_RUN_ID": "mine"}


def test_torchrun() -> None:
    found = detect(TORCHRUN)
    assert found == LaunchEnvironment(
        launcher="torchrun",
        run_id="job7",
        rank=5,
        world_size=8,
        master=("node1", 29400),
        serves_store=False,
        restart=2,
    )
    assert detect(TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}).is_one_host is True


def test_a_store_that_torchrun_does_not_serve_is_served_by_rank_0() -> None:
    assert detect(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).serves_store


def test_ranks_of_a_restarted_round_agree_on_the_topic_though_agents_count_restarts_apart() -> None:
    """An agent counts the failures of its own ranks alone."""
    assert detect(TORCHRUN).topic == detect(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0", "RANK": "1"}).topic


def test_srun() -> None:
    found = detect(SRUN)
    assert (found.launcher, found.run_id, found.rank, found.world_size) == ("srun", "4711.0", 3, 4)
    assert found.master is not None
    assert found.master[0] == "gpu003"
    assert found.is_one_host is None
    assert detect(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).is_one_host is True
    assert detect(SRUN | {"MASTER_ADDR": "ib-gpu003", "MASTER_PORT": "5000"}).master == ("ib-gpu003", 5000)


def test_two_steps_on_one_machine_get_ports_of_their_own() -> None:
    ports = {port for step in range(20) if (port := (detect(SRUN | {"SLURM_STEP_ID": str(step)}).master or ("", 0))[1])}
    assert len(ports) > 15
    assert all(20_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize("more", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}], ids=["salloc", "batch script"])
def test_an_allocation_without_srun_is_refused_with_a_hint(more: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="Slurm job 4711, but srun did not start it: put srun in front"):
        detect({"SLURM_JOB_ID": "4711", **more})


def test_mpirun_on_one_machine() -> None:
    found = detect(OPEN_MPI)
    assert (found.launcher, found.rank, found.world_size) == ("mpirun", 1, 4)
    assert (found.run_id, found.master, found.is_one_host) == ("prterun-node1-99@1", None, True)


def test_mpirun_on_several_machines_needs_the_address_of_rank_0() -> None:
    several = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigurationError, match="mpirun -x MASTER_ADDR="):
        detect(several)
    assert (detect(several | {"MASTER_ADDR": "node1"}).master or ("",))[0] == "node1"


def test_mpiexec() -> None:
    found = detect(MPICH | {"MASTER_ADDR": "node1", "MASTER_PORT": "7000"})
    assert (found.launcher, found.rank, found.world_size, found.master) == ("mpiexec", 2, 4, ("node1", 7000))
    assert detect(MPICH | {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}).run_id.startswith("parent-")


def test_skypilot() -> None:
    found = detect(SKYPILOT)
    assert (found.launcher, found.rank, found.world_size) == ("SkyPilot", 1, 2)
    assert (found.run_id, (found.master or ("",))[0]) == ("sky-2026-task", "10.0.0.4")


def test_own_variables() -> None:
    found = detect(OWN)
    assert (found.run_id, found.rank, found.world_size, found.is_one_host) == ("mine", 0, 3, True)
    assert detect(OWN | {"GRADWIRE_MASTER": "[fe80::1]:80"}).master == ("fe80::1", 80)
    with pytest.raises(ConfigurationError, match="GRADWIRE_MASTER must be host:port"):
        detect(OWN | {"GRADWIRE_MASTER": "node1"})
    with pytest.raises(ConfigurationError, match="set GRADWIRE_RUN_ID as well"):
        detect(OWN | {"GRADWIRE_RUN_ID": ""})


def test_the_more_specific_launcher_wins() -> None:
    """Launchers nest, and what they start inherits the variables of those around it."""
    around = [SKYPILOT, {"PMI_RANK": "0", "PMI_SIZE": "4"}, SRUN, OPEN_MPI, TORCHRUN, OWN]
    env = {"MASTER_ADDR": "node1"}
    found = []
    for variables in around:
        env |= variables
        found.append(detect(env).launcher)
    assert found == ["SkyPilot", "mpiexec", "srun", "mpirun", "torchrun", "GRADWIRE_RANK"]


def test_without_a_launcher_the_error_names_what_was_looked_for() -> None:
    with pytest.raises(ConfigurationError, match=r"Cluster\.from_env found no launcher") as caught:
        detect({"RANK": "0", "WORLD_SIZE": "2"})
    for name in (
        "GRADWIRE_RANK",
        "TORCHELASTIC_RUN_ID",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "SLURM_PROCID",
        "SKYPILOT",
    ):
        assert name in str(caught.value)
    assert "torchrun --standalone" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"WORLD_SIZE": ""}, "did not set WORLD_SIZE"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE must be a whole number, not 'many'"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"MASTER_ADDR": ""}, "did not set MASTER_ADDR"),
    ],
)
def test_variables_that_do_not_fit_are_named(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        detect(TORCHRUN | change)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[003-005,7],login1", "gpu003"), ("a1,a2", "a1"), ("a1", "a1"), ("r[1-2]n[04,9]", "r1n04"), ("", "")],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_is_here() -> None:
    assert is_here("127.0.0.1")
    assert is_here("localhost")
    assert is_here(socket.gethostname())
    assert not is_here("192.0.2.7")  # reserved for documentation
    assert not is_here("host.invalid")
