"""Parts and other shapes of sharded tensors, and batched products, in both worlds, against plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from closeness import assert_close
from gradwire.shard import ChunkShardingSpec, ShardedTensor, ShardingSpec
from shard.worlds import World, Worlds

WORKERS_IMPORT = ["torch._dynamo"]  # batched products import parts of it, which takes half a second
BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])
View = Callable[[Any], Any]

# They fit every layout: no shard ends in the middle of a new dimension.
ANY_LAYOUT: list[View] = [
    lambda x: x.chunk(3),
    lambda x: torch.chunk(x, 4, dim=-1),
    lambda x: x.chunk(20, 1),
    lambda x: x.split(3),
    lambda x: torch.split(x, [2, 0, 3], 1),
    lambda x: x.split(split_size=2, dim=1),
    lambda x: x.narrow(0, 2, 4),
    lambda x: torch.narrow(x, 1, -2, 1),
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(-1).squeeze(-1),
    lambda x: x.view(7, 1, 5).squeeze(),
    lambda x: x.reshape(1, 7, -1),
    lambda x: x.view_as(torch.empty(7, 5)),
]


def check_views(world: World, views: Sequence[View], size: list[int], specs: Sequence[ShardingSpec]) -> int:
    whole = torch.randn(size, dtype=torch.float64)
    num_checked = 0
    for spec in specs:
        for view in views:
            with world.fresh_gradients():
                plain, sharded = whole.clone().requires_grad_(), world.place(whole, spec, requires_grad=True)
                expected, found = _several(view(plain)), _several(view(sharded))
                assert len(found) == len(expected)
                total, plain_total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
                for mine, other in zip(found, expected, strict=True):
                    assert isinstance(mine, ShardedTensor)
                    full = mine.full_tensor()
                    assert full.size() == other.size()
                    assert_close(full, other)
                    weights = torch.arange(1.0, other.numel() + 1, dtype=torch.float64).view(other.size())
                    total, plain_total = total + (full * weights).sum(), plain_total + (other * weights).sum()
                world.backward(total)
                plain_total.backward()  # type: ignore[no-untyped-call]
                assert plain.grad is not None
                world.assert_gradient(sharded, plain.grad)
                num_checked += 1
    return num_checked


def _several(found: Any) -> Sequence[Any]:
    return found if isinstance(found, tuple | list) else [found]


def check_any_layout(world: World) -> int:
    return check_views(world, ANY_LAYOUT, [7, 5], world.specs(7, 5))


@BACKENDS
def test_parts_and_dimensions_of_length_one_of_any_layout(worlds: Worlds, backend: str) -> None:
    assert min(worlds.check(backend, 3, check_any_layout)) == 5 * len(ANY_LAYOUT)


def check_other_shapes(world: World) -> int:
    rows: list[View] = [
        lambda x: x.view(4, 4, 3, 2),
        lambda x: x.view(8, -1, 6),
        lambda x: x.reshape(16, 6),
        lambda x: x.flatten(1),
        torch.flatten,
        lambda x: x.view(4, 4, 6).view(16, 3, 2),
    ]
    columns: list[View] = [lambda x: x.view(4, 4, 3, 2), lambda x: x.view(2, 8, 3, 2), lambda x: x.flatten(0, 0)]
    num_checked = check_views(
        world, rows, [16, 3, 2], [world.chunks(0), ChunkShardingSpec(-3, world.chunks(0).placements)]
    )
    return num_checked + check_views(world, columns, [16, 3, 2], [world.chunks(1), world.chunks(2)])


@BACKENDS
def test_other_shapes_where_every_shard_stays_a_box(worlds: Worlds, backend: str) -> None:
    assert min(worlds.check(backend, 4, check_other_shapes)) == 18


def check_specs(world: World) -> list[Any]:
    rows = world.shard(torch.randn(16, 6), world.chunks(0))
    viewed = rows.view(4, 4, 6)
    assert viewed.sharding_spec() == world.chunks(0)
    assert all(part.sharding_spec() == world.chunks(0) for part in rows.chunk(3, dim=1))
    with pytest.raises(RuntimeError, match=r"redistribute\(\) it along another dimension"):
        world.shard(torch.randn(6, 16), world.chunks(1)).view(96)
    with pytest.raises(RuntimeError, match="invalid for input of size 96"):
        rows.view(5, 7)
    with pytest.raises(RuntimeError, match="only one dimension can be inferred"):
        rows.view(-1, -1)
    with pytest.raises(IndexError, match="Dimension out of range"):
        rows.chunk(2, dim=2)
    with pytest.raises(RuntimeError, match="sum exactly to 16"):
        rows.split([3, 4])
    return [viewed.local_shards()[0].tensor._is_view()] if viewed.local_shards() else []


def test_a_view_shares_memory_and_says_what_it_cannot_do(worlds: Worlds) -> None:
    assert worlds.check("group", 4, check_specs) == [[True]] * 4


def check_rows(world: World) -> None:
    """Two layers of a transformer: heads are on the workers, rows are everybody's own."""
    batch = torch.randn(9, 6, dtype=torch.float64)
    first, second = torch.randn(8, 6, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    a, b = world.shard(first, world.chunks(0)), world.shard(second, world.chunks(1))
    hidden = torch.nn.functional.linear(world.own(batch), a)
    heads = hidden.view(hidden.size(0), 4, 2) * 2
    found = torch.nn.functional.linear(heads.flatten(1), b)
    assert not isinstance(found, ShardedTensor)
    assert_close(world.join(found), batch @ first.t() * 2 @ second.t())


@BACKENDS
def test_rows_are_whose_they_were(worlds: Worlds, backend: str) -> None:
    worlds.check(backend, 4, check_rows)


# -- batched products --------------------------------------------------------------------------------------------------


def check_bmm(world: World) -> int:
    left, right = torch.randn(6, 3, 4, dtype=torch.float64), torch.randn(6, 4, 5, dtype=torch.float64)
    weights = torch.randn(6, 3, 5, dtype=torch.float64)
    plain_left, plain_right = left.clone().requires_grad_(), right.clone().requires_grad_()
    (torch.bmm(plain_left, plain_right) * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert plain_left.grad is not None
    assert plain_right.grad is not None
    batch, uneven = world.chunks(0), world.uneven(0, 6, 3, 4)
    pairs: list[tuple[ShardingSpec | None, ShardingSpec | None]] = [
        (batch, batch),
        (uneven, batch),
        (batch, world.chunks(2)),
        (batch, world.chunks(1)),
        (world.chunks(1), batch),
        (world.chunks(2), world.chunks(2)),
        (batch, None),
        (None, world.chunks(2)),
    ]
    for left_spec, right_spec in pairs:
        a = world.place(left, left_spec, requires_grad=True) if left_spec else left.clone().requires_grad_()
        b = world.place(right, right_spec, requires_grad=True) if right_spec else right.clone().requires_grad_()
        made = a.bmm(b) if left_spec else torch.bmm(input=a, mat2=b)
        assert isinstance(made, ShardedTensor)
        full = made.full_tensor()
        assert_close(full, torch.bmm(left, right))
        world.backward((full * weights).sum())
        world.assert_gradient(a, plain_left.grad)
        world.assert_gradient(b, plain_right.grad)
    return len(pairs)


@BACKENDS
@pytest.mark.parametrize("num_places", [2, 4])
def test_batched_products_of_any_two_operands(worlds: Worlds, backend: str, num_places: int) -> None:
    assert min(worlds.check(backend, num_places, check_bmm)) == 8


def check_bmm_errors(world: World) -> bool:
    left, right = world.shard(torch.randn(2, 3, 4), world.chunks(2)), world.shard(torch.randn(2, 4, 5), world.chunks(1))
    with pytest.raises(RuntimeError, match="sharded along the dimension that is summed over"):
        torch.bmm(left, right)
    with pytest.raises(RuntimeError, match="size"):
        torch.bmm(left, torch.randn(2, 3, 5))
    return True


def test_batched_products_that_would_need_sums_are_refused(worlds: Worlds) -> None:
    assert all(worlds.check("group", 2, check_bmm_errors))
