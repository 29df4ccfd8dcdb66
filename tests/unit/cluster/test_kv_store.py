"""Stores hold what was set, and a folder that others can write to is not used."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from gradwire.cluster.kv_store import FolderStore, KeyValueStore, TorchStore, make_private_folder
from gradwire.errors import ConfigurationError, RendezvousFailed


@pytest.fixture(params=["folder", "torch"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KeyValueStore:
    if request.param == "folder":
        return FolderStore(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, fd = listening.getsockname()[1], listening.detach()
    # libuv keeps a pipe for the rest of the process, which the leak check would find.
    server = TCPStore(
        "127.0.0.1",
        port,
        None,
        True,
        timedelta(seconds=5),
        wait_for_workers=False,
        master_listen_fd=fd,
        use_libuv=False,
    )
    return TorchStore(server, f"tcp://127.0.0.1:{port}", "prefix")


def test_what_is_set_can_be_got(store: KeyValueStore) -> None:
    assert store.get("a.1") is None
    store.set("a.1", b"\x00\xff" * 1000)
    store.set("b", b"")
    assert store.get("a.1") == b"\x00\xff" * 1000
    store.set("a.1", b"new")
    assert (store.get("a.1"), store.get("b")) == (b"new", b"")
    store.close()
    store.close()


def test_a_folder_that_is_gone_is_an_error_when_it_is_written_to(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "made")
    make_private_folder(tmp_path / "made")
    store.set("key", b"value")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["key"], "no drafts are left"
    store.remove()
    assert store.get("key") is None
    with pytest.raises(RendezvousFailed, match="cannot write to"):
        store.set("key", b"value")


def test_a_store_that_was_closed_is_an_error(tmp_path: Path) -> None:
    store = TorchStore(None, "tcp://host:1", "prefix")
    with pytest.raises(RendezvousFailed, match="the store at tcp://host:1 is no longer available"):
        store.get("key")


def test_a_private_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = make_private_folder(tmp_path / "a" / "b")
    assert folder.stat().st_mode & 0o777 == 0o700
    make_private_folder(folder)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigurationError, match=rf"is writable by other users \(mode {mode:o}\); run `chmod 700"):
        make_private_folder(tmp_path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(ConfigurationError, match="is a link or a file, not a folder"):
        make_private_folder(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        make_private_folder(tmp_path)
