"""`ShardedTensor`: used like one tensor, but stored in parts on several processes.

It is a `torch.Tensor` by its type only. Every function of torch that is called with one is looked up in `dispatch`, and
works on its parts through a `Backend`. So autograd sees the parts, never this object: parts have gradients, and
``requires_grad``, ``grad`` and ``is_leaf`` are those of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradwire import rpc
from gradwire._torch import is_view, make_wrapper_subclass
from gradwire.rref import RRef, remote
from gradwire.shard import dispatch
from gradwire.shard.backend import Backend, Part
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.layout import Box, Layout, Place, everywhere
from gradwire.shard.metadata import (
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    join_shards,
    make_shard,
)
from gradwire.shard.placement import backend_for, layout_of, placement_of
from gradwire.shard.sharding_spec import ShardingSpec, infer_sharding_spec
from gradwire.shard.worker_backend import WorkerBackend
from gradwire.wire.devices import CPU, is_here


class ShardedTensorBase(torch.Tensor):
    """The metadata and local shards of a sharded tensor, without a process group."""

    _backend: Backend
    _metadata: ShardedTensorMetadata
    _sharding_spec: ShardingSpec
    _layout: Layout
    _parts: list[Part]

    def metadata(self) -> ShardedTensorMetadata:
        """Return the metadata of its shards, its size, and the properties that all shards share."""
        return self._metadata

    def sharding_spec(self) -> ShardingSpec:
        """Return the sharding spec."""
        return self._sharding_spec

    def local_shards(self) -> list[Shard]:
        """Return the shards of this process: none, one or several."""
        shards = self._metadata.shards_metadata
        found = []
        for number, part in zip(self._backend.box_numbers(self._layout), self._parts, strict=True):
            if number < len(shards):  # the others stand for ranks that have none
                if isinstance(part, RRef) and part.is_owner():
                    part = part.local_value()
                if isinstance(part, torch.Tensor):
                    found.append(Shard(part, self._shard_metadata(number)))
        return found

    def _shard_metadata(self, number: int) -> ShardMetadata:
        # Programs may sort the list that `metadata` returns.
        shards, box = self._metadata.shards_metadata, self._layout.boxes[number]
        return shards[number] if shards[number].box == box else next(item for item in shards if item.box == box)

    @property
    def _local_shards(self) -> list[Shard]:
        return self.local_shards()


class ShardedTensor(ShardedTensorBase):
    """A tensor that is sharded over the ranks of a process group, or over RPC workers.

    The placements of the spec decide which: ``"rank:0/cpu"`` or ``"worker0/cpu"``. In a process group, every rank
    creates it and calls its methods; over RPC workers, one worker does, and may pass it to others in calls.

    Args:
        sharding_spec: How to shard it.
        size: Size of the whole tensor.
        dtype: Dtype of all parts.
        layout: ``torch.strided``.
        requires_grad: Whether the parts require grad.
        pin_memory: Whether the parts are in pinned memory.
        memory_format: ``torch.contiguous_format``.
        process_group: For placements that name ranks; None for the default group.
        init_rrefs: Whether ranks create references to their shards for each other. Then all ranks, including those outside
            of `process_group`, must be RPC workers and create the tensor.

    Raises:
        TypeError: `sharding_spec` is not a spec, or a size is not an integer.
        ValueError: A tensor of that size cannot be sharded like this, or a placement does not exist.
        RuntimeError: There is no process group, or this process is not an RPC worker.
    """

    _batch: Layout | None
    _is_result: bool
    _is_param = False  # torch treats a tensor with it set as a torch.nn.Parameter
    _remote_shards: dict[int, list[RRef[Shard]]] | None

    def __new__(cls, sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
        from gradwire.shard.creation import empty  # creation stands on this module

        return empty(sharding_spec, *size, **options)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # everything was done by `__new__`

    @classmethod
    def _make(
        cls,
        backend: Backend,
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        parts: Sequence[Part],
        layout: Layout,
    ) -> ShardedTensor:
        """Make a tensor of known parts, in the order of the layout, which is that of the metadata."""
        properties = metadata.tensor_properties
        made: ShardedTensor = make_wrapper_subclass(
            cls,
            metadata.size,
            dtype=properties.dtype,
            layout=properties.layout,
            device=_device_of(backend, metadata, parts),
            requires_grad=False,
        )
        made._backend, made._sharding_spec, made._metadata = backend, spec, metadata
        made._layout, made._parts = layout, list(parts)
        made._batch = None  # whose rows they are, if they come from every participant's own plain tensor
        made._is_result = False  # of an operation, and so not a leaf
        made._remote_shards = None
        return made

    def _with_parts(self, parts: Sequence[Part], dtype: torch.dtype | None = None) -> ShardedTensor:
        """Make a tensor of the same layout with other parts, such as an elementwise function of them."""
        properties = replace(self._metadata.tensor_properties, requires_grad=self._does_require_grad(parts))
        if dtype is not None:
            properties.dtype = dtype
        metadata = replace(self._metadata, tensor_properties=properties)
        made = ShardedTensor._make(self._backend, self._sharding_spec, metadata, parts, self._layout)
        made._batch = self._batch
        made._is_result = properties.requires_grad
        return made

    def _does_require_grad(self, parts: Sequence[Part]) -> bool:
        first = first_here(parts)
        if first is not None:
            return first.requires_grad
        # References do not tell; what is made of a tensor with gradients has them, too.
        return self._metadata.tensor_properties.requires_grad and torch.is_grad_enabled()

    @property
    def _process_group(self) -> Any:
        return self._backend._group if isinstance(self._backend, GroupBackend) else None

    @property
    def _init_rrefs(self) -> bool:
        return self._remote_shards is not None

    @property
    def _like(self) -> torch.Tensor:
        """An empty tensor with the dtype of the parts, and the device of those of this rank, if it has such a device."""
        device = _device_of(self._backend, self._metadata, self._parts)
        if isinstance(self._backend, WorkerBackend) and not is_here(device):
            device = CPU  # the worker that runs the program need not have the devices of the others
        return torch.empty(0, dtype=self._metadata.tensor_properties.dtype, device=device)

    def _devices(self) -> set[torch.device]:
        """Return in a process group the devices of the shards of this rank; over RPC workers, those of all shards."""
        here = {part.device for part in self._parts if isinstance(part, torch.Tensor)}
        if isinstance(self._backend, WorkerBackend):
            placements = [shard.placement for shard in self._metadata.shards_metadata]
            return {CPU if placement is None else placement.device() for placement in placements}
        return here or {self.device}

    def _boxes(self) -> list[Box]:
        """Return the boxes whose parts this process handles, in the order of the parts."""
        return [self._layout.boxes[number] for number in self._backend.box_numbers(self._layout)]

    def local_tensor(self) -> torch.Tensor:
        """Return the local shards as one tensor; empty if there are none.

        Raises:
            RuntimeError: Several local shards do not form a box.
        """
        shards = [shard for shard in self.local_shards() if shard.metadata.box.num_elements]
        if len(shards) == 1:
            return shards[0].tensor
        if not shards:  # an empty part is in the graph, too: all ranks take part in backward
            empty_ones = [part for part in self._parts if isinstance(part, torch.Tensor)]
            return empty_ones[0] if empty_ones else self._like.new_empty([0] * self.dim())
        return join_shards(shards)

    def remote_shards(self) -> dict[int, list[RRef[Shard]]]:
        """Return references to the shards of other workers, by their RPC rank.

        Raises:
            RuntimeError: It belongs to a process group and was not created with ``init_rrefs=True``.
        """
        if isinstance(self._backend, WorkerBackend):
            return _references_to_shards(self)
        if self._remote_shards is None:
            raise RuntimeError(
                "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available; create it with "
                "init_rrefs=True in ranks that are RPC workers"
            )
        return self._remote_shards

    def full_tensor(self, *, adds_gradients: bool = False) -> torch.Tensor:
        """Return the whole tensor, on every rank.

        Args:
            adds_gradients: Whether each rank uses it for its own rows, so that the ranks' gradients are added up.
                Otherwise the gradient is taken to be the same on all ranks.
        """
        if adds_gradients and isinstance(self._backend, GroupBackend):
            target = everywhere(self.size(), self._backend.participants)
            (found,) = self._backend.move(self._parts, self._layout, target, self._like)
            assert isinstance(found, torch.Tensor)
            return found.clone() if any(found is part for part in self._parts) else found
        return self._backend.replicate(self._parts, self._layout, self.size(), self._like)

    def gather(  # type: ignore[override]  # PyTorch's name; torch.gather is another function
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """Return the whole tensor on one rank, without a gradient; over RPC workers, here.

        Args:
            dst: The rank in the group.
            out: Tensor for the result; by default a new one.
            enforce_dtype: Whether to convert the result to `dtype`, or to that of `out`.
            dtype: Dtype of the result.

        Returns:
            The tensor on `dst`, None elsewhere, including outside the group.

        Raises:
            ValueError: `dst` is not a rank of the group; `out` has another size, or another dtype without `enforce_dtype`.
        """
        target: Place = dst if isinstance(self._backend, GroupBackend) else self._backend.own_place
        if self._backend.participants and target not in self._backend.participants:  # not known outside the group
            raise ValueError(
                f"gather: dst={dst} is not a rank of the group, which has {len(self._backend.participants)} ranks"
            )
        layout = everywhere(self.size(), [target])
        with torch.no_grad():
            found = self._backend.move(self._parts, self._layout, layout, self._like)
            if target != self._backend.own_place:
                return None
            value = found[0]
            assert isinstance(value, torch.Tensor)
            if out is not None:
                # Checked only now: the other ranks do not know of it.
                if out.size() != self.size():
                    raise ValueError(
                        f"gather: out has size {list(out.size())}, but the sharded tensor has size {list(self.size())}"
                    )
                if out.dtype != self.dtype and not enforce_dtype:
                    raise ValueError(
                        f"gather: out has {out.dtype}, but the sharded tensor has {self.dtype}; pass enforce_dtype=True"
                    )
                return out.copy_(value)
            value = value.clone() if is_view(value) or any(value is part for part in self._parts) else value.detach()
            return value.to(dtype) if enforce_dtype and dtype is not None else value

    def redistribute(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Return the same tensor with another sharding. Each element is sent directly to its new place.

        Gradients take the same way back.

        Raises:
            ValueError: It cannot be sharded like this, or the placements are of another kind.
        """
        properties = self._metadata.tensor_properties
        metadata = resharding_spec.build_metadata(self.size(), properties)
        backend = backend_for(metadata.shards_metadata, self._process_group)
        if backend != self._backend:
            raise ValueError("a tensor cannot be moved between a process group and RPC workers; gather it first")
        layout = layout_of(metadata.shards_metadata, backend)
        if isinstance(backend, WorkerBackend):
            devices = [
                str(shard.placement.device()) for shard in metadata.shards_metadata if shard.placement is not None
            ]
            parts = backend.move(self._parts, self._layout, layout, self._like, devices=devices)
        else:
            parts = backend.move(self._parts, self._layout, layout, self._like)
        made = ShardedTensor._make(backend, resharding_spec, metadata, parts, layout)
        requires_grad = self._does_require_grad(parts)
        made._metadata = replace(metadata, tensor_properties=replace(properties, requires_grad=requires_grad))
        made._is_result = requires_grad
        return made

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Change the sharding of this tensor in place, and return it. A leaf stays a leaf, and loses its gradient.

        In a process group, the metadata then lists the shards in the order of their ranks, whatever their order in the spec.
        If the tensor already has this sharding, nothing is done.

        Raises:
            ValueError: It cannot be sharded like this, or the placements are of another kind.
        """
        if resharding_spec == self._sharding_spec:
            return self
        is_leaf, requires_grad = self.is_leaf, self.requires_grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_leaf):
            made = self.redistribute(resharding_spec)
            if is_leaf:
                made._parts = made._backend.run(_own_part, made._layout, made._parts)
        if is_leaf and requires_grad:
            made.requires_grad_(True)
        made._order_by_rank()
        self._take_over(made)
        return self

    def _order_by_rank(self) -> None:
        """Sort the shards by rank; those of one rank keep their order."""
        if not isinstance(self._backend, GroupBackend):
            return
        shards, places, boxes = self._metadata.shards_metadata, self._layout.places, self._layout.boxes
        order = sorted(range(len(shards)), key=lambda number: places[number])
        ordered = [*order, *range(len(shards), len(boxes))]  # those without shards stay at the end
        self._metadata = replace(self._metadata, shards_metadata=[shards[number] for number in order])
        self._layout = Layout(tuple(boxes[n] for n in ordered), tuple(places[n] for n in ordered))

    def _take_over(self, other: ShardedTensor) -> None:
        self._sharding_spec, self._metadata, self._layout = other._sharding_spec, other._metadata, other._layout
        self._backend, self._parts, self._batch = other._backend, other._parts, other._batch
        self._is_result = other._is_result
        self._remote_shards = None

    # Overridden, because torch's methods refuse a process group before they call `__torch_function__`.

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """Convert as `torch.Tensor.to`; ``process_group`` may be another group of the same ranks."""
        return self._call(torch.Tensor.to, args, kwargs)

    def cpu(self, memory_format: Any = torch.preserve_format, process_group: Any = None) -> ShardedTensor:
        """Return the tensor on the CPU; itself if it is there already, in that group."""
        return self._call(torch.Tensor.cpu, (), {"memory_format": memory_format, "process_group": process_group})

    def cuda(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """Move as `torch.Tensor.cuda`, to the current GPU of each rank; ``process_group`` as for `to`."""
        return self._call(torch.Tensor.cuda, args, kwargs)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
        found: ShardedTensor = self.__torch_function__(func, (ShardedTensor,), (self, *args), kwargs)
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = first_sharded((*args, *kwargs.values()))
        spec, group = (first._sharding_spec, first._process_group) if first is not None else (None, None)
        return dispatch.dispatch(func, types, args, kwargs, spec, group)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise dispatch.unsupported(func)  # something bypassed `__torch_function__`

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        properties = self._metadata.tensor_properties
        shards = ", ".join(
            f"{item.placement}: {item.shard_sizes} at {item.shard_offsets}" for item in self._metadata.shards_metadata
        )
        return f"ShardedTensor(size={list(self._metadata.size)}, dtype={properties.dtype}, shards=[{shards}])"

    def __hash__(self) -> int:
        return id(self)


def first_sharded(values: Any) -> ShardedTensor | None:
    """Return the first sharded tensor among values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, ShardedTensor):
            return value
        if isinstance(value, list | tuple):
            found = first_sharded(value)
            if found is not None:
                return found
    return None


def from_layout(
    backend: Backend,
    layout: Layout,
    parts: Sequence[Part],
    size: Sequence[int],
    like: torch.Tensor,
    requires_grad: bool,
    beside: ShardedTensor | None = None,
) -> ShardedTensor:
    """Make a sharded tensor of parts that an operation made.

    Boxes of the layout do not overlap, and make up the tensor; `like` tells dtype and device. `requires_grad` counts where
    parts are references, which do not tell. `beside` is the tensor of whose parts they were made, one by one: over RPC
    workers they are on its devices.
    """
    first = first_here(parts)
    if first is not None:
        requires_grad = first.requires_grad
    devices = [like.device] * len(layout.boxes)
    if beside is not None and isinstance(backend, WorkerBackend):
        devices = [
            shard.placement.device() for shard in beside._metadata.shards_metadata if shard.placement is not None
        ]
    shards = [
        ShardMetadata(box.offsets, box.sizes, placement_of(place, device, backend))
        for box, place, device in zip(layout.boxes, layout.places, devices, strict=True)
    ]
    metadata = ShardedTensorMetadata(
        shards, torch.Size(size), TensorProperties(like.dtype, requires_grad=requires_grad)
    )
    made = ShardedTensor._make(backend, infer_sharding_spec(shards), metadata, parts, layout)
    made._is_result = requires_grad
    return made


def _device_of(backend: Backend, metadata: ShardedTensorMetadata, parts: Sequence[Part]) -> torch.device:
    """Return in a process group the device of this rank; over RPC workers, that of the first shard."""
    first, placement = first_here(parts), metadata.shards_metadata[0].placement
    if isinstance(backend, GroupBackend) and first is not None:
        return first.device
    return torch.device("cpu") if placement is None else placement.device()


def first_here(parts: Sequence[Part]) -> torch.Tensor | None:
    """Return the first part, if there is one and it is here; the others have the same properties."""
    return parts[0] if parts and isinstance(parts[0], torch.Tensor) else None


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    # What was moved within a worker may be a view of what was there.
    return tensor.clone() if is_view(tensor) else tensor


def _references_to_shards(tensor: ShardedTensor) -> dict[int, list[RRef[Shard]]]:
    found: dict[int, list[RRef[Shard]]] = {}
    for part, place, metadata in zip(
        tensor._parts, tensor._layout.places, tensor._metadata.shards_metadata, strict=True
    ):
        if isinstance(part, RRef) and not part.is_owner():
            reference = remote(place, make_shard, (part, metadata))
            found.setdefault(rpc.get_worker_info(str(place)).id, []).append(reference)
    return found
