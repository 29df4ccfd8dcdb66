"""Saving and loading on the ranks of a process group: every rank calls, each does its part, and all come to the same end.

    save    rank 0: lock, new generation   all: write    rank 0: index, rename
    load    rank 0: lock, index            all: compare, check a share of the bytes, fill

Between these steps ranks tell each other how it went, so that an error anywhere is an error everywhere, with the same
consequences as for workers: a save counts from the rename on, a load changes nothing before the last step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from gradwire import errors
from gradwire.checkpoint.directory import failpoint
from gradwire.checkpoint import owner as owners
from gradwire.checkpoint.directory import Directory
from gradwire.checkpoint.index import Index, TensorEntry, dump, parse
from gradwire.checkpoint.loader import NOTHING, LoadPlan
from gradwire.checkpoint.owner import CheckOrder, WriteReport
from gradwire.checkpoint.progress import ByteProgress, ProgressOption
from gradwire.checkpoint.safetensors_io import TensorReader, files_of
from gradwire.checkpoint.saver import Pieces, SavePlan, make_index
from gradwire.checkpoint.tree import decode, tensor_names
from gradwire.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error of one rank, as others are told of it."""

    kind: str
    text: str


class Ranks:
    """The ranks of a process group, who do something together.

    Args:
        group: The process group.
        doing: What they do, for errors: ``saving to /a/b``.
    """

    def __init__(self, group: Any, doing: str) -> None:
        self._group = group
        self._doing = doing
        self.rank = dist.get_rank(group)
        self.number = dist.get_world_size(group)

    @property
    def name(self) -> str:
        """What this rank is called in files."""
        return f"rank{self.rank}"

    def first_does(self, action: Callable[[], T]) -> T:
        """Rank 0 does something, and all get the result.

        Raises:
            CheckpointError: It failed there.
        """
        found: T = self._do(action, is_active=self.rank == 0)[0]
        return found

    def all_do(self, action: Callable[[], T]) -> list[T]:
        """Every rank does something, and all get all results.

        Raises:
            CheckpointError: It failed on some rank.
        """
        return self._do(action)

    def each_does(self, action: Callable[[], T]) -> T:
        """Every rank does something, and gets its own result; others only learn that it went well.

        Raises:
            CheckpointError: It failed on some rank.
        """
        kept: list[T] = []
        self._do(lambda: kept.append(action()))
        return kept[0]

    def _do(self, action: Callable[[], Any], is_active: bool = True) -> list[Any]:
        error: Exception | None = None
        said: Any = None
        try:
            said = action() if is_active else None
        except Exception as found:
            error, said = found, _Failure(type(found).__name__, str(found))
        everybody = self._exchange(said)
        if error is not None:
            raise error if isinstance(error, CheckpointError) else self._failed(self.rank, said) from error
        for rank, told in enumerate(everybody):
            if isinstance(told, _Failure):
                raise self._failed(rank, told)
        return everybody

    def _exchange(self, said: Any) -> list[Any]:
        found: list[Any] = [None] * self.number
        try:
            dist.all_gather_object(found, said, self._group)
        except Exception as error:  # whatever the backend says when a rank is gone
            raise CheckpointError(f"{self._doing} failed: a rank is gone or does not answer ({error})") from error
        return found

    def _failed(self, rank: int, failure: _Failure) -> CheckpointError:
        kind = getattr(errors, failure.kind, None)
        if isinstance(kind, type) and issubclass(kind, CheckpointError):
            return kind(f"on rank {rank}: {failure.text}")
        return CheckpointError(f"{self._doing} failed on rank {rank}: {failure.kind}: {failure.text}")


# -- save ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank has written: messages as bytes, so that they are the same as between workers."""

    report: bytes
    pieces: Pieces


def save_into(place: Directory, state: Any, group: Any, option: ProgressOption) -> Index:
    """Saves; see `gradwire.checkpoint.save`. Every rank must call it."""
    ranks = Ranks(group, f"saving to {place.path}")
    is_first = ranks.rank == 0
    plan = ranks.each_does(lambda: SavePlan(state, group, is_first))
    with contextlib.ExitStack() as stack:
        generation = ranks.first_does(lambda: stack.enter_context(place.writing(ranks.name)))
        call = (place, generation)
        sizes = ranks.all_do(lambda: owners.describe(*call, plan.parts.here, plan.own) + plan.tensors.num_bytes)
        with ByteProgress("saving", option if is_first or callable(option) else False) as progress:
            progress.total = sizes[ranks.rank]
            write = functools.partial(
                owners.write, *call, plan.parts.here, plan.tensors, progress.advance, plan.own, ranks.name
            )
            own: list[WriteReport] = []
            told = ranks.all_do(lambda: _written(plan, write, own))
        failpoint("files-written")
        return parse(ranks.first_does(lambda: dump(_publish(place, generation, plan, own[0], told))), str(place.path))


def _written(plan: SavePlan, write: Callable[[], WriteReport], own: list[WriteReport]) -> _Written:
    own.append(write())
    # What rank 0 said of its parts is in its own report still: nobody else needs it.
    told = WriteReport([], own[0].files, own[0].tensors)
    return _Written(owners.encode_struct(told), plan.pieces({"": own[0]}))


def _publish(place: Directory, generation: str, plan: SavePlan, own: WriteReport, told: list[_Written]) -> Index:
    pieces: Pieces = {}
    for item in told:
        for path, found in item.pieces.items():
            pieces.setdefault(path, []).extend(found)
    reports = [owners.decode_struct(item.report, WriteReport) for item in told]
    index = make_index(generation, plan, {"": own}, reports, pieces)
    place.publish(index)
    return index


# -- load ----------------------------------------------------------------------------------------------------------------


def load_from(place: Directory, wanted: Any, group: Any, is_strict: bool, option: ProgressOption) -> dict[str, Any]:
    """Loads; see `gradwire.checkpoint.load`. Every rank must call it."""
    ranks = Ranks(group, f"loading from {place.path}")
    path = str(place.path)
    with contextlib.ExitStack() as stack:  # rank 0 keeps files from being removed until all are done
        index = parse(ranks.first_does(lambda: dump(stack.enter_context(place.reading()))), path)
        plan = ranks.each_does(lambda: _compare(index, wanted, is_strict, path))
        own = plan.order("")
        values = {} if plan.values is NOTHING else plan.values
        more = plan.entries([*tensor_names(values), *plan.option_names()])
        needed = {**own.tensors, **more}
        with ByteProgress("checking", option if ranks.rank == 0 or callable(option) else False) as progress:
            share = _share(ranks.all_do(lambda: list(needed)), index, ranks.rank)
            progress.total = sum(entry.num_bytes for entry in share.values())
            order = CheckOrder(files_of(needed.values(), index.files), share)
            ranks.each_does(lambda: owners.check(place, order, progress.advance))
        folder = ranks.each_does(lambda: stack.enter_context(place.open()))
        reader = stack.enter_context(TensorReader(folder, needed))
        copied = functools.cache(reader.copied)  # what was one tensor stays one
        found: dict[str, Any] = ranks.each_does(lambda: decode(values, copied, reader))
        ranks.each_does(lambda: owners.fill(place, own, plan.parts.here))
        return found


def _compare(index: Index, wanted: Any, is_strict: bool, path: str) -> LoadPlan:
    plan = LoadPlan(index, wanted, is_strict)
    if plan.parts.elsewhere:
        raise CheckpointError(f"ranks fill only what they have, and not what is on {', '.join(plan.parts.elsewhere)}")
    plan.check(path)
    plan.judge({"": owners.fit_all(plan.order(""), plan.parts.here).fits})
    plan.check(path)
    return plan


def _share(needed: list[list[str]], index: Index, rank: int) -> dict[str, TensorEntry]:
    """What this rank is to check of all that anybody needs: every tensor is checked once, large ones are spread first."""
    loads = [0] * len(needed)
    share: dict[str, TensorEntry] = {}
    sets = [set(items) for items in needed]
    names = set().union(*sets)
    for name in sorted(names, key=lambda item: (-index.tensors[item].num_bytes, item)):
        chosen = min((number for number, items in enumerate(sets) if name in items), key=lambda item: loads[item])
        loads[chosen] += index.tensors[name].num_bytes
        if chosen == rank:
            share[name] = index.tensors[name]
    return dict(sorted(share.items(), key=lambda item: (item[1].file, item[1].offset)))
