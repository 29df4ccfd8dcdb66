"""The directory of a checkpoint: one saves at a time, leftovers go, nothing else does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from gradwire import checkpoint
from gradwire.checkpoint.directory import INDEX_NAME, Directory, check_file_name
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


def test_whoever_loads_keeps_the_old_files_and_delays_nobody(tmp_path: Path) -> None:
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
    with pytest.raises(CheckpointDamaged, match="not a whole JSON file"):
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


def test_a_place_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteFailed, match=f"cannot make {tmp_path}/file"):
        save(tmp_path / "file", 1)


def test_a_worker_that_does_not_see_the_directory_says_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "not-there"):
        with (
            pytest.raises(
                CheckpointWriteFailed, match=r"worker w on .* does not see the directory .* all workers share"
            ),
            Directory(path).announced("g0001-0123abcd", "w"),
        ):
            pass


@pytest.mark.parametrize(
    "name", ["../g0001-0123abcd-w.safetensors", "g0002-0123abcd-w.safetensors", "x", "g0001-0123abcd-a/b.safetensors"]
)
def test_workers_write_nothing_else_than_files_of_the_save(name: str) -> None:
    check_file_name("g0001-0123abcd-worker0.safetensors", "g0001-0123abcd")
    with pytest.raises(CheckpointError, match="is not the name of a file"):
        check_file_name(name, "g0001-0123abcd")
