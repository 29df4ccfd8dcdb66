"""The worker that saves: finds out who owns what, has all of them write, and then makes it the checkpoint."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import socket
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from gradwire.checkpoint.directory import failpoint
from gradwire.checkpoint import owner as owners
from gradwire.checkpoint import stateful as objects
from gradwire.checkpoint import stateful as sharded
from gradwire.checkpoint.directory import Directory, file_name
from gradwire.checkpoint.index import NAMES, Index, TensorEntry, Writer, check
from gradwire.checkpoint.owner import Parts, Round, WriteReport, worker_name
from gradwire.checkpoint.progress import ByteProgress, ProgressOption, WatchedFiles
from gradwire.checkpoint.safetensors_io import TensorSet
from gradwire.checkpoint.tree import (
    Encoder,
    Node,
    dict_node,
    items_of,
    join,
    object_node,
    piece_path,
    sharded_node,
    tag_of,
)
from gradwire.errors import CannotSave, CheckpointDamaged, CheckpointError
from gradwire.optim import DistributedOptimizer
from gradwire.optim import state_dict as states
from gradwire.optim.parameters import fold_groups
from gradwire.rref import RRef
from gradwire.shard import ShardedTensor
from gradwire.shard.group_backend import GroupEngine
from gradwire.shard.layout import Box
from gradwire.shard.worker_backend import WorkerEngine


@dataclass(slots=True)
class _Sharded:
    """A sharded tensor that was met, where its shards begin, and where the reports on them will be."""

    path: str
    tensor: ShardedTensor
    node: dict[str, Any]
    shards: list[tuple[Box, tuple[str, int]]]


Pieces = dict[str, list[tuple[str, tuple[int, ...]]]]
"""Of sharded tensors, by their paths: names of pieces, and where they begin."""


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
        group: The process group whose ranks save together; None if this worker asks all others.
        is_first: Whether what is not sharded is this rank's to write.

    Attributes:
        parts: What there is to write, and who has it.
        tensors: What this worker writes besides its parts.
        own: What is known already of the parts that are here.

    Raises:
        CannotSave: It is no dict, or holds a value that cannot be saved.
    """

    def __init__(self, state: Any, group: Any = None, is_first: bool = True) -> None:
        if type(state) is not dict:
            raise CannotSave(f"save needs a dict of what to save, not a {type(state).__name__}")
        self.parts = Parts()
        self.tensors = TensorSet()
        self.own = owners.Known({}, self._claim_known)
        self._group = group
        self._is_first = is_first
        self._objects: list[_Object] = []
        self._sharded: list[_Sharded] = []
        self._nodes: dict[int, Node] = {}  # of sharded tensors in the state of objects, by their ids
        self._encoder = Encoder(self.tensors.place if is_first else _place_nowhere, self._claim)
        self.node = self._encoder.encode(state, "")

    def _claim(self, path: str, value: Any) -> Node | None:
        if isinstance(value, ShardedTensor):
            return self._add_sharded(path, value)
        if not objects.is_object(value):
            return None
        found = _Object(path, value, {})
        for part in objects.split(path, value):
            found.parts.append(self._add(part))
        if isinstance(value, DistributedOptimizer):
            packed = states.pack(fold_groups(value.param_groups, value._parts), {})
            found.groups = self._encoder.encode(packed["param_groups"], join(path, "param_groups"))
        self._objects.append(found)
        return found.node

    def _add(self, part: objects.Part) -> tuple[str, int]:
        """Takes a part; if it is here, also the shards in its state."""
        if isinstance(part.value, RRef) and not part.value.is_owner():
            if self._group is not None:
                raise CannotSave(
                    f"'{part.path}' is on worker {part.value.owner_name()}; ranks save only what they have"
                )
            return self.parts.add(part)
        if isinstance(part.value, RRef):
            part = replace(part, value=part.value.local_value())
        where = self.parts.add(part) if self._is_first else ("", -1)
        if objects.may_hold_shards(part):
            state = objects.state_of(part)
            Encoder(_place_nowhere, self._claim_inside).encode(state.values, part.path)
            if self._is_first:
                self.own.states[where[1]] = state
        return where

    def _claim_inside(self, path: str, value: Any) -> Node | None:
        if isinstance(value, ShardedTensor) and id(value) not in self._nodes:
            self._nodes[id(value)] = self._add_sharded(path, value)
        return self._claim_known(path, value)

    def _claim_known(self, path: str, value: Any) -> Node | None:
        return self._nodes[id(value)] if isinstance(value, ShardedTensor) else None

    def _add_sharded(self, path: str, tensor: ShardedTensor) -> Node:
        if isinstance(tensor._engine, GroupEngine) and tensor._engine._group is not self._group:
            raise CannotSave(
                f"'{path}' is divided among the ranks of a process group; pass process_group=... on every rank of it"
            )
        if isinstance(tensor._engine, WorkerEngine) and self._group is not None:
            raise CannotSave(
                f"'{path}' is divided among RPC workers, and ranks save only what they have; save it from one worker, to "
                "a directory of its own"
            )
        shards = [
            (box, self.parts.add(objects.Part(piece_path(path, box.offsets), "", part)))
            for box, part in sharded.shards_of(tensor)
        ]
        node: dict[str, Any] = {}
        self._sharded.append(_Sharded(path, tensor, node, shards))
        return node

    def pieces(self, reports: dict[str, WriteReport]) -> Pieces:
        """What was written of sharded tensors.

        Args:
            reports: By worker; this one's is "".
        """
        return {
            found.path: [
                (_name_of(reports[worker].parts[number], worker), box.offsets) for box, (worker, number) in found.shards
            ]
            for found in self._sharded
        }

    def finish(self, reports: dict[str, WriteReport], pieces: Pieces, entries: dict[str, TensorEntry]) -> Node:
        """The whole state, with what the owners said about their parts.

        Args:
            reports: By worker; this one's is "".
            pieces: Of all sharded tensors, by all who have some.
            entries: Of everything that was written.

        Raises:
            CheckpointError: Pieces are missing: ranks did not save the same.
        """
        for item in self._sharded:
            item.node.update(_sharded_node(item, pieces[item.path], entries))
        for found in self._objects:
            told = [reports[worker].parts[number] for worker, number in found.parts]
            found.node.update(_object_node(found, told, entries))
        return self.node


def _name_of(report: owners.PartReport, worker: str) -> str:
    """The name of the tensor that a part was saved as."""
    if tag_of(report.state) != "$tensor":
        raise CheckpointError(f"worker {worker or worker_name()} saved a shard that is no tensor")
    return str(report.state["$tensor"])


def _place_nowhere(path: str, tensor: torch.Tensor) -> str:
    return path


def _sharded_node(found: _Sharded, pieces: list[tuple[str, tuple[int, ...]]], entries: dict[str, TensorEntry]) -> Node:
    num_elements = sum(math.prod(entries[name].shape) for name, _ in pieces)
    if num_elements != found.tensor.numel():
        raise CheckpointError(
            f"of sharded tensor '{found.path}' {num_elements} elements were written, and it has {found.tensor.numel()}; all "
            "ranks must save the same things under the same names"
        )
    return sharded_node(NAMES[found.tensor.dtype], found.tensor.size(), pieces)


def _object_node(found: _Object, told: list[owners.PartReport], entries: dict[str, TensorEntry]) -> Node:
    if isinstance(found.value, DistributedOptimizer):
        parts = found.value._parts
        by_name = {key: item for report in told for key, item in (items_of(report.state) or {}).items()}
        joined = sharded.join_states(by_name, parts, entries)
        packed = states.pack(fold_groups(found.value.param_groups, parts), joined)  # torch's form: loads there, too
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
        own, answers = asked.finish(lambda: owners.describe(place, generation, plan.parts.here, plan.own))
        failpoint("described")
        with ByteProgress("saving", option) as progress:
            sizes = [num_bytes for _, num_bytes in answers if type(num_bytes) is int]
            progress.total = own + plan.tensors.num_bytes + sum(sizes)
            reports = _write(place, generation, plan, progress, Round(doing, timeout_s))
        failpoint("files-written")
        index = make_index(generation, plan, reports, list(reports.values()), plan.pieces(reports))
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

    own, answers = asked.finish(
        lambda: owners.write(place, generation, plan.parts.here, plan.tensors, on_bytes, plan.own), on_poll
    )
    progress.num_bytes = progress.total
    return {"": own, **{worker: _read_report(plan, worker, generation, answer) for worker, answer in answers}}


def _read_report(plan: SavePlan, worker: str, generation: str, answer: Any) -> WriteReport:
    """What another worker says that it has written.

    Raises:
        CheckpointError: It cannot have written that.
    """
    try:
        report = owners.decode_struct(answer, WriteReport)
        if len(report.parts) != len(plan.parts.elsewhere[worker]):
            raise ValueError("it reports on other parts than it was asked to write")
        if not {*report.files, *(entry.file for entry in report.tensors.values())} <= {file_name(generation, worker)}:
            raise ValueError("it reports on files that are not its own")
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"worker {worker} gave no valid report on what it has written: {error}") from error
    return report


def make_index(
    generation: str, plan: SavePlan, reports: dict[str, WriteReport], found: list[WriteReport], pieces: Pieces
) -> Index:
    """The index of a save.

    Args:
        generation: Of the save.
        plan: Of this worker.
        reports: On the parts of the plan, by worker.
        found: All reports.
        pieces: Of all sharded tensors.

    Raises:
        CheckpointError: The reports do not fit together.
    """
    tensors = {name: entry for report in found for name, entry in report.tensors.items()}
    if len(tensors) != sum(len(report.tensors) for report in found):
        raise CheckpointDamaged("two workers wrote a tensor of the same name; this is a fault of gradwire")
    index = Index(
        generation=generation,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        writer=Writer(worker_name(), socket.gethostname(), os.getpid(), _own_version(), str(torch.__version__)),
        files={name: entry for report in found for name, entry in report.files.items()},
        tensors=tensors,
        state=plan.finish(reports, pieces, tensors),
    )
    check(index, "that is to be written")  # whatever others have reported: what is in its place can be loaded
    return index
