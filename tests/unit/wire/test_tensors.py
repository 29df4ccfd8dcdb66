"""Tensors of every dtype, layout and shape of view go there and come back; what cannot is refused with the reason."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

from fuzz import wire_samples as samples
from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError
from gradwire.wire import tensors
from gradwire.wire.framing import FrameDecoder
from gradwire.wire.messages import Call, TensorMeta

LIMITS = Limits()
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
SPARSE = [layout for layout in tensors.LAYOUTS if layout is not torch.strided]


@pytest.fixture(autouse=True)
def _checked_sparse_tensors() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def send(tensor: torch.Tensor) -> tuple[TensorMeta, list[bytes]]:
    meta, parts = tensors.describe(tensor, LIMITS)
    segments = [samples.bytes_of(part) for part in parts]
    assert tensors.validate(meta, LIMITS) == sum(map(len, segments))
    assert [part.num_bytes for part in tensors.iter_parts(meta)] == list(map(len, segments))
    return meta, segments


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    meta, segments = send(tensor)
    buffers = iter([bytearray(segment) for segment in segments])
    arrived = tensors.rebuild(meta, buffers)
    assert next(buffers, None) is None
    assert arrived.dtype is tensor.dtype
    assert arrived.shape == tensor.shape
    assert arrived.layout is tensor.layout
    assert arrived.is_leaf
    return arrived


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose bytes are all different; bool and sub-word floats cannot be made from numbers alike."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = (torch.arange(num_bytes) % 2 if dtype is torch.bool else torch.arange(num_bytes) % 60).to(torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return list(samples.bytes_of(tensor))


def can_be_copied(dtype: torch.dtype) -> bool:
    """Whether torch can copy tensors of a dtype that are not contiguous; 2.8 cannot for one of them."""
    if dtype is torch.float4_e2m1fn_x2:
        with contextlib.suppress(NotImplementedError):
            return of_dtype(dtype, 2, 2).t().contiguous().is_contiguous()
        return False
    return True


@pytest.mark.parametrize("dtype", tensors.DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = of_dtype(dtype, 3, 4)
    assert bits(round_trip(tensor)) == bits(tensor)
    assert round_trip(tensor[:0]).numel() == 0


@pytest.mark.parametrize("dtype", list(filter(can_be_copied, tensors.DTYPES)), ids=str)
def test_every_dtype_that_is_not_contiguous(dtype: torch.dtype) -> None:
    tensor = of_dtype(dtype, 3, 4).t()
    assert bits(round_trip(tensor)) == bits(tensor.contiguous())


@pytest.mark.parametrize("dtype", list(filter(can_be_copied, tensors.DTYPES)), ids=str)
def test_copy_into_every_dtype_and_stride(dtype: torch.dtype) -> None:
    tensor = of_dtype(dtype, 4, 3)[::2].t()
    target = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    tensors.copy_into(tensor, target)
    assert target.tolist() == bits(tensor.contiguous())


def test_copy_into_needs_the_exact_size() -> None:
    tensors.copy_into(torch.empty(0), torch.empty(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match="8 bytes and the target 4"):
        tensors.copy_into(torch.ones(2), torch.empty(4, dtype=torch.uint8))


BASE = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "view",
    [
        BASE,
        BASE[0],
        BASE[:, 1],
        BASE[..., ::2],
        BASE.transpose(0, 2),
        BASE.expand(5, 2, 3, 4),
        torch.tensor(3.5).expand(7),
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        BASE.flatten().unfold(0, 4, 2),
        torch.rand(1, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones((1,) * 64),
    ],
    ids=lambda view: f"{tuple(view.shape)}-{view.stride()}"[:40],
)
def test_views_send_what_they_show(view: torch.Tensor) -> None:
    meta, segments = send(view)
    assert meta.num_bytes == view.numel() * 4 == len(segments[0])
    assert torch.equal(round_trip(view), view)


def test_large_contiguous_part_is_not_copied() -> None:
    tensor = torch.zeros(4, 4096)
    _, (part,) = tensors.describe(tensor[1:3], LIMITS)
    view, owner = tensors.as_bytes(part)
    assert owner is part
    tensor[1, 0] = 1.0
    assert bytes(view) != bytes(len(view))


def test_rebuilt_tensor_uses_the_buffer() -> None:
    buffer = bytearray(24)
    arrived = tensors.rebuild(TensorMeta(samples.FLOAT32, (2, 3), 24), iter([buffer]))
    arrived.fill_(1.0)
    assert buffer != bytearray(24)
    assert not arrived._is_view()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_requires_grad_arrives_as_a_leaf(requires_grad: bool) -> None:
    tensor = torch.ones(2, 2, requires_grad=requires_grad) * 2
    _, (part,) = tensors.describe(tensor, LIMITS)
    assert not part.requires_grad
    assert round_trip(tensor).requires_grad is requires_grad


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parameter_stays_one(requires_grad: bool) -> None:
    arrived = round_trip(torch.nn.Parameter(torch.ones(3), requires_grad=requires_grad))
    assert type(arrived) is torch.nn.Parameter
    assert arrived.requires_grad is requires_grad


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conj_and_neg_bits_travel_without_a_copy(dtype: torch.dtype) -> None:
    base = of_dtype(dtype, 3, 4)
    meta, (part,) = tensors.describe(base.conj(), LIMITS)
    assert meta.flags == tensors.FLAG_CONJ
    assert part.data_ptr() == base.data_ptr()
    assert round_trip(base.conj()).is_conj()
    imag = base.conj().imag
    assert imag.is_neg()
    arrived = round_trip(imag)
    assert arrived.is_neg()
    assert arrived.resolve_neg().tolist() == imag.resolve_neg().tolist()


def test_meta_tensor_has_no_bytes() -> None:
    meta, segments = send(torch.empty(1000, 1000, device="meta", requires_grad=True))
    assert segments == []
    arrived = tensors.rebuild(meta, iter([]))
    assert arrived.is_meta
    assert arrived.requires_grad


def test_zeros_without_memory_are_sent_as_zeros() -> None:
    assert torch.equal(round_trip(torch._efficientzerotensor((3,))), torch.zeros(3))


def make_sparse(layout: torch.layout, dtype: torch.dtype) -> torch.Tensor:
    dense = torch.zeros(4, 6, dtype=dtype)
    dense[0, 1], dense[3, 4], dense[3, 5] = 1, 2, 3
    block = {"blocksize": (2, 3)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return dense.to_sparse(layout=layout, **block)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", SPARSE, ids=str)
def test_sparse_layouts(layout: torch.layout, dtype: torch.dtype) -> None:
    tensor = make_sparse(layout, dtype)
    assert torch.equal(round_trip(tensor).to_dense(), tensor.to_dense())
    if dtype.is_floating_point:
        assert round_trip(tensor.detach().requires_grad_()).requires_grad


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc], ids=str)
def test_batches_and_empty_sparse_tensors(layout: torch.layout) -> None:
    batch = torch.eye(3).repeat(2, 1, 1).to_sparse(layout=layout)
    assert torch.equal(round_trip(batch).to_dense(), batch.to_dense())
    empty = torch.zeros(3, 3).to_sparse(layout=layout)
    assert round_trip(empty)._nnz() == 0


def test_coo_coalesced_uncoalesced_hybrid_and_conjugated() -> None:
    twice = torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2.0, 3.0], (3,))
    assert not round_trip(twice).is_coalesced()
    assert round_trip(twice.coalesce()).is_coalesced()
    hybrid = torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 5), (3, 5))
    assert round_trip(hybrid).dense_dim() == 1
    conj = torch.sparse_coo_tensor([[0, 2]], torch.tensor([1 + 2j, 3j]).conj(), (3,))
    assert torch.equal(round_trip(conj).to_dense(), conj.to_dense())


class Labelled(torch.Tensor):
    pass


def refused_tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        ("quantized", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
        ("uint4", torch.empty(2, dtype=torch.uint4)),
        ("_mkldnn", torch.ones(2, 2).to_mkldnn()),
        ("Labelled", torch.ones(2).as_subclass(Labelled)),
        ("65 dims", torch.empty(0).expand((1,) * 64 + (0,))),
        ("parts are unknown", torch.empty(2, 2, layout=torch.sparse_coo, device="meta")),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "reason", ["nested", "quantized", "uint4", "_mkldnn", "Labelled", "65 dims", "parts are unknown"]
)
def test_refused_with_the_reason(reason: str) -> None:
    (tensor,) = [value for name, value in refused_tensors() if reason in name]
    with pytest.raises(CannotSend, match=reason):
        tensors.describe(tensor, LIMITS)


def test_fake_and_transformed_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2)
    with pytest.raises(CannotSend, match="FakeTensor"):
        tensors.describe(fake, LIMITS)

    def inside(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(CannotSend, match="vmap"):
            tensors.describe(row, LIMITS)
        return row

    assert torch.vmap(inside)(torch.ones(2, 2)).shape == (2, 2)


def test_device_that_is_missing_is_named() -> None:
    meta = TensorMeta(samples.FLOAT32, (1,), 4, device="ipu:0")
    assert tensors.validate(meta, LIMITS) == 4
    with pytest.raises(CannotSend, match=r"there is no ipu:0 in this process"):
        tensors.rebuild(meta, iter([bytearray(4)]))


def test_any_byte_of_a_bool_becomes_true_or_false() -> None:
    arrived = tensors.rebuild(TensorMeta(samples.BOOL, (4,), 4), iter([bytearray(b"\x00\x01\x02\xff")]))
    assert arrived.view(torch.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", [name for name in samples.bad_values() if name.startswith(("06_coo", "06_csr"))])
def test_bad_sparse_indices_are_refused(name: str) -> None:
    (frame,) = FrameDecoder(samples.LIMITS, accept=samples.ALL_TYPES).feed(samples.bad_values()[name])
    assert isinstance(frame.message, Call)
    with pytest.raises(DecodeError, match="not a valid tensor"):
        tensors.rebuild(frame.message.tensors[0], iter(frame.buffers))
