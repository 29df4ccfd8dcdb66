"""References as users meet them, between real processes."""

from __future__ import annotations

import pickle
import threading
import time
import traceback

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import NotTheOwner, RpcTimeout, RRefError, UnknownWorker
from gradwire.rpc import RRef
from gradwire.testing import wait_until
from rref import tasks


@pytest.fixture
def names(cluster: Cluster) -> list[str]:
    return [worker.name for worker in cluster.workers]


def test_a_value_is_made_and_stays_there(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(2.5,), kwargs={"size": 4})
    assert not rref.is_owner()
    assert (rref.owner_name(), rref.owner().id) == (names[0], 0)
    assert rref.to_here().tolist() == [2.5] * 4
    assert rref.confirmed_by_owner()
    rref.to_here().zero_()  # a copy
    assert rref.to_here().tolist() == [2.5] * 4


def test_by_rank_and_by_worker_info(names: list[str]) -> None:
    assert rpc.remote(1, tasks.make, args=(1.0,)).owner_name() == names[1]
    assert rpc.remote(rpc.get_worker_info(names[2]), tasks.make, args=(1.0,)).owner_name() == names[2]
    with pytest.raises(UnknownWorker, match="nobody"):
        rpc.remote("nobody", tasks.make, args=(1.0,))


def test_a_value_of_ones_own(names: list[str]) -> None:
    value = [1, {"a": torch.ones(2)}]
    rref = RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rpc.rpc_sync(names[0], tasks.is_owner, args=(rref,)) == (False, "driver", True)


def test_remote_to_oneself() -> None:
    with Cluster.local(1):
        rref = rpc.remote("driver", tasks.make, args=(3.0,))
        assert rref.is_owner()
        assert rref.to_here().tolist() == [3.0] * 3
        assert rref.local_value() is rref.local_value()
        failed = rpc.remote("driver", tasks.fail, args=("here",))
        with pytest.raises(ValueError, match="here"):
            failed.to_here()


def test_only_the_owner_has_the_value_itself(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    with pytest.raises(
        NotTheOwner, match=rf"Cannot call localValue\(\) on a non-local reference. Call it on {names[0]}"
    ):
        rref.local_value()
    assert isinstance(NotTheOwner("x"), RuntimeError)


def test_third_workers_and_the_way_back(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(7.0,))
    assert rpc.rpc_sync(names[1], tasks.fetch, args=(rref,)).tolist() == [7.0] * 3
    assert rpc.rpc_sync(names[1], tasks.forward, args=(rref, [names[2], names[0], names[1]])).tolist() == [7.0] * 3
    assert rpc.rpc_sync(names[0], tasks.is_owner, args=(rref,)) == (True, names[0], True)
    back = rpc.rpc_sync(names[2], tasks.hand_back, args=(rref,))
    assert back.owner_name() == names[0]
    assert back.to_here().tolist() == [7.0] * 3
    own = RRef(["mine"])
    back = rpc.rpc_sync(names[1], tasks.hand_back, args=(own,))
    assert back.is_owner()
    assert back.local_value() is own.local_value()
    back.close()
    assert own.local_value() == ["mine"]


def test_closing_one_of_two_that_share_a_fork(names: list[str]) -> None:
    """A reference that this worker passes to itself is another one, and each may be closed alone."""
    first = rpc.remote(names[0], tasks.make, args=(3.0,))
    second = rpc.rpc_sync(rpc.get_worker_info(), tasks.hand_back, args=(first,))
    first.close()
    assert second.to_here().tolist() == [3.0] * 3
    with pytest.raises(RRefError, match="deleted"):
        first.to_here()
    again = rpc.rpc_sync(rpc.get_worker_info(), tasks.hand_back, args=(second,))
    del second
    assert again.to_here().tolist() == [3.0] * 3
    again.close()
    wait_until(lambda: not any(tasks.counts()), 20.0, "that nothing is left here")


def test_results_and_containers(names: list[str]) -> None:
    rref = rpc.rpc_sync(names[1], tasks.own, args=(torch.arange(3),))
    assert rref.owner_name() == names[1]
    assert rpc.rpc_sync(names[2], tasks.fetch_inside, args=({"list": [(1, rref)]},)).tolist() == [0, 1, 2]
    assert rpc.rpc_sync(names[2], tasks.open_box, args=(tasks.Box(rref),)).tolist() == [0, 1, 2]
    twice = rpc.rpc_sync(names[2], tasks.fetch_all, args=([rref, rref, rref],))
    assert [item.tolist() for item in twice] == [[0, 1, 2]] * 3
    many = [rpc.remote(names[number % 3], tasks.make, args=(float(number),)) for number in range(50)]
    fetched = rpc.rpc_sync(names[1], tasks.fetch_all, args=(many,))
    assert [item[0].item() for item in fetched] == list(range(50))


def test_a_reference_to_a_reference(names: list[str]) -> None:
    inner = rpc.remote(names[0], tasks.make, args=(4.0,))
    outer = rpc.remote(names[1], tasks.hand_back, args=(inner,))
    del inner
    assert outer.to_here().to_here().tolist() == [4.0] * 3


def test_passed_on_before_it_is_made(names: list[str]) -> None:
    """Nobody waits for the value before it is needed, and everybody gets it once it is there."""
    rref = rpc.remote(names[0], tasks.wait_gate)
    future = rpc.rpc_async(names[1], tasks.forward, args=(rref, [names[2]]))
    assert not future.done()
    rpc.rpc_sync(names[0], tasks.open_gate)
    assert future.wait() == rref.to_here() > 0


def test_what_the_function_raises_comes_with_the_value(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.fail, args=("broken",))
    with pytest.raises(ValueError, match="broken"):
        rref.to_here()
    with pytest.raises(ValueError, match="broken") as caught:
        rpc.rpc_sync(names[1], tasks.fetch, args=(rref,))
    printed = "".join(traceback.format_exception(caught.value))
    assert f"of worker '{names[0]}'" in printed
    assert "in fail" in printed
    with pytest.raises(ValueError, match="broken"):
        rref.rpc_sync().item()


def test_a_function_that_is_not_there(names: list[str]) -> None:
    rref = rpc.remote(names[0], "no.such.module:function")
    with pytest.raises(Exception, match=r"no\.such\.module"):
        rref.to_here()
    assert not rref.confirmed_by_owner()


def test_functions_that_answer_later(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.later, args=(names[1], 6.0))
    assert rref.to_here().tolist() == [6.0] * 3


def test_methods_of_the_value(names: list[str]) -> None:
    counter = rpc.remote(names[0], tasks.Counter, args=(10,))
    assert counter.rpc_sync().add(1) == 11
    assert counter.rpc_sync(timeout=5).add(2, times=3) == 17
    assert counter.rpc_async().add(1).wait() == 18
    result = counter.remote().add(2)
    assert (result.owner_name(), result.to_here()) == (names[0], 20)
    assert counter.rpc_sync().add_later(-5, names[1]) == 25
    assert counter.remote().add_later(-5, names[1]).to_here() == 30
    with pytest.raises(KeyError, match="no such thing"):
        counter.rpc_sync().fail()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        counter.rpc_sync().nothing_of_the_kind()
    mine = RRef(tasks.Counter(1))
    assert (mine.rpc_sync().add(1), mine.rpc_async().add(1).wait(), mine.remote().add(1).to_here()) == (2, 3, 4)
    assert mine.local_value().value == 4


def test_the_type_of_the_value(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.Counter, args=(1,))
    assert rref._get_type() is tasks.Counter
    assert rref._get_type(blocking=False).wait() is tasks.Counter
    assert RRef(3)._get_type() is int


def test_the_future_of_the_creation(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    assert rref._get_future().wait() is None
    assert rref.confirmed_by_owner()


def test_pickling_outside_of_messages_is_refused(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    with pytest.raises(
        RuntimeError, match="Can not pickle rref in python pickler, rref can only be pickled when using RPC"
    ):
        pickle.dumps(rref)


def test_repr_shows_owner_and_state(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rref.to_here()
    assert repr(rref).endswith(f"owned by {names[0]}, confirmed>")
    assert repr(RRef(1)).endswith("owned here by driver, ready>")
    assert "driver" in rpc.rpc_sync(names[1], repr, args=(RRef(1),))


def test_a_value_that_takes_too_long(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.wait_gate)
    started = time.monotonic()
    with pytest.raises(RpcTimeout, match=names[0]):
        rref.to_here(timeout=0.2)
    assert time.monotonic() - started < 30
    rpc.rpc_sync(names[0], tasks.open_gate)
    assert rref.to_here() > 0  # only the fetch had ended


def test_a_creation_that_takes_too_long(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.wait_gate, timeout=0.2)
    with pytest.raises(RpcTimeout):
        rref._get_future().wait()
    with pytest.raises(RpcTimeout):
        rref.to_here()
    rpc.rpc_sync(names[0], tasks.open_gate)


def test_one_deadline_for_making_and_fetching(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.wait_gate, timeout=0)
    started = time.monotonic()
    with pytest.raises(RpcTimeout, match=r"not created on worker worker0 within 0\.3 s") as caught:
        rref.to_here(timeout=0.3)
    assert caught.value.worker == names[0]
    assert time.monotonic() - started < 30
    rpc.rpc_sync(names[0], tasks.open_gate)
    assert rref.to_here() > 0


def test_closed_before_it_was_fetched(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rref._get_future().wait()
    rref.close()
    with pytest.raises(RRefError, match="deleted"):
        rref.to_here()


def test_close_lets_go_at_once(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rref.to_here()
    rref.close()
    rref.close()
    with pytest.raises(RRefError, match=r"Cannot call to_here\(\) on it after deletion"):
        rref.to_here()
    with pytest.raises(RRefError, match="deleted"):
        rpc.rpc_sync(names[1], tasks.fetch, args=(rref,))
    wait_until(lambda: rpc.rpc_sync(names[0], tasks.counts)[0] == 0, 20.0, "that the value is freed")


def test_fetches_are_recorded(names: list[str]) -> None:
    """A value made from our tensor, fetched and differentiated: as in one process."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with gw.autograd.context() as ctx:
        rref = rpc.remote(names[0], tasks.scaled, args=(x, 3.0))
        again = rref.remote().pow(2)
        ctx.backward((again.to_here() + rref.to_here()).sum())
        found = ctx.gradients()[x]
    reference = x.detach().clone().requires_grad_()
    (reference * 3).pow(2).add(reference * 3).sum().backward()
    assert reference.grad is not None
    assert torch.equal(found, reference.grad)


def test_fetches_through_third_workers_are_recorded(names: list[str]) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with gw.autograd.context() as ctx:
        rref = rpc.remote(names[0], tasks.scaled, args=(x, 3.0))
        ctx.backward(rpc.rpc_sync(names[1], tasks.forward, args=(rref, [names[2]])).sum())
        assert ctx.gradients()[x].tolist() == [3.0] * 3


def test_backward_from_a_value_elsewhere(names: list[str]) -> None:
    x = torch.tensor([2.0], requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.remote(names[0], tasks.scaled, args=(x, 5.0)).backward(ctx)
        assert ctx.gradients()[x].tolist() == [5.0]
    with gw.autograd.context() as ctx:
        RRef(rpc.rpc_sync(names[0], tasks.scaled, args=(x, 5.0))).backward(ctx)
        assert ctx.gradients()[x].tolist() == [5.0]
    RRef((x * 4).sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0]
    with pytest.raises(RRefError, match="'dist_autograd_ctx_id'"):
        rpc.remote(names[0], tasks.make, args=(1.0, 1)).backward()
    with (
        gw.autograd.context() as ctx,
        pytest.raises(RuntimeError, match=r"RRef should contain a tensor for .backward\(\)"),
    ):
        rpc.remote(names[0], tasks.Counter, args=(1,)).backward(ctx)


def test_from_many_threads(names: list[str]) -> None:
    results: list[float] = []

    def work(number: int) -> None:
        for step in range(20):
            rref = rpc.remote(names[number % 3], tasks.make, args=(float(step),))
            results.append(rpc.rpc_sync(names[(number + 1) % 3], tasks.fetch, args=(rref,))[0].item())

    threads = [threading.Thread(target=work, args=(number,), name=f"test-{number}") for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == sorted(float(step) for step in range(20) for _ in range(6))


def test_small_values_come_with_the_answer(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Made for this reference alone, and used for nothing else yet: it cannot have changed."""
    asked: list[str] = []
    original = RRef._ask

    def count(self: RRef[torch.Tensor], function: str, *args: object) -> object:
        asked.append(function)
        return original(self, function, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RRef, "_ask", count)
    rref = rpc.remote(names[0], tasks.make, args=(2.0,))
    assert rref.to_here().tolist() == [2.0] * 3
    assert asked == []
    assert rref.to_here().tolist() == [2.0] * 3
    assert rpc.remote(names[0], tasks.make, args=(2.0, 1000)).to_here().sum() == 2000  # too large to send unasked
    assert rpc.remote(names[0], tasks.shared_tensor).to_here().tolist() == [0.0, 0.0]
    assert len(asked) == 3


def test_a_value_that_changed_before_it_was_fetched(names: list[str]) -> None:
    """Whoever else can change it: its methods through this reference, others through theirs, its owner's own code."""
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rref.rpc_sync().add_(1)
    assert rref.to_here().tolist() == [2.0] * 3
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rpc.rpc_sync(names[1], tasks.add_one_there, args=(rref,))
    assert rref.to_here().tolist() == [2.0] * 3
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rpc.rpc_sync(names[0], tasks.add_one_here, args=(rref,))
    assert rref.to_here().tolist() == [2.0] * 3
    for make in (tasks.shared_tensor, tasks.shared_view, tasks.shared_memory, tasks.shared_detached):
        rref = rpc.remote(names[0], make)
        rref._get_future().wait()
        rpc.rpc_sync(names[0], tasks.change_shared)
        assert rref.to_here().tolist() == [1.0, 1.0], make
        rpc.rpc_sync(names[0], tasks.change_shared, args=(-1.0,))
