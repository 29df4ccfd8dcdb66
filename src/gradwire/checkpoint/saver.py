"""Saving: find the owners of all parts, let them write, and then publish the checkpoint.

1. everything can be saved, and the directory is seen       where each part is
2. a file of each worker                                    where each part is
3. the index, which names the files                         here; in a process group on rank 0
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import socket
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from gradwire.checkpoint import owner, stateful, tree
from gradwire.checkpoint.directory import Directory, failpoint, file_name
from gradwire.checkpoint.index import NAMES, Index, TensorEntry, Writer, check
from gradwire.checkpoint.owner import Parts, WriteReport
from gradwire.checkpoint.participants import Ranks, Workers, worker_name
from gradwire.checkpoint.progress import ByteProgress, ProgressOption, WatchedFiles
from gradwire.checkpoint.safetensors_io import TensorSet
from gradwire.errors import CannotSave, CheckpointDamaged, CheckpointError
from gradwire.optim import DistributedOptimizer, state_dict
from gradwire.optim.parameters import fold_groups
from gradwire.rref import RRef
from gradwire.shard import ShardedTensor
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.layout import Box
from gradwire.shard.worker_backend import WorkerBackend
from gradwire.versions import GRADWIRE_VERSION

Reports = dict[str, WriteReport]
"""Reports by worker; the key of this worker is ""."""

Pieces = dict[str, list[tuple[str, tuple[int, ...]]]]
"""Pieces of sharded tensors by path: their names and offsets."""


def save_into(place: Directory, state: Any, option: ProgressOption, timeout_s: float, group: Any = None) -> Index:
    """Save; see `gradwire.checkpoint.save`. Every rank of the group must call it."""
    doing = f"saving to {place.path}"
    ranks, workers = Ranks(group, doing), Workers(doing, timeout_s)
    is_first = ranks.rank == 0
    plan = ranks.each(lambda: SavePlan(state, group, is_first))
    with contextlib.ExitStack() as stack:
        generation = ranks.first(lambda: stack.enter_context(place.writing(ranks.name)))
        num_bytes = ranks.each(lambda: _describe(place, generation, plan, workers))
        failpoint("described")
        with ByteProgress("saving", option if is_first or callable(option) else False) as progress:
            progress.total = num_bytes
            reports = ranks.each(lambda: _write(place, generation, plan, workers, ranks.name, progress))
            progress.num_bytes = progress.total
        # The states of parts are not sent to other ranks: only the rank that asked for them needs them.
        bare = [WriteReport([], report.files, report.tensors) for report in reports.values()]
        written = ranks.all(lambda: (bare, plan.pieces(reports)))
        failpoint("files-written")
        return ranks.first(lambda: _publish(place, generation, plan, reports, written))


def _describe(place: Directory, generation: str, plan: SavePlan, workers: Workers) -> int:
    """Check that everything can be saved; return how many bytes will be written."""
    own, answers = workers.ask(
        plan.parts.calls(owner.DESCRIBE, lambda _: (str(place.path), generation)),
        lambda: owner.describe(place, generation, plan.parts.here, plan.claim_known),
    )
    return own + plan.tensors.num_bytes + sum(found for _, found in answers if type(found) is int)


def _write(
    place: Directory, generation: str, plan: SavePlan, workers: Workers, name: str, progress: ByteProgress
) -> Reports:
    watched = WatchedFiles([place.path / file_name(generation, worker) for worker in plan.parts.elsewhere])

    def on_bytes(num_bytes: int = 0) -> None:
        progress.advance(num_bytes + watched.num_new())

    own, answers = workers.ask(
        plan.parts.calls(owner.WRITE, lambda _: (str(place.path), generation)),
        lambda: owner.write(place, generation, plan.parts.here, plan.tensors, on_bytes, plan.claim_known, name),
        on_poll=on_bytes,
    )
    return {"": own, **{worker: _read_report(plan, worker, generation, answer) for worker, answer in answers}}


def _read_report(plan: SavePlan, worker: str, generation: str, answer: Any) -> WriteReport:
    try:
        report = owner.decode_struct(answer, WriteReport)
        if len(report.parts) != len(plan.parts.elsewhere[worker]):
            raise ValueError("it reports other parts than requested")
        if not {*report.files, *(entry.file for entry in report.tensors.values())} <= {file_name(generation, worker)}:
            raise ValueError("it reports files that are not its own")
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"worker {worker} sent an invalid report of the files it wrote: {error}") from error
    return report


def _publish(
    place: Directory,
    generation: str,
    plan: SavePlan,
    reports: Reports,
    written: list[tuple[list[WriteReport], Pieces]],
) -> Index:
    told = [report for of_rank, _ in written for report in of_rank]
    pieces: Pieces = {}
    for _, of_rank in written:
        for path, found in of_rank.items():
            pieces.setdefault(path, []).extend(found)
    tensors = {name: entry for report in told for name, entry in report.tensors.items()}
    if len(tensors) != sum(len(report.tensors) for report in told):
        raise CheckpointDamaged("two workers wrote a tensor of the same name; this is a bug in gradwire")
    index = Index(
        generation=generation,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        writer=Writer(worker_name(), socket.gethostname(), os.getpid(), GRADWIRE_VERSION, str(torch.__version__)),
        files={name: entry for report in told for name, entry in report.files.items()},
        tensors=tensors,
        state=plan.finish(reports, pieces, tensors),
    )
    try:
        check(index, "that is to be written")  # whatever others have reported: a published index must be loadable
    except CheckpointDamaged as error:
        text = (
            f"saving to {place.path} failed: the reports of the workers do not make a valid index ({error.__cause__})"
        )
        raise CheckpointError(f"{text}; the previous checkpoint is intact") from error
    place.publish(index)
    return index


# -- the plan ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sharded:
    """A sharded tensor, the offsets of its shards, and the positions of the reports on them."""

    path: str
    tensor: ShardedTensor
    node: dict[str, Any]
    shards: list[tuple[Box, tuple[str, int]]]


@dataclass(slots=True)
class _Object:
    """An object, and the positions of the reports on its parts."""

    path: str
    value: Any
    node: dict[str, Any]
    parts: list[tuple[str, int]] = field(default_factory=list)
    groups: tree.Node = None


class SavePlan:
    """The objects to save, and the workers that have them.

    With a process group, its ranks save together, and only the first one writes objects that are not sharded; without
    one, this worker asks all others. `tensors` are written by this worker besides its parts.
    """

    def __init__(self, state: Any, group: Any = None, is_first: bool = True) -> None:
        if type(state) is not dict:
            raise CannotSave(f"save needs a dict of objects, not a {type(state).__name__}")
        self.parts = Parts()
        self.tensors = TensorSet()
        self._group = group
        self._is_first = is_first
        self._objects: list[_Object] = []
        self._sharded: list[_Sharded] = []
        self._nodes: dict[int, tree.Node] = {}  # of sharded tensors in the state of objects, by their ids
        self._encoder = tree.Encoder(self.tensors.place if is_first else _place_nowhere, self._claim)
        self._node = self._encoder.encode(state, "")

    def _claim(self, path: str, value: Any) -> tree.Node | None:
        if isinstance(value, ShardedTensor):
            return self._add_sharded(path, value)
        if not stateful.is_object(value):
            return None
        found = _Object(path, value, {}, [self._add(part) for part in stateful.split(path, value)])
        if isinstance(value, DistributedOptimizer):
            packed = state_dict.pack(fold_groups(value.param_groups, value._parts), {})
            found.groups = self._encoder.encode(packed["param_groups"], tree.join(path, "param_groups"))
        self._objects.append(found)
        return found.node

    def _add(self, part: stateful.Part) -> tuple[str, int]:
        """Add a part; if it is here, also the shards in its state."""
        if isinstance(part.value, RRef) and not part.value.is_owner():
            if self._group is not None:
                raise CannotSave(
                    f"'{part.path}' is on worker {part.value.owner_name()}; ranks save only their own objects"
                )
            return self.parts.add(part)
        if isinstance(part.value, RRef):
            part = replace(part, value=part.value.local_value())
        if stateful.may_hold_shards(part):
            state = stateful.state_of(part)
            tree.Encoder(_place_nowhere, self._claim_inside).encode(state.state, part.path)
            part = replace(part, state=state)
        return self.parts.add(part) if self._is_first else ("", -1)

    def _claim_inside(self, path: str, value: Any) -> tree.Node | None:
        if isinstance(value, ShardedTensor) and id(value) not in self._nodes:
            self._nodes[id(value)] = self._add_sharded(path, value)
        return self.claim_known(path, value)

    def claim_known(self, path: str, value: Any) -> tree.Node | None:
        return self._nodes[id(value)] if isinstance(value, ShardedTensor) else None

    def _add_sharded(self, path: str, tensor: ShardedTensor) -> tree.Node:
        if isinstance(tensor._backend, GroupBackend) and tensor._backend._group is not self._group:
            raise CannotSave(
                f"'{path}' is sharded over the ranks of a process group; pass process_group=... on every rank of it"
            )
        if isinstance(tensor._backend, WorkerBackend) and self._group is not None:
            raise CannotSave(
                f"'{path}' is sharded over RPC workers, and ranks save only their own objects; save it from one "
                f"worker, to a separate directory"
            )
        shards = [
            (box, self.parts.add(stateful.Part(tree.piece_path(path, box.offsets), "", part)))
            for box, part in stateful.shards_of(tensor)
        ]
        self._sharded.append(_Sharded(path, tensor, {}, shards))
        return self._sharded[-1].node

    def pieces(self, reports: Reports) -> Pieces:
        return {
            found.path: [
                (_tensor_name(reports[worker].parts[number], worker), box.offsets)
                for box, (worker, number) in found.shards
            ]
            for found in self._sharded
        }

    def finish(self, reports: Reports, pieces: Pieces, entries: dict[str, TensorEntry]) -> tree.Node:
        """Return the node of the whole state, with the owners' reports on their parts.

        The pieces of sharded tensors, and the entries of tensors, come from all ranks.
        """
        for item in self._sharded:
            item.node.update(_sharded_node(item, pieces[item.path], entries))
        for found in self._objects:
            told = [reports[worker].parts[number] for worker, number in found.parts]
            found.node.update(_object_node(found, told, entries))
        return self._node


def _place_nowhere(path: str, tensor: torch.Tensor) -> str:
    return path


def _tensor_name(report: stateful.PartState, worker: str) -> str:
    if tree.tag_of(report.state) != "$tensor":
        raise CheckpointError(f"worker {worker or worker_name()} saved a shard that is not a tensor")
    return str(report.state["$tensor"])


def _sharded_node(
    found: _Sharded, pieces: list[tuple[str, tuple[int, ...]]], entries: dict[str, TensorEntry]
) -> tree.Node:
    num_elements = sum(math.prod(entries[name].shape) for name, _ in pieces)
    if num_elements != found.tensor.numel():
        raise CheckpointError(
            f"sharded tensor '{found.path}' has {found.tensor.numel()} elements, but {num_elements} were written; all "
            f"ranks must save the same objects under the same names"
        )
    return tree.sharded_node(NAMES[found.tensor.dtype], found.tensor.size(), pieces)


def _object_node(found: _Object, told: list[stateful.PartState], entries: dict[str, TensorEntry]) -> tree.Node:
    states = {key: item for report in told for key, item in (tree.items_of(report.state) or {}).items()}
    if isinstance(found.value, DistributedOptimizer):
        parts = found.value._parts
        joined = stateful.join_states(states, parts, entries)
        packed = state_dict.pack(fold_groups(found.value.param_groups, parts), joined)  # torch's form: loads there, too
        state = {"state": {"$dict": [list(pair) for pair in packed["state"].items()]}, "param_groups": found.groups}
        return tree.object_node("optimizer", stateful.type_name(found.value), state)
    if len(told) == 1:
        return tree.object_node(told[0].kind, told[0].type_name, told[0].state, told[0].metadata)
    metadata = {key: item for report in told for key, item in (tree.items_of(report.metadata) or {}).items()}
    return tree.object_node("module", stateful.type_name(found.value), tree.dict_node(states), tree.dict_node(metadata))
