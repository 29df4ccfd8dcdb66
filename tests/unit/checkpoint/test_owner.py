"""With trust="data" others choose neither what is called nor where is written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire import checkpoint, rpc
from gradwire.checkpoint import owner
from gradwire.checkpoint.stateful import Part
from gradwire.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    DecodeError,
    NotExposed,
    RpcTimeout,
)
from gradwire.rpc import functions
from gradwire.rref import context as references
from gradwire.rref.api import create
from gradwire.testing import wait_until

MakeAgents = Callable[..., list[rpc.Agent]]


@rpc.expose(name="test_checkpoint_trust.ones")
def ones(size: int) -> torch.Tensor:
    return torch.ones(size)


@pytest.fixture
def agents(make_agents: MakeAgents) -> list[rpc.Agent]:
    return make_agents(2, trust="data")


@pytest.fixture
def reference(agents: list[rpc.Agent]) -> Iterator[rpc.RRef[torch.Tensor]]:
    """A tensor of worker b, seen from a; both trust data only."""
    a, _ = agents
    rpc.set_current_agent(a)
    yield create(references.of(a), "b", ones, (3,), None, -1.0)
    rpc.set_current_agent(None)


@pytest.fixture
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_allowed", [])


@pytest.mark.usefixtures("_nothing_allowed")
def test_only_allowed_directories_are_touched(reference: rpc.RRef[torch.Tensor], tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    with pytest.raises(
        Exception,
        match=r'trust="data": worker b does not let other workers save to or load from .*allow_directory there',
    ):
        checkpoint.save(other, {"x": reference})
    checkpoint.allow_directory(allowed)
    summary = checkpoint.save(allowed / "run", {"x": reference})
    assert [file.worker for file in summary.files] == ["b"]
    assert checkpoint.read(allowed / "run")["x"].tolist() == [1, 1, 1]
    checkpoint.load(allowed / "run", {"x": reference})
    (allowed / "way-out").symlink_to(other)
    with pytest.raises(Exception, match="does not let other workers save"):
        checkpoint.save(allowed / "way-out", {"x": reference})
    assert {path.name for path in other.iterdir()} <= {".gradwire-writer", ".gradwire-readers"}


@pytest.mark.usefixtures("_nothing_allowed")
def test_files_cannot_be_read_or_written_by_name(reference: rpc.RRef[torch.Tensor], tmp_path: Path) -> None:
    for function, args in (
        (owner.DESCRIBE, (str(tmp_path), "g0001-0123abcd", [])),
        (owner.WRITE, (str(tmp_path), "g0001-0123abcd", [])),
        (owner.CHECK, (str(tmp_path), b"{}")),
        (owner.FILL, (str(tmp_path), b"{}", [])),
    ):
        with pytest.raises(NotExposed, match="does not let other workers save to or load from"):
            rpc.rpc_sync("b", function, args=args)
    assert list(tmp_path.iterdir()) == []


# -- orders ---------------------------------------------------------------------------------------------------------------

FILE = "g0001-0123abcd-worker0.safetensors"


def tensor(file: str = FILE, offset: Any = 0, dtype: Any = "uint8", shape: Any = (1,)) -> dict[str, Any]:
    return {"file": file, "offset": offset, "dtype": dtype, "shape": shape, "checksum": "crc32:00000000"}


def order(**fields: Any) -> bytes:
    return json.dumps({"files": {}, "tensors": {}, "parts": [], "is_strict": True, **fields}).encode()


def part(state: Any, metadata: Any = None) -> dict[str, Any]:
    return {"state": state, "metadata": metadata}


@pytest.fixture
def allowed(_nothing_allowed: None, tmp_path: Path) -> Path:
    path = tmp_path / "allowed"
    path.mkdir()
    checkpoint.allow_directory(path)
    return path


@pytest.mark.parametrize(
    "name", ["../secret", "/proc/self/mem", "secret", "", f"../allowed/{FILE}", f"{FILE}\n", "index.json"]
)
def test_files_outside_of_a_checkpoint_cannot_be_named(
    reference: rpc.RRef[torch.Tensor], allowed: Path, name: str
) -> None:
    (allowed / "secret").write_bytes(b"\0")
    (allowed.parent / "secret").write_bytes(b"\0")
    named = order(tensors={"x": tensor(name)}, parts=[part({"$tensor": "x"})])
    file = {"num_bytes": 1, "header_bytes": 1, "checksum": "", "worker": "b", "host": "here"}
    sent = [owner.send(Part("x", "", reference))]
    for function, args in (
        (owner.CHECK, (str(allowed), named)),
        (owner.CHECK, (str(allowed), order(files={name: file}))),
        (owner.FILL, (str(allowed), named, sent)),
        (owner.FIT, (named, sent)),
    ):
        with pytest.raises(DecodeError, match="is not a valid checkpoint file name"):
            rpc.rpc_sync("b", function, args=args)


def test_a_pipe_holds_no_reader(reference: rpc.RRef[torch.Tensor], allowed: Path) -> None:
    os.mkfifo(allowed / FILE)
    sent = [owner.send(Part("x", "", reference))]
    entry = tensor(dtype="float32", shape=(3,))
    for function, args in (
        (owner.CHECK, (str(allowed), order(tensors={"x": entry}))),
        (owner.FILL, (str(allowed), order(tensors={"x": entry}, parts=[part({"$tensor": "x"})]), sent)),
    ):
        with pytest.raises(CheckpointDamaged, match="it is not a regular file"):
            rpc.rpc_sync("b", function, args=args, timeout=20.0)
    assert reference.to_here().tolist() == [1, 1, 1]


@contextlib.contextmanager
def few_descriptors(num_free: int) -> Iterator[None]:
    """This process can open only so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the lowest that is free
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + num_free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("num_free", "what"), [(0, "the directory .*"), (1, f".*/{FILE}")], ids=["directory", "file"])
def test_a_worker_without_free_descriptors_is_named_and_calls_no_file_damaged(
    reference: rpc.RRef[torch.Tensor], allowed: Path, num_free: int, what: str
) -> None:
    (allowed / FILE).write_bytes(b"")
    text = order(tensors={"x": tensor(dtype="float32", shape=(3,))})
    with few_descriptors(num_free), pytest.raises(CheckpointError) as caught:
        rpc.rpc_sync("b", owner.CHECK, args=(str(allowed), text), timeout=20.0)
    assert type(caught.value) is CheckpointError
    assert re.search(rf"on worker b at .*: cannot open {what}: Too many open files", str(caught.value))


def test_nothing_is_read_for_a_worker_that_has_given_up(
    reference: rpc.RRef[torch.Tensor], allowed: Path, agents: list[rpc.Agent]
) -> None:
    """A file of a terabyte takes no room on disk, and minutes to read."""
    (allowed / FILE).touch()
    os.truncate(allowed / FILE, 1 << 40)
    server = agents[1].server
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("b", owner.CHECK, args=(str(allowed), order(tensors={"x": tensor(shape=[1 << 40])})), timeout=0.3)
    wait_until(lambda: server.is_idle, 10.0, "that worker b has stopped reading")


BAD_ORDERS = [
    b"",
    b"{}",
    b"[" * 100_000,
    order(parts=3),
    order(tensors={"x": tensor(offset=-1)}),
    order(tensors={"x": tensor(offset=2**62)}),
    order(tensors={"x": tensor(offset=2**70)}),
    order(tensors={"x": tensor(dtype="object")}),
    order(tensors={"x": tensor(shape=[-1])}),
    order(tensors={"x": tensor(shape=[2**40, 2**40])}),
    order(tensors={"x": tensor(shape=[1] * 65)}),
    order(parts=[part({"$tensor": "unknown"})]),
    order(parts=[part({"$tensor": 3})]),
    order(parts=[part({"$sharded": {"dtype": "int64", "shape": [2**63], "pieces": []}})]),
    order(parts=[part({"$sharded": {"dtype": "x", "shape": [2], "pieces": []}})]),
    order(parts=[part({"$sharded": {"dtype": "int64", "shape": [2], "pieces": [["x", [0]]]}})]),
    order(
        tensors={"x": tensor()}, parts=[part({"$sharded": {"dtype": "int64", "shape": [1], "pieces": [["x", [0]]]}})]
    ),
    order(parts=[part({"$object": 3})]),
    order(parts=[part({"$dict": [[1]]})]),
    order(parts=[part({}, metadata=[1])]),
    order(parts=[part({}, metadata={"": 1})]),
]


@pytest.mark.parametrize("data", BAD_ORDERS, ids=range(len(BAD_ORDERS)))
def test_orders_of_another_form_are_refused(reference: rpc.RRef[torch.Tensor], allowed: Path, data: bytes) -> None:
    sent = [owner.send(Part("x", "", reference))]
    for function, args in ((owner.FILL, (str(allowed), data, sent)), (owner.FIT, (data, sent))):
        with pytest.raises(DecodeError, match="invalid checkpoint request"):
            rpc.rpc_sync("b", function, args=args)
    assert reference.to_here().tolist() == [1, 1, 1]


def test_directories_generations_and_parts_of_another_form_are_refused(
    reference: rpc.RRef[torch.Tensor], allowed: Path
) -> None:
    generation, sent = "g0001-0123abcd", [owner.send(Part("x", "", reference))]
    for directory in (3, None, b"/tmp", "", "a\0b"):
        with pytest.raises(DecodeError, match="is not a valid directory path"):
            rpc.rpc_sync("b", owner.WRITE, args=(directory, generation, sent))
    for wrong in (3, None, "", "../x", "g1", f"{generation}/x"):
        with pytest.raises(DecodeError, match="is not a valid checkpoint generation"):
            rpc.rpc_sync("b", owner.WRITE, args=(str(allowed), wrong, sent))
    for parts in (3, [], [3], [("x", "", 3, ())], [("x", "", reference)], [("x", 1, reference, ())], [(*sent[0], 1)]):
        for function in (owner.DESCRIBE, owner.WRITE):
            with pytest.raises(DecodeError, match="invalid parts of a checkpoint request"):
                rpc.rpc_sync("b", function, args=(str(allowed), generation, parts))
    with pytest.raises(DecodeError, match="a request to load 2 parts came with 1"):
        rpc.rpc_sync("b", owner.FIT, args=(order(parts=[part({}), part({})]), sent))
    assert list(allowed.iterdir()) == []


def test_what_does_not_fit_is_not_filled(reference: rpc.RRef[torch.Tensor], allowed: Path) -> None:
    """The worker that loads may have compared nothing; a tensor of no pieces would be as large as the order says."""
    sent = [owner.send(Part("x", "", reference))]
    huge = {"$sharded": {"dtype": "float32", "shape": [2**40], "pieces": []}}
    for state in (huge, {"$tensor": "t"}, {"w": huge}):
        data = order(tensors={"t": tensor()}, parts=[part(state)])
        with pytest.raises(CheckpointMismatch, match="nothing was changed on worker b"):
            rpc.rpc_sync("b", owner.FILL, args=(str(allowed), data, sent))
    assert reference.to_here().tolist() == [1, 1, 1]


class Counter:
    """Has a state, and exposes no method."""

    def __init__(self) -> None:
        self.number = 1

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class OpenCounter(Counter):
    state_dict = rpc.expose(lambda self: {"number": self.number}, name="test_checkpoint_trust.state_dict")

    @rpc.expose(name="test_checkpoint_trust.load_state_dict")
    def load_state_dict(self, state: Any) -> None:
        self.number = state["number"]


counters: list[Counter] = []


@rpc.expose(name="test_checkpoint_trust.count")
def count(is_open: bool) -> Counter:
    counters.append(OpenCounter() if is_open else Counter())
    return counters[-1]


def test_only_exposed_methods_of_objects_are_called(reference: rpc.RRef[torch.Tensor], allowed: Path) -> None:
    closed, opened = (create(references.here(), "b", count, (is_open,), None, -1.0) for is_open in (False, True))
    data = order(parts=[part({"number": 5})])
    with pytest.raises(NotExposed, match=r"Counter\.load_state_dict is not exposed"):
        rpc.rpc_sync("b", owner.FILL, args=(str(allowed), data, [owner.send(Part("c", "", closed))]))
    with pytest.raises(NotExposed, match=r"Counter\.state_dict is not exposed"):
        rpc.rpc_sync("b", owner.DESCRIBE, args=(str(allowed), "g0001-0123abcd", [owner.send(Part("c", "", closed))]))
    rpc.rpc_sync("b", owner.FILL, args=(str(allowed), data, [owner.send(Part("c", "", opened))]))
    assert [counter.number for counter in counters[-2:]] == [1, 5]
    huge = {"number": {"$sharded": {"dtype": "float32", "shape": [2**40], "pieces": []}}}
    with pytest.raises(CheckpointMismatch, match="some of its shards are missing"):
        rpc.rpc_sync(
            "b", owner.FILL, args=(str(allowed), order(parts=[part(huge)]), [owner.send(Part("c", "", opened))])
        )


cut: list[Path] = []


def cut_off(*_: Any) -> None:
    """Take all bytes of the files in `cut` away, as another worker that may write there can at any moment."""
    for path in cut:
        os.truncate(path, 0)


@rpc.expose(name="test_checkpoint_trust.layers")
def layers() -> torch.nn.Module:
    """Two layers; before the second one is filled, the files are cut off."""
    found = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    found[1].register_load_state_dict_pre_hook(cut_off)
    return found


def test_a_file_that_is_cut_off_while_objects_are_filled_is_an_error(
    reference: rpc.RRef[torch.Tensor], allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker lives on. It had checked the file, opened it, and read the first layer from it."""
    module = create(references.here(), "b", layers, (), None, -1.0)
    summary = checkpoint.save(allowed, {"m": module, "x": reference})
    checkpoint.load(allowed, {"m": module})
    monkeypatch.setattr(f"{__name__}.cut", [allowed / file.name for file in summary.files])
    with pytest.raises(
        CheckpointDamaged,
        match=r"on worker b at .* \(some objects may already be filled\): tensor "
        r"'m/1\.weight' in .* is damaged: the file ends too early",
    ) as caught:
        checkpoint.load(allowed, {"m": module})
    assert (caught.value.file, caught.value.tensor) == (summary.files[0].name, "m/1.weight")
    assert reference.to_here().tolist() == [1, 1, 1]


TOLD = {"kind": "tensor", "type_name": "", "state": {"$tensor": "x"}, "metadata": None}
REPORTS = [
    b"nonsense",
    order(),
    order(parts=[TOLD]),
    order(parts=[TOLD], tensors={"x": tensor("../x")}),
    order(parts=[TOLD], tensors={"x": tensor()}),  # a file of another save
]


@pytest.mark.parametrize("report", REPORTS, ids=range(len(REPORTS)))
def test_a_false_report_does_not_replace_a_checkpoint(
    reference: rpc.RRef[torch.Tensor], allowed: Path, monkeypatch: pytest.MonkeyPatch, report: bytes
) -> None:
    first = checkpoint.save(allowed, {"x": reference})
    monkeypatch.setitem(functions.exposed, owner.WRITE, lambda *_: report)
    with pytest.raises(CheckpointError, match="worker b sent an invalid report of the files it wrote"):
        checkpoint.save(allowed, {"x": reference})
    assert checkpoint.verify(allowed).generation == first.generation


@pytest.mark.parametrize("answer", [b"nonsense", b'{"fits": []}', 3])
def test_a_false_comparison_changes_nothing(
    reference: rpc.RRef[torch.Tensor], allowed: Path, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    checkpoint.save(allowed, {"x": reference})
    monkeypatch.setitem(functions.exposed, owner.FIT, lambda *_: answer)
    with pytest.raises(CheckpointError, match="worker b sent an invalid answer to the comparison"):
        checkpoint.load(allowed, {"x": reference})
