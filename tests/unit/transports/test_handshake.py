"""Both sides of the handshake against each other, and against somebody who lies."""

from __future__ import annotations

import msgspec
import pytest

from gradwire.errors import AuthenticationFailed, IdentityTaken
from gradwire.transports.handshake import Admit, CallerHandshake, Identity, ListenerHandshake
from gradwire.types import Trust, WorkerAddress, WorkerInfo
from gradwire.versions import Versions, own_versions
from gradwire.wire.messages import Call, Challenge, Hello, Message, Proof, Refused, Welcome

TOKEN = b"the cluster's token"
VERSIONS = Versions("3.11.9", "2.13.0+cpu", "0.1.0")


def make_address(name: str, incarnation: int = 5) -> WorkerAddress:
    return WorkerAddress(WorkerInfo(name, 0), incarnation, "host", ())


def make_identity(
    name: str,
    *,
    token: bytes = TOKEN,
    trust: Trust = "code",
    incarnation: int = 5,
    versions: Versions = VERSIONS,
) -> Identity:
    return Identity(address=make_address(name, incarnation), trust=trust, token=token, versions=versions)


CALLER, LISTENER = make_identity("caller"), make_identity("listener")


def make_caller(identity: Identity = CALLER, to: WorkerAddress | None = None) -> CallerHandshake:
    return CallerHandshake(identity, to or make_address("listener"), "calls")


def make_listener(identity: Identity = LISTENER, admit: Admit = lambda address: None) -> ListenerHandshake:
    return ListenerHandshake(identity, admit)


def shake_hands(
    caller: CallerHandshake,
    listener: ListenerHandshake,
    caller_certified: frozenset[str] | None = None,
    listener_certified: frozenset[str] | None = None,
) -> list[Message]:
    """Carries messages between them until the caller is content; returns all of them."""
    messages: list[Message] = [caller.begin()]
    while True:
        messages.append(listener.on_message(messages[-1], caller_certified))
        answer = caller.on_message(messages[-1], listener_certified)
        if answer is None:
            return messages
        messages.append(answer)


def test_both_sides_learn_who_the_other_is() -> None:
    caller, listener = make_caller(), make_listener()
    messages = shake_hands(caller, listener)
    assert [type(message) for message in messages] == [Hello, Challenge, Proof, Welcome]
    assert caller.peer == LISTENER.address
    assert listener.is_open
    assert (listener.hello.sender, listener.hello.lane) == (CALLER.address, "calls")


def test_both_sides_learn_how_many_ends_the_other_has_noticed() -> None:
    asked: list[WorkerAddress] = []
    caller = CallerHandshake(
        CALLER, make_address("listener", 0), "calls", num_ends=lambda address: asked.append(address) or 3
    )
    listener = make_listener()
    challenge = listener.on_message(caller.begin(), None)
    proof = caller.on_message(challenge, None)
    assert proof is not None
    listener.on_message(proof, None)
    assert caller.on_message(Welcome(5), None) is None
    assert (caller.num_ends, listener.num_ends) == (5, 3)
    assert asked == [LISTENER.address]  # with its incarnation


@pytest.mark.parametrize("incarnation", [0, 5])
def test_any_incarnation_or_exactly_one_can_be_meant(incarnation: int) -> None:
    listener = make_listener()
    shake_hands(make_caller(to=make_address("listener", incarnation)), listener)
    assert listener.is_open


def test_the_token_never_travels() -> None:
    messages = shake_hands(make_caller(), make_listener())
    assert all(TOKEN not in msgspec.msgpack.encode(message) for message in messages)


def test_no_two_handshakes_are_alike() -> None:
    first, second = (shake_hands(make_caller(), make_listener()) for _ in range(2))
    assert all(one != other for one, other in zip(first[:3], second[:3], strict=True))


def test_the_caller_finds_a_listener_without_the_token() -> None:
    caller, listener = make_caller(), make_listener(make_identity("listener", token=b"guess"))
    with pytest.raises(AuthenticationFailed, match="listening at listener's address does not have"):
        shake_hands(caller, listener)
    assert caller.peer is None
    assert not listener.is_open


@pytest.mark.parametrize("token", [b"", b"guess", TOKEN + b"\0"])
def test_the_listener_finds_a_caller_without_the_token(token: bytes) -> None:
    listener = make_listener()
    challenge = listener.on_message(make_caller(make_identity("caller", token=token)).begin(), None)
    assert isinstance(challenge, Challenge)
    for proof in (b"", b"\0" * 32, challenge.proof):  # the last one: its own proof, reflected
        with pytest.raises(AuthenticationFailed, match="wrong token"):
            listener.on_message(Proof(proof), None)
        assert not listener.is_open


def test_an_empty_token_is_not_every_token() -> None:
    empty = make_identity("listener", token=b"")
    with pytest.raises(AuthenticationFailed):
        shake_hands(make_caller(), make_listener(empty))
    both = make_listener(empty)
    shake_hands(make_caller(make_identity("caller", token=b"")), both)
    assert both.is_open


@pytest.mark.parametrize(
    ("caller", "to", "problem"),
    [
        (CALLER, make_address("other"), "this is listener, not other"),
        (CALLER, make_address("listener", 4), "has restarted"),
        (CALLER, make_address("listener", 6), "has restarted"),
        (
            make_identity("caller", trust="data"),
            make_address("listener"),
            'peer has trust="data", this worker trust="code"',
        ),
    ],
    ids=["name", "older incarnation", "newer incarnation", "trust"],
)
def test_the_listener_refuses_what_does_not_fit(caller: Identity, to: WorkerAddress, problem: str) -> None:
    listener = make_listener()
    with pytest.raises(AuthenticationFailed, match=problem):
        listener.on_message(make_caller(caller, to).begin(), None)
    assert not listener.is_open


OTHER_VERSIONS = [
    (Versions("3.11.9", "2.13.0+cpu", "0.2.0"), "gradwire 0.2.0", "gradwire 0.1.0"),
    (Versions("3.12.1", "2.13.0+cpu", "0.1.0"), "Python 3.12.1", "Python 3.11.9"),
    (Versions("3.11.9", "2.12.1", "0.1.0"), "torch 2.12.1", r"torch 2.13.0\+cpu"),
]


@pytest.mark.parametrize(("other", "theirs", "ours"), OTHER_VERSIONS, ids=["gradwire", "python", "torch"])
def test_the_listener_names_both_versions_and_the_caller_learns_of_it(other: Versions, theirs: str, ours: str) -> None:
    caller, listener = make_caller(make_identity("caller", versions=other)), make_listener()
    words = f"worker listener runs {ours}, but worker caller runs {theirs}; .*install "
    with pytest.raises(AuthenticationFailed, match=words) as caught:
        listener.on_message(caller.begin(), None)
    assert not listener.is_open
    with pytest.raises(AuthenticationFailed, match=f"listener refused the connection: {words}"):
        caller.on_message(Refused(str(caught.value)), None)


@pytest.mark.parametrize(("other", "theirs", "ours"), OTHER_VERSIONS, ids=["gradwire", "python", "torch"])
def test_the_caller_looks_at_the_versions_of_a_listener_that_does_not_care(
    other: Versions, theirs: str, ours: str
) -> None:
    caller, listener = make_caller(), make_listener(make_identity("listener", versions=other))
    # As a listener that takes any version would answer: with a proof that holds.
    listener._check = lambda hello, certified: None  # type: ignore[method-assign]
    with pytest.raises(AuthenticationFailed, match=f"worker caller runs {ours}, but worker listener runs {theirs}"):
        caller.on_message(listener.on_message(caller.begin(), None), None)
    assert caller.peer is None


@pytest.mark.parametrize(
    ("trust", "other"),
    [
        ("code", Versions("3.11.2", "2.13.1+cu126", "0.1.0")),
        ("data", Versions("3.12.1", "2.12.0", "0.1.0")),
    ],
)
def test_versions_that_go_together(trust: Trust, other: Versions) -> None:
    listener = make_listener(make_identity("listener", trust=trust))
    shake_hands(make_caller(make_identity("caller", trust=trust, versions=other)), listener)
    assert listener.is_open


def test_versions_cannot_be_changed_on_the_way() -> None:
    caller, listener = make_caller(), make_listener()
    challenge = listener.on_message(caller.begin(), None)
    with pytest.raises(AuthenticationFailed, match="does not have this cluster's token"):
        caller.on_message(msgspec.structs.replace(challenge, versions=OTHER_VERSIONS[0][0]), None)
    changed = msgspec.structs.replace(caller.begin(), versions=msgspec.structs.replace(VERSIONS, python="3.11.1"))
    with pytest.raises(AuthenticationFailed, match="does not have this cluster's token"):
        caller.on_message(make_listener().on_message(changed, None), None)


def test_a_worker_says_what_it_runs_with() -> None:
    assert Identity(address=make_address("x"), trust="code", token=b"").versions == own_versions()


@pytest.mark.parametrize("nonce", [b"", b"short", b"x" * 15, b"x" * 17])
def test_a_nonce_has_one_length(nonce: bytes) -> None:
    hello = msgspec.structs.replace(make_caller().begin(), nonce=nonce)
    with pytest.raises(AuthenticationFailed, match="nonce"):
        make_listener().on_message(hello, None)


def test_a_listener_of_another_name_is_refused() -> None:
    caller = make_caller()
    challenge = make_listener().on_message(caller.begin(), None)
    assert isinstance(challenge, Challenge)
    with pytest.raises(AuthenticationFailed, match="expected listener, but impostor answered"):
        caller.on_message(msgspec.structs.replace(challenge, sender=make_address("impostor")), None)
    assert caller.peer is None


def test_a_recorded_handshake_is_worth_nothing() -> None:
    recorded = shake_hands(make_caller(), make_listener())
    listener = make_listener()
    assert isinstance(listener.on_message(recorded[0], None), Challenge)
    with pytest.raises(AuthenticationFailed, match="wrong token"):
        listener.on_message(recorded[2], None)
    assert not listener.is_open
    caller = make_caller()
    with pytest.raises(AuthenticationFailed, match="does not have this cluster's token"):
        caller.on_message(recorded[1], None)
    assert caller.peer is None


@pytest.mark.parametrize("num_before", [0, 1, 2])
@pytest.mark.parametrize("kind", [Hello, Proof, Challenge, Welcome, Refused, Call])
def test_the_listener_takes_each_message_in_its_place_only(kind: type[Message], num_before: int) -> None:
    caller, listener = make_caller(), make_listener()
    sent: list[Message] = [caller.begin()]
    if num_before >= 1:
        sent.append(_answer(caller, listener, sent[0]))
    if num_before == 2:
        listener.on_message(sent[1], None)
    examples: dict[type[Message], Message] = {
        Hello: sent[0],
        Proof: sent[1] if num_before else Proof(b"x" * 32),
        Challenge: Challenge(b"n" * 16, CALLER.address, VERSIONS, b"p" * 32),
        Welcome: Welcome(),
        Refused: Refused("no"),
        Call: Call(1, "f", 0.0, 0, 0),
    }
    if (kind, num_before) in ((Hello, 0), (Proof, 1)):
        assert isinstance(listener.on_message(examples[kind], None), Challenge | Welcome)
        return
    with pytest.raises(AuthenticationFailed, match=f"{kind.__name__} out of order"):
        listener.on_message(examples[kind], None)
    assert listener.is_open is (num_before == 2)


def _answer(caller: CallerHandshake, listener: ListenerHandshake, hello: Message) -> Message:
    answer = caller.on_message(listener.on_message(hello, None), None)
    assert isinstance(answer, Proof)
    return answer


def test_the_caller_takes_each_message_in_its_place_only() -> None:
    caller, listener = make_caller(), make_listener()
    for early in (Welcome(), Proof(b"x"), caller.begin()):
        with pytest.raises(AuthenticationFailed, match="out of order"):
            caller.on_message(early, None)
    challenge = listener.on_message(caller.begin(), None)
    caller.on_message(challenge, None)
    with pytest.raises(AuthenticationFailed, match="Challenge out of order"):
        caller.on_message(challenge, None)


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_refusal_is_passed_on(num_before: int) -> None:
    caller = make_caller()
    if num_before:
        caller.on_message(make_listener().on_message(caller.begin(), None), None)
    with pytest.raises(AuthenticationFailed, match="listener refused the connection: too late"):
        caller.on_message(Refused("too late"), None)


def test_certificates_must_be_good_for_the_names() -> None:
    listener = make_listener()
    shake_hands(make_caller(), listener, frozenset({"caller"}), frozenset({"*"}))
    assert listener.is_open
    with pytest.raises(AuthenticationFailed, match="caller"):
        make_listener().on_message(make_caller().begin(), frozenset({"somebody"}))
    with pytest.raises(AuthenticationFailed, match="listener"):
        shake_hands(make_caller(), make_listener(), None, frozenset({"somebody"}))
    with pytest.raises(AuthenticationFailed):
        shake_hands(make_caller(), make_listener(), frozenset())


def test_a_caller_that_may_not_come_is_refused_once_it_has_proved_itself() -> None:
    asked: list[WorkerAddress] = []

    def admit(address: WorkerAddress) -> None:
        asked.append(address)
        if address.incarnation < 6:
            raise AuthenticationFailed("a newer incarnation of this worker is connected")

    older = make_listener(admit=admit)
    with pytest.raises(AuthenticationFailed, match="newer incarnation"):
        shake_hands(make_caller(), older)
    assert not older.is_open
    newer = make_listener(admit=admit)
    shake_hands(make_caller(make_identity("caller", incarnation=6)), newer)
    assert newer.is_open
    assert [address.incarnation for address in asked] == [5, 6]


def test_a_listener_that_may_not_answer_is_refused_once_it_has_proved_itself() -> None:
    asked: list[WorkerAddress] = []

    def admit(address: WorkerAddress) -> None:
        asked.append(address)
        raise IdentityTaken("rank 0 belongs to another worker")

    caller = CallerHandshake(CALLER, make_address("listener"), "calls", admit)
    with pytest.raises(AuthenticationFailed, match="token"):
        shake_hands(caller, make_listener(make_identity("listener", token=b"guess")))
    assert asked == []
    with pytest.raises(IdentityTaken, match="rank 0"):
        shake_hands(CallerHandshake(CALLER, make_address("listener"), "calls", admit), make_listener())
    assert asked == [LISTENER.address]


def test_a_caller_cannot_have_the_listeners_name() -> None:
    with pytest.raises(IdentityTaken, match="its own name"):
        shake_hands(make_caller(make_identity("listener")), make_listener())


@pytest.mark.parametrize(("is_taken", "kind"), [(True, IdentityTaken), (False, AuthenticationFailed)])
def test_the_reason_of_a_refusal_is_harmless_to_print(is_taken: bool, kind: type[Exception]) -> None:
    with pytest.raises(AuthenticationFailed, match=r"no\\x1b\[2J") as caught:
        make_caller().on_message(Refused("no\x1b[2J" + "x" * 5000, is_taken), None)
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 2500


def test_nobody_without_the_token_learns_about_incarnations() -> None:
    asked: list[WorkerAddress] = []
    listener = make_listener(admit=asked.append)
    listener.on_message(make_caller().begin(), None)
    with pytest.raises(AuthenticationFailed):
        listener.on_message(Proof(b"x" * 32), None)
    assert asked == []
