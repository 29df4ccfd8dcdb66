"""Which channel ranks use, how they prove who they are, and what rank 0 makes of those that arrive."""

from __future__ import annotations

import socket
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import gradwire
from documents import is_as_shown, text_shown_in
from gradwire.cluster.environment import LaunchEnvironment
from gradwire.cluster.environment_scheduler import (
    EnvironmentScheduler,
    choose_auth,
    open_refusals,
    open_store,
    tell_refused,
)
from gradwire.cluster.kv_store import FolderStore
from gradwire.cluster.message_auth import CertificateAuth, NoAuth, SharedSecret, write_secret
from gradwire.cluster.rank_processes import reserve_port
from gradwire.cluster.store_exchange import WorkerExchange
from gradwire.errors import AuthenticationFailed, ConfigurationError, RendezvousFailed, WorkerStartFailed
from gradwire.transports.tls import keys_for, make_keys

ELSEWHERE = ("192.0.2.7", 29400)  # an address that no machine has


def environment(rank: int = 0, **more: object) -> LaunchEnvironment:
    settings = {"launcher": "torchrun", "run_id": "r", "rank": rank, "world_size": 3, "master": ELSEWHERE, **more}
    return LaunchEnvironment(**settings)  # type: ignore[arg-type]


def test_several_machines_without_a_proof_are_refused_with_both_ways() -> None:
    with pytest.raises(ConfigurationError, match="rank 0 runs on 192") as caught:
        choose_auth(environment(1), None, {})
    for way in ("GRADWIRE_SECRET_FILE=", "GRADWIRE_KEYS=", "tls=", "gradwire keys"):
        assert way in str(caught.value)
    shown = text_shown_in("docs/tutorial/7-two-machines.md", "GRADWIRE_SECRET_FILE")
    shown = shown.replace(
        "rank 2 runs on node2, but rank 0 runs on node1", "rank 1 runs on ..., but rank 0 runs on 192.0.2.7"
    )
    assert is_as_shown(shown, str(caught.value))


def test_ranks_of_one_machine_need_no_proof(tmp_path: Path) -> None:
    assert choose_auth(environment(is_one_host=True), None, {}) is None
    assert choose_auth(environment(master=("127.0.0.1", 1)), None, {}) is None
    assert choose_auth(environment(master=(socket.gethostname(), 1)), None, {}) is None


def test_keys_or_a_secret_prove_who_ranks_are(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    secret = {"GRADWIRE_SECRET_FILE": str(write_secret(tmp_path / "secret"))}
    folder = {"GRADWIRE_KEYS": str(tmp_path / "keys")}
    assert isinstance(choose_auth(environment(), None, secret), SharedSecret)
    assert isinstance(choose_auth(environment(), None, folder | secret), CertificateAuth)
    assert isinstance(choose_auth(environment(), keys_for(tmp_path / "keys"), {}), CertificateAuth)


def test_the_folder_of_one_machine_is_made_by_rank_0_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = open_store(environment(1), None, time.monotonic())
    assert isinstance(found, FolderStore)
    assert found.get("round") is None
    assert list(tmp_path.iterdir()) == []
    made = open_store(environment(0), None, time.monotonic())
    assert made.where == found.where
    assert stat.S_IMODE(Path(made.where).stat().st_mode) == 0o700
    assert open_store(environment(0, run_id="another"), None, time.monotonic()).where != made.where


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have guessed its name, and made it first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = open_store(environment(1), None, time.monotonic())
    Path(store.where).mkdir()
    Path(store.where).chmod(0o777)
    with pytest.raises(ConfigurationError, match="is writable by other users"):
        store.get("round")
    with pytest.raises(ConfigurationError, match="is writable by other users"):
        open_store(environment(0), None, time.monotonic())


def test_rank_0_that_cannot_listen_says_where() -> None:
    with pytest.raises(ConfigurationError, match=r"rank 0 cannot listen at 192\.0\.2\.7:29400: .*; set MASTER_ADDR"):
        open_store(environment(0), SharedSecret(b"s" * 32), time.monotonic() + 1)


def test_a_store_that_nothing_listens_at_is_named() -> None:
    with (
        reserve_port() as port,
        pytest.raises(RendezvousFailed, match=f"timed out waiting for the store at tcp://127.0.0.1:{port}"),
    ):
        open_store(environment(1, master=("127.0.0.1", port)), SharedSecret(b"s" * 32), time.monotonic() + 0.3)


def arrive(store: FolderStore, rank: int) -> None:
    with pytest.raises(RendezvousFailed, match="did not make this process a worker"):
        WorkerExchange(store, environment().topic, rank, NoAuth()).serve(bytes, lambda: False, time.monotonic())


@pytest.fixture
def scheduler(tmp_path: Path) -> EnvironmentScheduler:
    store = FolderStore(tmp_path)
    made = EnvironmentScheduler(environment(restart=1), store, None)
    for rank in (1, 2):
        arrive(store, rank)
    return made


def test_what_was_found_is_said_in_one_line(scheduler: EnvironmentScheduler) -> None:
    processes = scheduler.launch(2, time.monotonic() + 5)
    assert [process.place for process in processes] == ["rank 1 of torchrun", "rank 2 of torchrun"]
    assert scheduler.describe() == ("2 workers on 1 host from torchrun, run id r, restart 1; rank 0 of 3 is the driver")
    assert scheduler.bind_host() == "127.0.0.1"
    scheduler.close()


def test_more_workers_and_restarts_are_refused(scheduler: EnvironmentScheduler) -> None:
    old = scheduler.launch(2, time.monotonic() + 5)[0]
    for replaces in (None, old):
        with pytest.raises(ConfigurationError, match="torchrun owns the processes of this cluster"):
            scheduler.launch(1, time.monotonic() + 5, replaces)
    scheduler.close()


def test_a_process_is_let_go_and_not_killed(scheduler: EnvironmentScheduler) -> None:
    """A launcher takes a rank that is killed for a failure of the program. Here the rank is this process itself."""
    process = scheduler.launch(2, time.monotonic() + 5)[0]
    assert process.end_reason() is None
    process.kill()
    assert process.end_reason() == "it is managed by its launcher"
    scheduler.close()


def test_a_rank_of_another_machine_is_refused_without_a_proof(
    scheduler: EnvironmentScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may share a folder all the same, as in two network namespaces of one machine."""
    monkeypatch.setattr("gradwire.cluster.environment_scheduler.host_identity", lambda: "another")
    with pytest.raises(AuthenticationFailed, match=r"rank 1 .* is on another machine .*GRADWIRE_SECRET_FILE"):
        scheduler.launch(2, time.monotonic() + 5)
    scheduler.close()


def test_a_rank_that_refuses_ends_the_wait_of_the_driver(tmp_path: Path) -> None:
    """Through the store of torchrun, which is there before gradwire is."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False, use_libuv=False)
    world = environment(master=("127.0.0.1", server.port), serves_store=False)
    refusals = open_refusals(world, time.monotonic() + 5)
    assert refusals is not None
    driver = EnvironmentScheduler(world, FolderStore(tmp_path), None, refusals)
    tell_refused(world, "rank 2 has no secret\x1b[2J")
    begun = time.monotonic()
    with pytest.raises(ConfigurationError, match=r"^rank 2 has no secret[^\x1b]*$"):
        driver.launch(2, time.monotonic() + 30)
    assert time.monotonic() - begun < 10
    driver.close()
    driver.settle()


@pytest.mark.parametrize("more", [{"is_one_host": True}, {"serves_store": True}, {"master": None}])
def test_no_store_is_asked_for_refusals_where_the_launcher_has_none(more: dict[str, object]) -> None:
    assert open_refusals(environment(**{"serves_store": False, **more}), time.monotonic() + 5) is None


def test_ranks_that_never_arrive_may_lack_a_proof(tmp_path: Path) -> None:
    driver = EnvironmentScheduler(environment(), FolderStore(tmp_path), None)
    with pytest.raises(WorkerStartFailed, match=r"ranks 1, 2 never arrived.*other machines: .*GRADWIRE_SECRET_FILE="):
        driver.launch(2, time.monotonic())
    alone = EnvironmentScheduler(environment(is_one_host=True), FolderStore(tmp_path), None)
    with pytest.raises(WorkerStartFailed, match=r"(?m)the driver expected 2 ranks$"):
        alone.launch(2, time.monotonic())


def test_a_world_of_one_rank_has_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GRADWIRE_RANK": "0", "GRADWIRE_WORLD_SIZE": "1", "GRADWIRE_RUN_ID": "r"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigurationError, match="a single rank, which is the driver, and no workers: start at least two"
    ):
        gradwire.Cluster.from_env()
