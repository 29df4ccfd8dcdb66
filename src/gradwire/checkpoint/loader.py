"""The worker that loads: finds what is wanted in the checkpoint, has everything compared, and only then has it filled.

1. what is wanted is there, and of the right kind           here
2. names, shapes and dtypes fit                             where each part is
3. files are there and have the bytes that were written     where each part is
4. everything is filled                                     where each part is

Up to the end of the third step nothing is changed anywhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch

from gradwire.checkpoint import owner as owners
from gradwire.checkpoint import stateful as objects
from gradwire.checkpoint import stateful as sharded
from gradwire.checkpoint.directory import Directory
from gradwire.checkpoint.index import Index, TensorEntry
from gradwire.checkpoint.owner import CheckOrder, FitReport, LoadOrder, Parts, Round, SavedPart, groups_of
from gradwire.checkpoint.progress import ByteProgress, ProgressOption
from gradwire.checkpoint.safetensors_io import TensorReader, files_of
from gradwire.checkpoint.stateful import Fit, Part
from gradwire.checkpoint.tree import Node, decode, dict_node, items_of, join, region_of, tag_of, tensor_names
from gradwire.errors import CheckpointError, CheckpointMismatch, ConfigurationError
from gradwire.optim import DistributedOptimizer
from gradwire.optim import state_dict as states
from gradwire.optim.parameters import fold_groups
from gradwire.shard import ShardedTensor

_GROUP_BYTES: Final = 256 << 20  # what is checked in one call; progress is known that finely
NOTHING: Final = object()
_MAX_SHOWN: Final = 20


@dataclass(slots=True)
class _Target:
    """An object that is to be filled, and where the reports on its parts will be."""

    path: str
    value: Any
    node: Node
    parts: list[tuple[str, int]] = field(default_factory=list)
    sharded: list[str] = field(default_factory=list)  # keys of sharded tensors, whose shards are parts of their own


class LoadPlan:
    """What is wanted, and what of the checkpoint it gets.

    Args:
        index: Of the checkpoint.
        wanted: What the user gave: objects and tensors to fill, in dicts, lists and tuples as they were saved.
        is_strict: Whether everything that is wanted must be there.

    Attributes:
        problems: Why it cannot be loaded, one line each.
        values: The node of everything that is a value and not filled into something.
    """

    def __init__(self, index: Index, wanted: Any, is_strict: bool) -> None:
        self.index = index
        self.is_strict = is_strict
        self.problems: list[str] = []
        self.parts = Parts()
        self._saved: dict[str, list[SavedPart]] = {}
        self._targets: list[_Target] = []
        self._walk(wanted, index.state, "")
        self.values = _values(index.state, wanted)

    def _walk(self, wanted: Any, node: Node, path: str) -> None:
        if isinstance(wanted, torch.Tensor) or objects.is_object(wanted):
            self._add(wanted, node, path)
        elif isinstance(wanted, dict):
            self._walk_dict(wanted, items_of(node), path)
        elif isinstance(wanted, list | tuple):
            saved = node if isinstance(node, list) else node.get("$tuple") if isinstance(node, dict) else None
            if saved is None or len(saved) != len(wanted):
                self.problems.append(f"'{path}' was not saved as {len(wanted)} items")
                return
            for number, (item, below) in enumerate(zip(wanted, saved, strict=True)):
                self._walk(item, below, join(path, number))
        elif tag_of(node) == "$object":
            self.problems.append(f"'{path}' was saved as a {node['$object']['kind']}; give one that is to be filled")

    def _walk_dict(self, wanted: dict[Any, Any], saved: dict[Any, Node] | None, path: str) -> None:
        if saved is None:
            self.problems.append(f"'{path}' was not saved as a dict")
            return
        for key, item in wanted.items():
            if key in saved:
                self._walk(item, saved[key], join(path, key))
            elif self.is_strict:
                known = ", ".join(f"'{name}'" for name in saved)
                self.problems.append(f"'{join(path, key)}' is not in the checkpoint; there are {known}")

    def _add(self, value: Any, node: Node, path: str) -> None:
        body = node["$object"] if tag_of(node) == "$object" else {"state": node, "metadata": None}
        target = _Target(path, value, body["state"])
        self._targets.append(target)
        if isinstance(value, ShardedTensor):
            self._add_shards(target, value, target.node, path)
            return
        metadata = decode(body.get("metadata"), _placeholder)
        if metadata is not None and not _are_versions(metadata):
            self.problems.append(f"'{path}' was saved with versions of modules that are none")
            return
        by_name = self._optimizer_state(target) if isinstance(value, DistributedOptimizer) else None
        for part in objects.split(path, value):
            state = body["state"]
            if by_name is not None:
                state = dict_node({name: by_name[name] for name in part.names if name in by_name})
            elif part.prefix and (saved := items_of(state)) is not None:
                state = dict_node({key: item for key, item in saved.items() if key.startswith(part.prefix)})
            worker, number = self._add_part(target, part, state, metadata)
            if not worker:
                self._add_sharded_state(target, self.parts.here[number])

    def _add_part(self, target: _Target, part: Part, state: Node, metadata: Any = None) -> tuple[str, int]:
        worker, number = self.parts.add(part)
        self._saved.setdefault(worker, []).append(SavedPart(state, metadata))
        target.parts.append((worker, number))
        return worker, number

    def _add_sharded_state(self, target: _Target, part: Part) -> None:
        """The shards of sharded tensors in a module."""
        saved = items_of(target.node) or {}
        for key, tensor in objects.sharded_state(part).items():
            where = join(target.path, key)
            if key in saved:
                target.sharded.append(key)
                self._add_shards(target, tensor, saved[key], where)
            elif self.is_strict:
                self.problems.append(f"'{where}' is wanted and not in the checkpoint")

    def _add_shards(self, target: _Target, tensor: ShardedTensor, node: Node, where: str) -> None:
        """Each shard gets what it has in common with what was saved."""
        entries = self.index.tensors
        problem = objects.compare(where, tensor, node, entries, self.is_strict)
        if problem:
            self.problems.append(problem)
            return
        for box, part in sharded.shards_of(tensor):
            self._add_part(target, Part(where, "", part), region_of(node, box, entries))

    def _optimizer_state(self, target: _Target) -> dict[str, Node]:
        saved = items_of(target.node) or {}
        try:
            groups = decode(saved["param_groups"], _placeholder)
            own = fold_groups(target.value.param_groups, target.value._parts)
            found, _ = states.unpack({"state": items_of(saved["state"]), "param_groups": groups}, own)
        except (KeyError, ConfigurationError) as error:
            self.problems.append(f"'{target.path}' is not the state of this optimizer: {error}")
            return {}
        return sharded.divide_states(found, target.value._parts, self.index.tensors)

    # -- what the owners are told and say ----------------------------------------------------------------------------

    def order(self, worker: str) -> LoadOrder:
        """What a worker has to know to load; "" is this one."""
        saved = self._saved.get(worker, [])
        return LoadOrder(
            saved, self.entries(name for part in saved for name in tensor_names(part.state)), self.is_strict
        )

    def entries(self, names: Iterable[str]) -> dict[str, TensorEntry]:
        """The entries of some tensors, in the order in which they are on disk."""
        found = {name: self.index.tensors[name] for name in names}
        return dict(sorted(found.items(), key=lambda item: (item[1].file, item[1].offset)))

    def judge(self, fits: dict[str, list[Fit]]) -> None:
        """Takes what the owners found when they compared.

        Raises:
            CheckpointMismatch: Something does not fit.
        """
        for target in self._targets:
            told = [fits[worker][number] for worker, number in target.parts]
            self.problems += [problem for fit in told for problem in fit.problems]
            if not self.is_strict or any(fit.claimed is None for fit in told):
                continue
            missing = [name for fit in told for name in fit.missing]
            claimed = {*target.sharded, *(name for fit in told for name in fit.claimed or ())}
            unexpected = [name for name in items_of(target.node) or {} if name not in claimed]
            self.problems += [f"'{join(target.path, name)}' is wanted and not in the checkpoint" for name in missing]
            self.problems += [f"'{join(target.path, name)}' is in the checkpoint and not wanted" for name in unexpected]

    def fill_groups(self, reader: TensorReader) -> None:
        """Gives distributed optimizers the options of their groups."""
        for target in self._targets:
            if isinstance(target.value, DistributedOptimizer):
                optimizer, saved = target.value, (items_of(target.node) or {})["param_groups"]
                own = fold_groups(optimizer.param_groups, optimizer._parts)
                groups = decode(saved, reader.copied, reader)
                _, options = states.unpack({"state": {}, "param_groups": groups}, own)
                for group, new in zip(optimizer.param_groups, options, strict=True):
                    kept = {key: group[key] for key in ("params", "param_names")}
                    group.clear()
                    group.update({**optimizer.defaults, **new, **kept})

    def option_names(self) -> list[str]:
        """The tensors among the options of groups."""
        optimizers = [target for target in self._targets if isinstance(target.value, DistributedOptimizer)]
        return [name for target in optimizers for name in tensor_names((items_of(target.node) or {})["param_groups"])]

    def check(self, path: str) -> None:
        """
        Raises:
            CheckpointMismatch: There are problems.
        """
        if self.problems:
            shown = "\n  ".join(self.problems[:_MAX_SHOWN])
            more = f"\n  and {len(self.problems) - _MAX_SHOWN} more" if len(self.problems) > _MAX_SHOWN else ""
            text = f"the checkpoint in {path} does not fit what is to be filled; nothing was changed:\n  {shown}{more}"
            raise CheckpointMismatch(text, tuple(self.problems))


def _values(node: Node, wanted: Any) -> Any:
    """The part of a node that is no object and is filled into nothing; `NOTHING` if none is."""
    if isinstance(wanted, torch.Tensor) or objects.is_object(wanted) or tag_of(node) == "$object":
        return NOTHING
    saved = items_of(node)
    if saved is None:
        return NOTHING if _has_object(node) or _has_target(wanted) else node
    below = wanted if isinstance(wanted, dict) else {}
    kept = {key: _values(item, below.get(key)) for key, item in saved.items()}
    if saved and all(item is NOTHING for item in kept.values()):
        return NOTHING
    if tag_of(node) is None:
        return {key: item for key, item in kept.items() if item is not NOTHING}
    tag = tag_of(node)
    pairs = zip(node[tag], kept.values(), strict=True)
    return {tag: [[pair[0], item] for pair, item in pairs if item is not NOTHING]}


def _has_object(node: Node) -> bool:
    if isinstance(node, list):
        return any(map(_has_object, node))
    return isinstance(node, dict) and (tag_of(node) == "$object" or any(map(_has_object, node.values())))


def _has_target(wanted: Any) -> bool:
    if isinstance(wanted, list | tuple):
        return any(map(_has_target, wanted))
    if isinstance(wanted, dict):
        return any(map(_has_target, wanted.values()))
    return isinstance(wanted, torch.Tensor) or objects.is_object(wanted)


def _are_versions(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(
        isinstance(key, str) and isinstance(item, dict) for key, item in metadata.items()
    )


def _placeholder(name: str) -> str:
    return name


def load_from(
    place: Directory, wanted: Any, is_strict: bool, option: ProgressOption, timeout_s: float
) -> dict[str, Any]:
    """Loads; see `gradwire.checkpoint.load`."""
    path, doing = str(place.path), f"loading from {place.path}"
    with contextlib.ExitStack() as stack:
        index = stack.enter_context(place.reading())
        plan = LoadPlan(index, wanted, is_strict)
        plan.check(path)
        orders = {worker: plan.order(worker) for worker in plan.parts.elsewhere}
        own = plan.order("")
        sent = {worker: owners.encode_struct(order) for worker, order in orders.items()}
        plan.judge(_fit(plan, own, sent, Round(doing, timeout_s)))
        plan.check(path)
        values = {} if plan.values is NOTHING else plan.values
        more = plan.entries([*tensor_names(values), *plan.option_names()])
        with ByteProgress("checking", option) as progress:
            _check(
                place,
                plan,
                {**orders, "": LoadOrder(own.parts, {**own.tensors, **more}, is_strict)},
                progress,
                Round(doing, timeout_s),
            )
        reader = stack.enter_context(TensorReader(stack.enter_context(place.open()), more))
        copied = functools.cache(reader.copied)  # what was one tensor stays one
        found: dict[str, Any] = decode(values, copied, reader)
        filling = Round(f"{doing}, where some objects may be filled already,", timeout_s)
        for worker in orders:
            filling.ask(worker, owners.FILL, path, sent[worker], plan.parts.sent(worker))
        filling.finish(functools.partial(owners.fill, place, own, plan.parts.here))
        plan.fill_groups(reader)
    return found


def _fit(plan: LoadPlan, own: LoadOrder, sent: dict[str, bytes], asked: Round) -> dict[str, list[Fit]]:
    for worker, order in sent.items():
        asked.ask(worker, owners.FIT, order, plan.parts.sent(worker))
    here, answers = asked.finish(lambda: owners.fit_all(own, plan.parts.here))
    return {"": here.fits, **{worker: _read_fits(plan, worker, answer) for worker, answer in answers}}


def _read_fits(plan: LoadPlan, worker: str, answer: Any) -> list[Fit]:
    try:
        fits = owners.decode_struct(answer, FitReport).fits
        if len(fits) != len(plan.parts.elsewhere[worker]):
            raise ValueError("it compared other parts than it was asked to")
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"worker {worker} gave no valid answer when it was asked to compare: {error}") from error
    return fits


def _check(
    place: Directory, plan: LoadPlan, orders: dict[str, LoadOrder], progress: ByteProgress, asked: Round
) -> None:
    """Has the bytes compared, each worker those that it will load; what several will load, one of them."""
    shares = _shares(orders)
    progress.total = sum(entry.num_bytes for share in shares.values() for entry in share.values())
    for worker, share in shares.items():
        files = files_of(orders[worker].tensors.values(), plan.index.files)  # each must see all that it needs
        for group in (groups_of(share, _GROUP_BYTES) or [{}]) if worker and files else ():
            num_bytes = sum(entry.num_bytes for entry in group.values())
            done = functools.partial(progress.count, num_bytes)
            asked.ask(
                worker, owners.CHECK, str(place.path), owners.encode_struct(CheckOrder(files, group)), on_done=done
            )
            files = {}
    here = CheckOrder(files_of(orders[""].tensors.values(), plan.index.files), shares[""])
    asked.finish(lambda: owners.check(place, here, progress.advance), progress.refresh)


def _shares(orders: dict[str, LoadOrder]) -> dict[str, dict[str, TensorEntry]]:
    """By worker, the tensors that it is to check: each once."""
    found: dict[str, dict[str, TensorEntry]] = {}
    seen: set[str] = set()
    for worker, order in orders.items():
        found[worker] = {name: entry for name, entry in order.tensors.items() if name not in seen}
        seen |= found[worker].keys()
    return found
