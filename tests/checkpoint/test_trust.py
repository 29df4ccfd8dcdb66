"""With trust="data" others choose neither what is called nor where is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gradwire import checkpoint, rpc
from gradwire.checkpoint import owners
from gradwire.errors import NotExposed
from gradwire.rref import references
from gradwire.rref.api import create

MakeAgents = Callable[..., list[rpc.Agent]]


@rpc.expose(name="test_checkpoint_trust.ones")
def ones(size: int) -> torch.Tensor:
    return torch.ones(size)


@pytest.fixture
def reference(make_agents: MakeAgents) -> Iterator[rpc.RRef[torch.Tensor]]:
    """A tensor of worker b, seen from a; both trust data only."""
    a, _ = make_agents(2, trust="data")
    rpc.set_current_agent(a)
    yield create(references.of(a), "b", ones, (3,), None, -1.0)
    rpc.set_current_agent(None)


@pytest.fixture
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_allowed", [])


@pytest.mark.usefixtures("_nothing_allowed")
def test_only_allowed_directories_are_touched(reference: rpc.RRef[torch.Tensor], tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    with pytest.raises(
        Exception, match=r'trust="data": worker b lets nobody save to or load from .*allow_directory there'
    ):
        checkpoint.save(other, {"x": reference})
    checkpoint.allow_directory(allowed)
    summary = checkpoint.save(allowed / "run", {"x": reference})
    assert [file.worker for file in summary.files] == ["b"]
    assert checkpoint.read(allowed / "run")["x"].tolist() == [1, 1, 1]
    checkpoint.load(allowed / "run", {"x": reference})
    (allowed / "way-out").symlink_to(other)
    with pytest.raises(Exception, match="lets nobody save"):
        checkpoint.save(allowed / "way-out", {"x": reference})
    assert {path.name for path in other.iterdir()} <= {".gradwire-writer", ".gradwire-readers"}


@pytest.mark.usefixtures("_nothing_allowed")
def test_files_cannot_be_read_or_written_by_name(reference: rpc.RRef[torch.Tensor], tmp_path: Path) -> None:
    for function, args in (
        (owners.DESCRIBE, (str(tmp_path), "g0001-0123abcd", [])),
        (owners.WRITE, (str(tmp_path), "g0001-0123abcd", [])),
        (owners.CHECK, (str(tmp_path), b"{}")),
        (owners.FILL, (str(tmp_path), b"{}", [])),
    ):
        with pytest.raises(NotExposed, match="lets nobody save to or load from"):
            rpc.rpc_sync("b", function, args=args)
    assert list(tmp_path.iterdir()) == []
