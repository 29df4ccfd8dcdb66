"""What a function raises reaches its caller."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwire import rpc
from gradwire.errors import CannotSend, RemoteCallFailed
from gradwire.rpc import Agent
from rpc import handlers
from rpc.puppets import Puppet, PuppetError

WAYS = ["a", "b"]


@pytest.mark.parametrize("to", WAYS)
@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError, torch.OutOfMemoryError, FileNotFoundError])
def test_own_type_with_traceback_and_worker(pair: list[Agent], to: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="words") as caught:
        rpc.rpc_sync(to, handlers.fail, args=(kind, "words"))
    cause = caught.value.__cause__
    assert f"of worker '{to}'" in str(cause)
    assert "in fail\n    raise kind(*args)" in str(cause)


def test_errors_of_torch_keep_their_type(pair: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        rpc.rpc_sync("b", torch.add, args=(torch.ones(2), torch.ones(3)))


def test_required_arguments(pair: list[Agent]) -> None:
    with pytest.raises(handlers.NeedsArguments, match="4 and five") as caught:
        rpc.rpc_sync("b", handlers.raise_needs_arguments)
    assert (caught.value.first, caught.value.second) == (4, "five")


def test_keyword_only_arguments(pair: list[Agent]) -> None:
    with pytest.raises(handlers.KeywordOnly, match="code 9") as caught:
        rpc.rpc_sync("b", handlers.raise_keyword_only)
    assert caught.value.code == 9


def test_attributes_that_cannot_travel_stay_behind(pair: list[Agent]) -> None:
    with pytest.raises(handlers.CarriesLock, match="locked") as caught:
        rpc.rpc_sync("b", handlers.raise_carries_lock)
    assert caught.value.kept == 7
    assert not hasattr(caught.value, "lock")


def test_exception_that_cannot_be_shown(pair: list[Agent]) -> None:
    with pytest.raises(RemoteCallFailed, match=r"CannotBeShown on worker 'b'.*unavailable"):
        rpc.rpc_sync("b", handlers.raise_cannot_be_shown)


def test_class_that_is_not_known_here(pair: list[Agent]) -> None:
    with pytest.raises(RemoteCallFailed, match="nobody knows this class") as caught:
        rpc.rpc_sync("b", handlers.raise_local_class)
    assert caught.value.worker == "b"
    assert caught.value.type_name.endswith("raise_local_class.<locals>.Unknown")


def test_huge_message_is_cut(pair: list[Agent]) -> None:
    with pytest.raises(ValueError, match="characters omitted") as caught:
        rpc.rpc_sync("b", handlers.raise_long, args=(100 << 20,))
    assert len(str(caught.value)) < 64 << 10
    assert rpc.rpc_sync("b", operator.add, args=(1, 2)) == 3


def test_deep_traceback_is_cut(pair: list[Agent]) -> None:
    with pytest.raises(ValueError, match="bottom") as caught:
        rpc.rpc_sync("b", handlers.raise_deep, args=(700,))
    assert len(str(caught.value.__cause__)) < 128 << 10


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
@pytest.mark.parametrize("to", WAYS)
def test_what_would_end_a_process_ends_only_the_call(pair: list[Agent], kind: type[BaseException], to: str) -> None:
    with pytest.raises(RemoteCallFailed, match=kind.__name__):
        rpc.rpc_sync(to, handlers.fail, args=(kind, "stop"))
    assert rpc.rpc_sync(to, operator.add, args=(1, 2)) == 3


def test_handler_that_exits_its_process_politely_is_no_exit(workers: Callable[..., list[Puppet]]) -> None:
    first, _second = workers(2)
    with pytest.raises(PuppetError) as caught:
        first.do("rpc.rpc_sync('w1', sys.exit, args=(3,))")
    assert caught.value.kind == "RemoteCallFailed"
    assert first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))") == 3


def test_every_hop_shows_its_traceback(make_agents: Any) -> None:
    a, *_ = make_agents("a", "b", "c", "d")
    with pytest.raises(ValueError, match="far away") as caught:
        a.call("b", handlers.forward, ("b", "c", handlers.forward, "c", "d", handlers.fail, ValueError, "far away"))
    hops, link = [], caught.value.__cause__
    while link is not None:
        hops.append(getattr(link, "worker", None))
        link = link.__cause__
    assert hops == ["b", "c", "d"]


def test_every_hop_shows_between_processes(workers: Callable[..., list[Puppet]]) -> None:
    first, _second, _third = workers(3)
    with pytest.raises(PuppetError) as caught:
        first.do("rpc.rpc_sync('w1', h.pass_on, args=('w2', h.fail, ZeroDivisionError, 'far away'))")
    assert caught.value.kind == "ZeroDivisionError"
    assert "of worker 'w1'" in caught.value.traceback
    assert "of worker 'w2'" in caught.value.traceback


@pytest.mark.parametrize("to", WAYS)
def test_result_that_cannot_travel(pair: list[Agent], to: str) -> None:
    with pytest.raises(CannotSend, match="lock"):
        rpc.rpc_sync(to, handlers.make_lock)
    assert rpc.rpc_sync(to, operator.add, args=(1, 2)) == 3


def test_argument_that_cannot_travel(pair: list[Agent]) -> None:
    with pytest.raises(CannotSend, match="lock"):
        rpc.rpc_sync("b", handlers.echo, args=(handlers.make_lock(),))
    assert pair[0].is_quiet


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("no_such_module_anywhere:f", ModuleNotFoundError),
        ("operator:no_such_function", AttributeError),
        ("math:pi", TypeError),
        ("nonsense", ImportError),
    ],
)
def test_unknown_function(pair: list[Agent], name: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=name.partition(":")[2] or name):
        rpc.rpc_sync("b", name)


def test_wrong_arguments(pair: list[Agent]) -> None:
    with pytest.raises(TypeError, match="raise_long"):
        rpc.rpc_sync("b", handlers.raise_long)
