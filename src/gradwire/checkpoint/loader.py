"""Loading: find the objects in the checkpoint, compare everything, and only then fill it.

1. all objects are there, and of the right kind             here
2. names, shapes and dtypes fit                             where each part is
3. files are there and have the bytes that were written     where each part is
4. everything is filled                                     where each part is

Up to the end of the third step nothing is changed anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch

from gradwire.checkpoint import owner
from gradwire.checkpoint.directory import Directory
from gradwire.checkpoint.index import Index, TensorEntry
from gradwire.checkpoint.owner import CheckOrder, FitReport, LoadOrder, Parts, SavedPart
from gradwire.checkpoint.participants import Ranks, Workers
from gradwire.checkpoint.progress import ByteProgress, ProgressOption
from gradwire.checkpoint.safetensors_io import TensorReader, files_of
from gradwire.checkpoint.stateful import Fit, Part, compare, divide_states, is_object, sharded_state, shards_of, split
from gradwire.checkpoint.tree import Node, bodies, decode, dict_node, items_of, join, region_of, tag_of, tensor_names
from gradwire.errors import CheckpointError, CheckpointMismatch, ConfigurationError
from gradwire.optim import DistributedOptimizer, state_dict
from gradwire.optim.parameters import fold_groups
from gradwire.shard import ShardedTensor

_GROUP_BYTES: Final = 256 << 20  # checked in one call; the granularity of the progress
_NOTHING: Final = object()
_MAX_SHOWN: Final = 20


def load_from(
    place: Directory, wanted: Any, is_strict: bool, option: ProgressOption, timeout_s: float, group: Any = None
) -> dict[str, Any]:
    """Load; see `gradwire.checkpoint.load`. Every rank of the group must call it."""
    path, doing = str(place.path), f"loading from {place.path}"
    ranks, workers = Ranks(group, doing), Workers(doing, timeout_s)
    with contextlib.ExitStack() as stack:  # rank 0 prevents the removal of files until all are done
        index = ranks.first(lambda: stack.enter_context(place.reading()))
        plan = ranks.each(lambda: LoadPlan(index, wanted, is_strict, path, group is not None))
        orders = {worker: owner.encode_struct(plan.orders[worker]) for worker in plan.parts.elsewhere}
        ranks.each(lambda: plan.judge(_fit(plan, orders, workers), path))
        with ByteProgress("checking", option if ranks.rank == 0 or callable(option) else False) as progress:
            shares = _shares(ranks.all(lambda: plan.needed), index.tensors)[ranks.rank]
            ranks.each(lambda: _check(place, plan, shares, progress, workers))
        folder = ranks.each(lambda: stack.enter_context(place.open()))
        reader = stack.enter_context(TensorReader(folder, index.tensors))
        found: dict[str, Any] = ranks.each(lambda: reader.decode(plan.values, keeps_ties=True))
        filling = Workers(f"{doing} (some objects may already be filled)", timeout_s)
        calls = plan.parts.calls(owner.FILL, lambda worker: (path, orders[worker]))
        ranks.each(lambda: filling.ask(calls, lambda: owner.fill(place, plan.orders[""], plan.parts.here)))
        plan.fill_groups(reader)
    return found


def _fit(plan: LoadPlan, orders: dict[str, bytes], workers: Workers) -> dict[str, list[Fit]]:
    own, answers = workers.ask(
        plan.parts.calls(owner.FIT, lambda worker: (orders[worker],)),
        lambda: owner.fit_all(plan.orders[""], plan.parts.here),
    )
    return {"": own.fits, **{worker: _read_fits(plan, worker, answer) for worker, answer in answers}}


def _read_fits(plan: LoadPlan, worker: str, answer: Any) -> list[Fit]:
    try:
        fits = owner.decode_struct(answer, FitReport).fits
        if len(fits) != len(plan.parts.elsewhere[worker]):
            raise ValueError("it compared other parts than requested")
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"worker {worker} sent an invalid answer to the comparison: {error}") from error
    return fits


def _shares(needed: list[dict[str, list[str]]], entries: Mapping[str, TensorEntry]) -> list[dict[str, list[str]]]:
    """Distribute the checks of all tensors: each is checked once, by a worker that needs it."""
    takers: dict[str, list[list[str]]] = {}
    shares: list[dict[str, list[str]]] = [{worker: [] for worker in found} for found in needed]
    for rank, found in enumerate(needed):
        for worker, names in found.items():
            for name in names:
                takers.setdefault(name, []).append(shares[rank][worker])
    loads = {id(share): 0 for found in shares for share in found.values()}
    # Large ones first, so that the shares are even.
    for name in sorted(takers, key=lambda item: (-entries[item].num_bytes, item)):
        share = min(takers[name], key=lambda item: loads[id(item)])
        loads[id(share)] += entries[name].num_bytes
        share.append(name)
    return shares


def _check(
    place: Directory, plan: LoadPlan, shares: dict[str, list[str]], progress: ByteProgress, workers: Workers
) -> None:
    """Let each worker check the bytes of its share; each must see all files that it needs."""
    files = {worker: files_of(plan.entries(names).values(), plan.index.files) for worker, names in plan.needed.items()}
    progress.total = sum(plan.index.tensors[name].num_bytes for names in shares.values() for name in names)
    calls, sizes = [], []
    for worker in plan.parts.elsewhere:
        groups = _groups_of(plan.entries(shares[worker])) or [{}]
        for number, group in enumerate(groups) if files[worker] else ():
            order = owner.encode_struct(CheckOrder(files[worker] if number == 0 else {}, group))
            calls.append((worker, owner.CHECK, (str(place.path), order)))
            sizes.append(sum(entry.num_bytes for entry in group.values()))
    own = CheckOrder(files[""], plan.entries(shares[""]))
    workers.ask(
        calls,
        lambda: owner.check(place, own, progress.advance),
        on_answer=lambda number: progress.count(sizes[number]),
        on_poll=progress.refresh,
    )


def _groups_of(entries: Mapping[str, TensorEntry]) -> list[dict[str, TensorEntry]]:
    groups: list[dict[str, TensorEntry]] = []
    size = _GROUP_BYTES
    for name, entry in entries.items():
        if size >= _GROUP_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = entry
        size += entry.num_bytes
    return groups


# -- the plan ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Target:
    """An object to fill, and the positions of the reports on its parts."""

    path: str
    value: Any
    node: Node
    parts: list[tuple[str, int]] = field(default_factory=list)
    sharded: list[str] = field(default_factory=list)  # keys of sharded tensors, whose shards are parts of their own


class LoadPlan:
    """The objects to fill, and their entries in the checkpoint.

    With `is_here_only` everything must be on this worker, because ranks fill only their own objects.

    Attributes:
        values: The node of all values that are not filled into an object.
        orders: Instructions for each worker; the key of this worker is "".
        needed: Names of the tensors that each worker will load; for this worker also those of values and group options.
    """

    def __init__(self, index: Index, wanted: Any, is_strict: bool, path: str, is_here_only: bool = False) -> None:
        self.index = index
        self.is_strict = is_strict
        self.parts = Parts()
        self._problems: list[str] = []
        self._saved: dict[str, list[SavedPart]] = {"": []}
        self._targets: list[_Target] = []
        self._walk(wanted, index.state, "")
        values = _values(index.state, wanted)
        self.values = {} if values is _NOTHING else values
        if self.parts.elsewhere and is_here_only:
            elsewhere = ", ".join(self.parts.elsewhere)
            raise CheckpointError(
                f"the ranks of a process group cannot load objects on other workers ({elsewhere}); load those in a separate "
                "call from one RPC worker"
            )
        self._raise_problems(path)
        self.orders = {worker: self._order(saved) for worker, saved in self._saved.items()}
        self.needed = {worker: list(order.tensors) for worker, order in self.orders.items()}
        options = [groups for _, groups in self._optimizers()]
        self.needed[""] = list(dict.fromkeys([*self.needed[""], *tensor_names([self.values, options])]))

    def _walk(self, wanted: Any, node: Node, path: str) -> None:
        if isinstance(wanted, torch.Tensor) or is_object(wanted):
            self._add(wanted, node, path)
        elif isinstance(wanted, dict):
            self._walk_dict(wanted, items_of(node), path)
        elif isinstance(wanted, list | tuple):
            saved = node if isinstance(node, list) else node.get("$tuple") if isinstance(node, dict) else None
            if saved is None or len(saved) != len(wanted):
                self._problems.append(f"'{path}' was not saved as {len(wanted)} items")
                return
            for number, (item, below) in enumerate(zip(wanted, saved, strict=True)):
                self._walk(item, below, join(path, number))
        elif tag_of(node) == "$object":
            kind = node["$object"]["kind"]
            noun = {"optimizer": "an optimizer", "stateful": "an object with a state_dict"}.get(kind, f"a {kind}")
            self._problems.append(f"'{path}' was saved as {noun}; pass one to be filled")

    def _walk_dict(self, wanted: dict[Any, Any], saved: dict[Any, Node] | None, path: str) -> None:
        if saved is None:
            self._problems.append(f"'{path}' was not saved as a dict")
            return
        for key, item in wanted.items():
            if key in saved:
                self._walk(item, saved[key], join(path, key))
            elif self.is_strict:
                known = ", ".join(f"'{name}'" for name in saved)
                self._problems.append(f"'{join(path, key)}' is not in the checkpoint; there are {known}")

    def _add(self, value: Any, node: Node, path: str) -> None:
        body = node["$object"] if tag_of(node) == "$object" else {"state": node, "metadata": None}
        target = _Target(path, value, body["state"])
        self._targets.append(target)
        if isinstance(value, ShardedTensor):
            self._add_shards(target, value, target.node, path)
            return
        metadata = decode(body.get("metadata"))
        if metadata is not None and not _are_versions(metadata):
            self._problems.append(f"'{path}' was saved with versions of modules of an unknown form")
            return
        by_name = self._optimizer_state(target) if isinstance(value, DistributedOptimizer) else None
        for part in split(path, value):
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
        saved = items_of(target.node) or {}
        for key, tensor in sharded_state(part).items():
            where = join(target.path, key)
            if key in saved:
                target.sharded.append(key)
                self._add_shards(target, tensor, saved[key], where)
            elif self.is_strict:
                self._problems.append(f"'{where}' is not in the checkpoint")

    def _add_shards(self, target: _Target, tensor: ShardedTensor, node: Node, where: str) -> None:
        """Add shards; each gets its region of the saved tensor."""
        entries = self.index.tensors
        problem = compare(where, tensor, node, entries, self.is_strict)
        if problem:
            self._problems.append(problem)
            return
        for box, part in shards_of(tensor):
            self._add_part(target, Part(where, "", part), region_of(node, box, entries))

    def _optimizer_state(self, target: _Target) -> dict[str, Node]:
        saved = items_of(target.node) or {}
        try:
            groups = decode(saved["param_groups"])
            own = fold_groups(target.value.param_groups, target.value._parts)
            found, _ = state_dict.unpack({"state": items_of(saved["state"]), "param_groups": groups}, own)
        except (KeyError, ConfigurationError) as error:
            self._problems.append(f"'{target.path}' is not the state of this optimizer: {error}")
            return {}
        return divide_states(found, target.value._parts, self.index.tensors)

    def _order(self, saved: list[SavedPart]) -> LoadOrder:
        names = (name for part in saved for name in tensor_names(part.state))
        return LoadOrder(saved, self.entries(names), self.is_strict)

    def entries(self, names: Iterable[str]) -> dict[str, TensorEntry]:
        """Return the entries of some tensors, in the order in which they are on disk."""
        found = {name: self.index.tensors[name] for name in names}
        return dict(sorted(found.items(), key=lambda item: (item[1].file, item[1].offset)))

    def judge(self, fits: dict[str, list[Fit]], path: str) -> None:
        """Check the owners' comparisons, and raise `CheckpointMismatch` for all problems."""
        for target in self._targets:
            told = [fits[worker][number] for worker, number in target.parts]
            self._problems += [problem for fit in told for problem in fit.problems]
            if not self.is_strict or any(fit.claimed is None for fit in told):
                continue
            missing = [name for fit in told for name in fit.missing]
            claimed = {*target.sharded, *(name for fit in told for name in fit.claimed or ())}
            unexpected = [name for name in items_of(target.node) or {} if name not in claimed]
            self._problems += [f"'{join(target.path, name)}' is not in the checkpoint" for name in missing]
            self._problems += [
                f"'{join(target.path, name)}' is in the checkpoint, but not in the object" for name in unexpected
            ]
        self._raise_problems(path)

    def _raise_problems(self, path: str) -> None:
        if self._problems:
            shown = "\n  ".join(self._problems[:_MAX_SHOWN])
            more = f"\n  and {len(self._problems) - _MAX_SHOWN} more" if len(self._problems) > _MAX_SHOWN else ""
            text = f"the checkpoint in {path} does not fit the objects to fill; nothing was changed:\n  {shown}{more}"
            raise CheckpointMismatch(text, tuple(self._problems))

    def _optimizers(self) -> Iterator[tuple[DistributedOptimizer, Node]]:
        """Yield distributed optimizers, and the saved options of their groups."""
        for target in self._targets:
            if isinstance(target.value, DistributedOptimizer):
                yield target.value, (items_of(target.node) or {})["param_groups"]

    def fill_groups(self, reader: TensorReader) -> None:
        for optimizer, saved in self._optimizers():
            own = fold_groups(optimizer.param_groups, optimizer._parts)
            _, options = state_dict.unpack({"state": {}, "param_groups": reader.decode(saved)}, own)
            optimizer._set_options(options)


def _values(node: Node, wanted: Any) -> Any:
    """Return the values of a node that are not filled into an object; `_NOTHING` if there are none."""
    if isinstance(wanted, torch.Tensor) or is_object(wanted) or tag_of(node) == "$object":
        return _NOTHING
    saved = items_of(node)
    if saved is None:
        has_object = any(True for _ in bodies(node, ("$object",)))
        return _NOTHING if has_object or _has_target(wanted) else node
    below = wanted if isinstance(wanted, dict) else {}
    kept = {key: _values(item, below.get(key)) for key, item in saved.items()}
    if saved and all(item is _NOTHING for item in kept.values()):
        return _NOTHING
    if tag_of(node) is None:
        return {key: item for key, item in kept.items() if item is not _NOTHING}
    tag = tag_of(node)
    pairs = zip(node[tag], kept.values(), strict=True)
    return {tag: [[pair[0], item] for pair, item in pairs if item is not _NOTHING]}


def _has_target(wanted: Any) -> bool:
    if isinstance(wanted, list | tuple):
        return any(map(_has_target, wanted))
    if isinstance(wanted, dict):
        return any(map(_has_target, wanted.values()))
    return isinstance(wanted, torch.Tensor) or is_object(wanted)


def _are_versions(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(
        isinstance(key, str) and isinstance(item, dict) for key, item in metadata.items()
    )
