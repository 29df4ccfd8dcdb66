"""Exceptions go to another worker and come back as themselves, or at least as text; hostile ones do no harm."""

from __future__ import annotations

import collections
import sys
import traceback
from typing import Any

import pytest
import torch

from gradwire import errors
from gradwire.config import Limits
from gradwire.errors import RemoteTraceback
from gradwire.types import Trust
from gradwire.wire import serialization
from gradwire.wire.exceptions import MAX_CHAIN, clean, describe_exception, rebuild_exception
from gradwire.wire.framing import FrameDecoder, encode
from gradwire.wire.messages import ErrorInfo, Failure

LIMITS = Limits()


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:
        return caught


def over_the_wire(info: ErrorInfo) -> ErrorInfo:
    (frame,) = FrameDecoder(LIMITS, accept=frozenset({Failure})).feed(encode(Failure(1, info)))
    assert isinstance(frame.message, Failure)
    return frame.message.error


def round_trip(exc: BaseException, trust: Trust = "data", worker: str = "w1") -> Exception:
    return rebuild_exception(over_the_wire(describe_exception(raised(exc), worker, LIMITS)), trust)


class Custom(Exception):
    """Its constructor must not run on the other side."""

    def __init__(self, code: int, extra: Any) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.extra = extra


class WithInner(Exception):
    class Inner(Exception):
        pass


def unicode_error() -> UnicodeDecodeError:
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("bad value"),
        ValueError(),
        ValueError("two", 2),
        KeyError("k"),
        FileNotFoundError(2, "No such file or directory", "/tmp/x"),
        OSError(28, "No space left on device"),
        unicode_error(),
        ImportError("no module", name="m", path="/p"),
        AttributeError("no attribute", name="a"),
        StopIteration(4),
        SyntaxError("bad", ("f.py", 3, 4, "x = ", 3, 5)),
        ZeroDivisionError("division by zero"),
        torch.OutOfMemoryError("out of memory"),
        torch.linalg.LinAlgError("singular"),
        errors.RpcTimeout("too late", worker="w9", phase="run"),
        errors.WorkerLost("gone", worker="w9", last_seen=1.5),
        errors.RemoteCallFailed("x", worker="w9", type_name="m.E"),
        errors.NotExposed("not exposed"),
        errors.CannotSend("a lock"),
        errors.UnknownWorker("who"),
    ],
    ids=lambda exc: type(exc).__name__,
)
@pytest.mark.parametrize("trust", ["code", "data"])
def test_known_types_come_back_as_themselves(exc: Exception, trust: Trust) -> None:
    arrived = round_trip(exc, trust)
    assert type(arrived) is type(exc)
    assert str(arrived) == str(exc)
    assert arrived.args == exc.args
    assert {name: value for name, value in vars(arrived).items() if value is not None} == vars(exc)
    for name in ("filename", "errno", "name", "path", "reason", "value", "lineno"):
        assert getattr(arrived, name, None) == getattr(exc, name, None)


def test_traceback_and_worker_are_the_cause() -> None:
    arrived = round_trip(ValueError("bad value"), worker="trainer")
    assert isinstance(arrived.__cause__, RemoteTraceback)
    assert arrived.__cause__.worker == "trainer"
    printed = "".join(traceback.format_exception(arrived))
    assert "gradwire.errors.RemoteTraceback: Remote traceback of worker 'trainer':" in printed
    assert "in raised" in printed
    assert printed.endswith("ValueError: bad value\n")


def test_own_class_is_known_with_code_trust_only() -> None:
    arrived = round_trip(Custom(7, [1, (2,)]), "code")
    assert type(arrived) is Custom
    assert (arrived.code, arrived.extra, str(arrived)) == (7, [1, (2,)], "code 7")
    assert type(round_trip(WithInner.Inner("x"), "code")) is WithInner.Inner
    stranger = round_trip(Custom(7, None), "data")
    assert type(stranger) is errors.RemoteCallFailed
    assert stranger.worker == "w1"
    assert stranger.type_name.endswith("test_exceptions.Custom")
    assert "code 7" in str(stranger)


def test_what_is_no_plain_data_is_left_out() -> None:
    arrived = round_trip(Custom(7, object()), "code")
    assert type(arrived) is Custom
    assert arrived.code == 7
    assert not hasattr(arrived, "extra")
    assert str(round_trip(ValueError(torch.ones(1)))) == "tensor([1.])"


@pytest.mark.parametrize("exc", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("trust", ["code", "data"])
def test_exits_do_not_end_the_caller(exc: BaseException, trust: Trust) -> None:
    arrived = round_trip(exc, trust)
    assert type(arrived) is errors.RemoteCallFailed
    assert type(exc).__name__ in arrived.type_name


def test_notes_travel() -> None:
    exc = ValueError("x")
    exc.__dict__["__notes__"] = ["see also y"]
    assert vars(round_trip(exc))["__notes__"] == ["see also y"]


def test_link_to_the_documentation_is_shown_once_however_far_an_error_travels() -> None:
    error = errors.WorkerLost("worker c is lost", "c")
    for worker in ("b", "a"):
        traceback.format_exception(error)  # as a log on the way does
        arrived = round_trip(error, worker=worker)
        assert isinstance(arrived, errors.WorkerLost)
        assert str(arrived) == "worker c is lost"
        assert arrived.__notes__ == [f"See {errors.DOCS_URL}errors.html#workerlost"]
        error = arrived
    at_its_origin = "".join(traceback.format_exception(errors.WorkerLost("worker c is lost", "c")))
    printed = "".join(traceback.format_exception(error))
    shown = at_its_origin.count(errors.DOCS_URL)
    assert shown == 1 or sys.version_info < (3, 11), "Python 3.10 prints notes with the help of some libraries only"
    assert printed.count(errors.DOCS_URL) == shown <= 1


def test_peer_cannot_choose_the_link() -> None:
    error = errors.WorkerLost("worker c is lost", "c")
    error.__dict__["docs_url"] = "https://example.org/"
    assert round_trip(error).docs_url == f"{errors.DOCS_URL}errors.html#workerlost"  # type: ignore[attr-defined]


def test_every_hop_is_shown() -> None:
    at_b = round_trip(ValueError("deep"), worker="c")
    at_a = round_trip(at_b, worker="b")
    assert type(at_a) is ValueError
    first = at_a.__cause__
    assert isinstance(first, RemoteTraceback)
    second = first.__cause__
    assert isinstance(second, RemoteTraceback)
    assert (first.worker, second.worker) == ("b", "c")
    printed = "".join(traceback.format_exception(at_a))
    assert printed.index("of worker 'c':") < printed.index("of worker 'b':")


def test_causes_and_contexts_travel_up_to_a_depth() -> None:
    exc: BaseException = ValueError("0")
    for number in range(1, 30):
        try:
            raise ValueError(str(number)) from exc
        except ValueError as caught:
            exc = caught
    info: ErrorInfo | None = describe_exception(exc, "w", LIMITS)
    messages = []
    while info is not None:
        messages.append(info.message)
        info = info.cause
    assert messages == [str(number) for number in range(29, 29 - MAX_CHAIN, -1)]


def test_context_is_used_unless_suppressed() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904
    except ValueError as caught:
        exc = caught
    cause = describe_exception(exc, "w", LIMITS).cause
    assert cause is not None
    assert cause.type_name == "builtins:KeyError"
    exc.__suppress_context__ = True
    assert describe_exception(exc, "w", LIMITS).cause is None


def test_a_peer_cannot_make_a_traceback_that_carries_another_error() -> None:
    forged = RemoteTraceback("w", "text")
    forged.info = "not an error"
    arrived = round_trip(forged, "code")
    assert type(arrived) is errors.RemoteCallFailed
    assert describe_exception(forged, "w", LIMITS).type_name == "gradwire.errors:RemoteTraceback"


def test_circular_chain_ends() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    info = describe_exception(first, "w", LIMITS)
    assert info.cause is not None
    assert info.cause.cause is None


class Hostile(Exception):
    def __str__(self) -> str:
        raise SystemExit

    __repr__ = __str__

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")


class Recursive(Exception):
    def __str__(self) -> str:
        return str(self)


class Lying(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # noqa: PLE0307


class OddMeta(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise ValueError("no module")


class Odd(Exception, metaclass=OddMeta):
    pass


@pytest.mark.parametrize("kind", [Hostile, Recursive, Lying, Odd, UnicodeDecodeError], ids=["a", "b", "c", "d", "e"])
@pytest.mark.parametrize("trust", ["code", "data"])
def test_describing_never_raises(kind: type[Exception], trust: Trust) -> None:
    info = over_the_wire(describe_exception(raised(kind.__new__(kind)), "w", LIMITS))
    arrived = rebuild_exception(info, trust)
    assert issubclass(type(arrived), Exception)
    assert len(str(arrived)) >= 0


@pytest.mark.parametrize("text", ["x" * (100 << 20), "\x1b" * 300_000, "é\n" * 300_000])
def test_long_texts_lose_their_middle(text: str) -> None:
    info = describe_exception(raised(ValueError(text)), "w", LIMITS)
    total = len(info.message.encode()) + len(info.traceback.encode()) + len(info.details)
    assert total <= LIMITS.error_text_bytes
    assert "characters omitted" in info.message
    assert info.traceback.startswith("Traceback")
    assert type(rebuild_exception(over_the_wire(info), "data")) is ValueError


def test_chain_shares_the_limit() -> None:
    exc: BaseException | None = None
    for _ in range(20):
        made = ValueError("y" * 50_000)
        made.__cause__ = exc
        exc = raised(made)
    assert exc is not None
    limits = Limits(error_text_bytes=10_000)
    assert len(encode(Failure(1, describe_exception(exc, "w", limits)))) < 12_000


@pytest.mark.parametrize("size", [0, 1, 16, 40, 100])
def test_clean_fits_any_size(size: int) -> None:
    assert len(clean("é\x1b" * 500, size).encode()) <= size


def test_escape_sequences_are_neutralised_on_both_sides() -> None:
    text = "a\x1b]0;title\x07\r\x9b2J\u202eb\ttab\nline"
    shown = "a\\x1b]0;title\\x07\\r\\x9b2J\\u202eb\ttab\nline"
    assert clean(text) == shown
    assert describe_exception(ValueError(text), "w", LIMITS).message == shown
    details = serialization.pack(((text,), {"note": text, "__notes__": [text]}), "data", LIMITS).body
    hostile = ErrorInfo(
        "builtins:ValueError", text, text, f"w{text}", details, ErrorInfo(f"m:{text}", text, text, text)
    )
    for info in (hostile, ErrorInfo(f"m:E{text}", text, text, text, details)):
        printed = "".join(traceback.format_exception(rebuild_exception(info, "data")))
        assert not set("\x1b\x07\r\x9b\u202e") & set(printed)


@pytest.mark.parametrize(
    "type_name",
    [
        "os:system",
        "builtins:eval",
        "builtins:int",
        "builtins:BaseException",
        "builtins:SystemExit",
        "builtins:__import__",
        "torch:nn.Module",
        "torch:no_such",
        "torch.no_such_module:E",
        "gradwire.errors:annotations",
        "no_such:E",
        "builtins:ValueError.__class__",
        "builtins:ExceptionGroup",
        "builtins:UnicodeDecodeError",
        "",
        ":",
        "builtins",
    ],
)
@pytest.mark.parametrize("trust", ["code", "data"])
def test_unknown_types_become_remote_call_failed(type_name: str, trust: Trust) -> None:
    arrived = rebuild_exception(ErrorInfo(type_name, "text", "tb", "w"), trust)
    assert type(arrived) is errors.RemoteCallFailed
    assert "text" in str(arrived)


@pytest.mark.parametrize(
    "details",
    [
        b"\xc1",
        b"\x91" * 50_000,
        serialization.pack(5, "data", LIMITS).body,
        serialization.pack((1, 2), "data", LIMITS).body,
        serialization.pack(((), [1]), "data", LIMITS).body,
        serialization.pack((("x",), {"with_traceback": 1, "args": 5, "__class__": 2}), "data", LIMITS).body,
    ],
)
def test_bad_details_do_no_harm(details: bytes) -> None:
    arrived = rebuild_exception(ErrorInfo("gradwire.errors:RpcError", "text", "tb", "w", details), "data")
    assert type(arrived) is errors.RpcError
    assert callable(arrived.with_traceback)
    assert isinstance(str(arrived), str)


def test_module_is_not_imported_for_a_class() -> None:
    sys.modules.pop("this", None)
    arrived = rebuild_exception(ErrorInfo("this:E", "text", "tb", "w"), "code")
    assert type(arrived) is errors.RemoteCallFailed
    assert "this" not in sys.modules


class Strange(Exception):
    """Cannot be made by `__new__` with its arguments, and its text needs what did not travel."""

    def __new__(cls, *, secret: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *, secret: Any) -> None:
        self.secret = secret

    def __str__(self) -> str:
        return f"<{self.secret.value}>"


def test_class_that_cannot_be_rebuilt_becomes_remote_call_failed() -> None:
    holder = collections.namedtuple("holder", "value")("s")
    arrived = round_trip(Strange(secret=holder), "code")
    assert type(arrived) is errors.RemoteCallFailed
    assert "<s>" in str(arrived)
