"""The door to the files of a checkpoint: what is no file of one is not reached through it, whoever names it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradwire import checkpoint
from gradwire.checkpoint.directory import INDEX_NAME, READERS_LOCK, WRITER_LOCK, Folder
from gradwire.errors import CheckpointDamaged, CheckpointError

NAME = "g0001-0123abcd-worker0.safetensors"
OTHER = "g0001-0123abcd-worker1.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    (tmp_path / "inside").mkdir()
    with Folder(tmp_path / "inside") as opened:
        yield opened


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "/etc/passwd",
        "",
        ".",
        "..",
        "secret",
        f"../inside/{NAME}",
        f"./{NAME}",
        f"{NAME}/",
        f"{NAME}\n",
        f"{NAME}\0",
        "g0001-0123abcd-../x.safetensors",
        "g0001-0123abcd-.safetensors",
        "g0001-0123abcd.begin\n",
        "g0001-0123abcd",
        "index.json/../x",
    ],
)
def test_names_that_no_file_of_a_checkpoint_has(folder: Folder, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "inside" / "secret").write_text("secret")
    (tmp_path / "inside" / NAME).write_text("mine")
    for act in (folder.open_file, folder.make_file, folder.has, folder.remove, lambda name: folder.rename(name, NAME)):
        with pytest.raises(CheckpointError, match="is not the name of a file of a checkpoint"):
            act(name)
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize("name", [NAME, INDEX_NAME, WRITER_LOCK, READERS_LOCK, "g0001-0123abcd.begin"])
def test_links_pipes_and_directories_are_no_files(folder: Folder, tmp_path: Path, name: str) -> None:
    """A pipe that nothing is written into would keep its reader for ever."""
    secret, place = tmp_path / "secret", tmp_path / "inside" / name
    secret.write_text("secret")
    for make in (lambda: place.symlink_to(secret), lambda: os.mkfifo(place), place.mkdir):
        make()
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
            with pytest.raises(OSError, match=r"regular file|symbolic links|Is a directory"):
                folder.open_file(name, flags)
        assert not folder.has(name)
        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
    assert secret.read_text() == "secret"


def test_a_link_below_the_allowed_directory_is_not_followed(tmp_path: Path) -> None:
    """Also if it is put there after the path was looked at."""
    (tmp_path / "allowed" / "run").mkdir(parents=True)
    (tmp_path / "other" / "run").mkdir(parents=True)
    with Folder(tmp_path / "allowed" / "run", tmp_path / "allowed") as opened:
        os.close(opened.make_file(NAME))
    (tmp_path / "allowed" / "way-out").symlink_to(tmp_path / "other")
    for below in ("way-out", "way-out/run"):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            Folder(tmp_path / "allowed" / below, tmp_path / "allowed")
    with pytest.raises(ValueError, match="other"):
        Folder(tmp_path / "other", tmp_path / "allowed")


def test_an_open_folder_stays_the_same_directory(folder: Folder, tmp_path: Path) -> None:
    os.close(folder.make_file(NAME))
    (tmp_path / "inside").rename(tmp_path / "moved")
    (tmp_path / "inside").mkdir()
    os.close(folder.make_file(OTHER))
    assert sorted(folder.names()) == sorted(os.listdir(tmp_path / "moved")) == [NAME, OTHER]
    assert os.listdir(tmp_path / "inside") == []


def test_nothing_is_left_open(folder: Folder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "inside" / NAME)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="regular file"):
        folder.open_file(NAME)
    with Folder(tmp_path / "inside", tmp_path) as opened:
        opened.close()
    assert set(os.listdir("/proc/self/fd")) == before


# -- a checkpoint that was written by someone else ------------------------------------------------------------------------


def saved(folder: Path) -> str:
    (file,) = checkpoint.save(folder, {"w": torch.arange(64.0)}).files
    return file.name


def test_a_link_in_the_place_of_a_file_is_damage(tmp_path: Path) -> None:
    name = saved(tmp_path / "run")
    (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    for act in (checkpoint.read, checkpoint.verify):
        with pytest.raises(CheckpointDamaged, match="cannot be opened: Too many levels of symbolic links"):
            act(tmp_path / "run")


def test_a_pipe_in_the_place_of_a_file_is_damage(tmp_path: Path) -> None:
    name = saved(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointDamaged, match="cannot be opened: it is not a regular file"):
        checkpoint.read(tmp_path)


def test_a_pipe_in_the_place_of_the_index(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX_NAME)
    with pytest.raises(CheckpointError, match=r"cannot read the index .*not a regular file"):
        checkpoint.read(tmp_path)


def test_locks_do_not_write_through_links(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / WRITER_LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"cannot make .*symbolic links"):
        saved(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "mine"
