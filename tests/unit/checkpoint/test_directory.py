"""The directory of a checkpoint: one process saves at a time, leftovers are removed, and no other file is reached."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradwire import checkpoint
from gradwire.checkpoint.directory import INDEX_NAME, READERS_LOCK, WRITER_LOCK, Directory, Folder, check_file_name
from gradwire.errors import CheckpointBusy, CheckpointDamaged, CheckpointError, CheckpointMissing, CheckpointWriteFailed

LOCKS = {".gradwire-writer", ".gradwire-readers"}


def visible(folder: Path) -> set[str]:
    """The files of the checkpoint, and whatever else is there but locks."""
    return set(os.listdir(folder)) - LOCKS


def save(folder: Path, step: int) -> checkpoint.Summary:
    return checkpoint.save(folder, {"w": torch.full((4,), float(step)), "step": step})


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    first = save(tmp_path / "new" / "folder", 1)
    second = save(tmp_path / "new" / "folder", 2)
    assert (first.generation[:6], second.generation[:6]) == ("g0001-", "g0002-")
    assert visible(first.directory) == {INDEX_NAME, *(file.name for file in second.files)}
    assert checkpoint.read(first.directory)["step"] == 2


def test_leftovers_are_removed_and_nothing_else_is(tmp_path: Path) -> None:
    save(tmp_path, 1)
    mine = {"notes.txt", "g-mine.safetensors", "model.safetensors", "g0001-0123abcd.txt"}
    for name in ("g0009-0123abcd-worker0.safetensors", "g0009-0123abcd.begin", "g0008-0123abcd.index", *mine):
        (tmp_path / name).touch()
    summary = save(tmp_path, 2)
    assert summary.generation.startswith("g0002-")
    assert visible(tmp_path) == {INDEX_NAME, *(file.name for file in summary.files), *mine}


def test_the_second_who_saves_is_told_who_is_first(tmp_path: Path) -> None:
    with Directory(tmp_path).writing("trainer") as generation:
        assert re.fullmatch(r"g0001-[0-9a-f]{8}", generation)
        with pytest.raises(
            CheckpointBusy, match=rf"worker trainer \(process {os.getpid()} on .*\) is saving to {tmp_path}"
        ):
            save(tmp_path, 1)
    assert save(tmp_path, 2).num_tensors == 1


def test_a_lock_of_the_dead_does_not_count(tmp_path: Path) -> None:
    (tmp_path / ".gradwire-writer").write_text('{"worker": "dead", "pid": 1, "host": "gone", "since": "long ago"}')
    assert save(tmp_path, 1).num_tensors == 1
    assert "dead" not in (tmp_path / ".gradwire-writer").read_text()


def test_a_load_keeps_the_old_files_and_delays_no_save(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    with Directory(tmp_path).reading() as index:
        assert index.generation == first.generation
        second = save(tmp_path, 2)
        assert {file.name for file in first.files} < visible(tmp_path)
    third = save(tmp_path, 3)
    assert visible(tmp_path) == {INDEX_NAME, *(file.name for file in third.files)}
    assert second.generation < third.generation


def test_a_failed_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = visible(tmp_path)
    with pytest.raises(KeyError, match="oops"), Directory(tmp_path).writing("w") as generation:  # noqa: PT012
        (tmp_path / f"{generation}-w.safetensors").touch()
        raise KeyError("oops")
    assert visible(tmp_path) == before
    assert checkpoint.verify(tmp_path).num_tensors == 1


def test_a_damaged_index_is_never_a_reason_to_remove_files(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    (tmp_path / INDEX_NAME).write_text("{}")
    with pytest.raises(CheckpointDamaged, match="not complete JSON"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError), Directory(tmp_path).writing("w"):
        raise CheckpointError("stopped")
    assert {file.name for file in first.files} < visible(tmp_path)
    second = save(tmp_path, 2)  # from here on it is known again what belongs to the checkpoint
    assert visible(tmp_path) == {INDEX_NAME, *(file.name for file in second.files)}


def test_no_checkpoint_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    for call in (checkpoint.load, checkpoint.read, checkpoint.verify, checkpoint.inspect):
        with pytest.raises(CheckpointMissing, match=f"there is no checkpoint in {tmp_path}/none"):
            call(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_directory_that_cannot_be_opened_is_not_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for call in (checkpoint.load, checkpoint.read, checkpoint.verify, checkpoint.inspect):
        with pytest.raises(CheckpointError, match=r"cannot open the checkpoint directory .*/loop: Too many") as caught:
            call(tmp_path / "loop")
        assert not isinstance(caught.value, CheckpointMissing)


def test_a_place_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteFailed, match=f"cannot create {tmp_path}/file"):
        save(tmp_path / "file", 1)


def test_a_worker_that_does_not_see_the_directory_says_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "not-there"):
        with (
            pytest.raises(CheckpointWriteFailed, match=r"worker w on .* cannot see the directory .* all workers share"),
            Directory(path).open_announced("g0001-0123abcd", "w"),
        ):
            pass


@pytest.mark.parametrize(
    "name", ["../g0001-0123abcd-w.safetensors", "g0002-0123abcd-w.safetensors", "x", "g0001-0123abcd-a/b.safetensors"]
)
def test_workers_write_nothing_else_than_files_of_the_save(name: str) -> None:
    check_file_name("g0001-0123abcd-worker0.safetensors", "g0001-0123abcd")
    with pytest.raises(CheckpointError, match="does not belong to generation"):
        check_file_name(name, "g0001-0123abcd")


# -- files of a directory ----------------------------------------------------------------------------------------------


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
        with pytest.raises(CheckpointError, match="is not a valid checkpoint file name"):
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


# -- a checkpoint that another program has changed ------------------------------------------------------------------------


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
    with pytest.raises(CheckpointError, match=r"cannot create .*symbolic links"):
        saved(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "mine"
