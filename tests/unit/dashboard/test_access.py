"""Who may see the page."""

from __future__ import annotations

import pytest

from gradwire.dashboard.access import Access, is_same_site


def test_a_token_becomes_a_session_once() -> None:
    access = Access()
    token = access.make_token()
    session = access.redeem(token)
    assert session is not None
    assert access.is_session(session)
    assert access.redeem(token) is None
    assert access.is_session(session)


def test_other_texts_are_neither_tokens_nor_sessions() -> None:
    access = Access()
    token = access.make_token()
    for text in ("", "x", token[:-1], token + "x", "é"):
        assert access.redeem(text) is None
        assert not access.is_session(text)
    assert not access.is_session(token)
    assert access.redeem(token) is not None


def test_unused_tokens_and_sessions_are_bounded() -> None:
    access = Access()
    tokens = [access.make_token() for _ in range(100)]
    assert access.redeem(tokens[0]) is None
    assert access.redeem(tokens[-1]) is not None
    sessions = [access.redeem(access.make_token()) for _ in range(200)]
    assert [access.is_session(item or "") for item in (sessions[0], sessions[-1])] == [False, True]


@pytest.mark.parametrize(
    ("site", "is_allowed"),
    [(None, True), ("same-origin", True), ("none", True), ("cross-site", False), ("same-site", False)],
)
def test_other_sites_may_not_ask_for_data(site: str | None, is_allowed: bool) -> None:
    assert is_same_site(site) is is_allowed
