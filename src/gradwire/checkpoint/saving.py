"""The worker that saves: finds out who owns what, has all of them write, and then makes it the checkpoint."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import socket
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.checkpoint import _points, objects, owners
from gradwire.checkpoint._index import Index, Writer
from gradwire.checkpoint._tree import Encoder, Node, dict_node, items_of, join, object_node
from gradwire.checkpoint.asking import Parts, Round
from gradwire.checkpoint.directory import Directory, file_name
from gradwire.checkpoint.owners import WriteReport, worker_name
from gradwire.checkpoint.progress import ByteProgress, ProgressOption, WatchedFiles
from gradwire.checkpoint.writing import TensorSet
from gradwire.errors import CannotSave, CheckpointDamaged
from gradwire.optim import DistributedOptimizer, states


@dataclass(slots=True)
class _Object:
    """An object that was met, and where the reports on its parts will be."""

    path: str
    value: Any
    node: dict[str, Any]
    parts: list[tuple[str, int]] = field(default_factory=list)
    groups: Node = None


class SavePlan:
    """What there is to save, and who has it.

    Args:
        state: What the user gave.

    Raises:
        CannotSave: It is no dict, or holds a value that cannot be saved.
    """

    def __init__(self, state: Any) -> None:
        if type(state) is not dict:
            raise CannotSave(f"save needs a dict of what to save, not a {type(state).__name__}")
        self.parts = Parts()
        self.tensors = TensorSet()  # what this worker writes besides its parts
        self._objects: list[_Object] = []
        self._encoder = Encoder(self.tensors.place, self._claim)
        self.node = self._encoder.encode(state, "")

    def _claim(self, path: str, value: Any) -> Node | None:
        if not objects.is_object(value):
            return None
        found = _Object(path, value, {})
        found.parts = [self.parts.add(part) for part in objects.split(path, value)]
        if isinstance(value, DistributedOptimizer):
            packed = states.pack(value.param_groups, {})
            found.groups = self._encoder.encode(packed["param_groups"], join(path, "param_groups"))
        self._objects.append(found)
        return found.node

    def finish(self, reports: dict[str, WriteReport]) -> Node:
        """The whole state, with what the owners said about their parts.

        Args:
            reports: By worker; this one's is "".
        """
        for found in self._objects:
            told = [reports[worker].parts[number] for worker, number in found.parts]
            found.node.update(_object_node(found, told))
        return self.node


def _object_node(found: _Object, told: list[owners.PartReport]) -> Node:
    if isinstance(found.value, DistributedOptimizer):
        by_name = {key: item for report in told for key, item in (items_of(report.state) or {}).items()}
        packed = states.pack(found.value.param_groups, by_name)  # torch's form, so that it loads in one process, too
        state = {"state": {"$dict": [list(pair) for pair in packed["state"].items()]}, "param_groups": found.groups}
        return object_node(objects.OPTIMIZER, _type_name(found.value), state)
    if len(told) == 1:
        return object_node(told[0].kind, told[0].type_name, told[0].state, told[0].metadata)
    metadata = {key: item for report in told for key, item in (items_of(report.metadata) or {}).items()}
    return object_node(objects.MODULE, _type_name(found.value), _merged(told), dict_node(metadata))


def _merged(told: list[owners.PartReport]) -> Node:
    return dict_node({key: item for report in told for key, item in (items_of(report.state) or {}).items()})


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _own_version() -> str:
    try:
        return importlib.metadata.version("gradwire")
    except importlib.metadata.PackageNotFoundError:  # used from a source tree
        return "unknown"


def save_into(place: Directory, state: Any, option: ProgressOption, timeout_s: float) -> Index:
    """Saves; see `gradwire.checkpoint.save`."""
    plan, doing = SavePlan(state), f"saving to {place.path}"
    with place.writing(worker_name()) as generation:
        call = (str(place.path), generation)
        asked = Round(doing, timeout_s)
        for worker in plan.parts.elsewhere:
            asked.ask(worker, owners.DESCRIBE, *call, plan.parts.sent(worker))
        own, answers = asked.finish(lambda: owners.describe(*call, plan.parts.here))
        _points.passed("described")
        with ByteProgress("saving", option) as progress:
            progress.total = own + plan.tensors.num_bytes + sum(num_bytes for _, num_bytes in answers)
            reports = _write(place, generation, plan, progress, Round(doing, timeout_s))
        _points.passed("files-written")
        index = _make_index(generation, plan, reports)
        place.publish(index)
    return index


def _write(
    place: Directory, generation: str, plan: SavePlan, progress: ByteProgress, asked: Round
) -> dict[str, WriteReport]:
    call = (str(place.path), generation)
    watched = WatchedFiles([place.path / file_name(generation, worker) for worker in plan.parts.elsewhere])
    for worker in plan.parts.elsewhere:
        asked.ask(worker, owners.WRITE, *call, plan.parts.sent(worker))

    def on_poll() -> None:
        progress.advance(watched.num_new())

    def on_bytes(num_bytes: int) -> None:
        progress.advance(num_bytes + watched.num_new())

    own, answers = asked.finish(lambda: owners.write(*call, plan.parts.here, plan.tensors, on_bytes), on_poll)
    progress.num_bytes = progress.total
    return {"": own, **{worker: owners.decode(answer, WriteReport) for worker, answer in answers}}


def _make_index(generation: str, plan: SavePlan, reports: dict[str, WriteReport]) -> Index:
    found = list(reports.values())
    tensors = {name: entry for report in found for name, entry in report.tensors.items()}
    if len(tensors) != sum(len(report.tensors) for report in found):
        raise CheckpointDamaged("two workers wrote a tensor of the same name; this is a fault of gradwire")
    return Index(
        generation=generation,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        writer=Writer(worker_name(), socket.gethostname(), os.getpid(), _own_version(), str(torch.__version__)),
        files={name: entry for report in found for name, entry in report.files.items()},
        tensors=tensors,
        state=plan.finish(reports),
    )
