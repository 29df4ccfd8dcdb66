"""Decide who may see the page: one-time tokens, sessions, and requests of other sites.

The page listens on loopback, where every process of the machine can reach it, and every web page that its user opens. So a
request needs a cookie that only a link with a token gives, and a Host header that names loopback: a page whose own name was
made to point here (DNS rebinding) sends another.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict

_MOST_TOKENS = 32  # links that were given out and not used
_MOST_SESSIONS = 64


class Access:
    """Tokens become sessions, once each. No sockets, no clocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both; links are made in any thread
        self._tokens: OrderedDict[str, None] = OrderedDict()
        self._sessions: OrderedDict[str, None] = OrderedDict()

    def make_token(self) -> str:
        """Return a token for one link; the oldest unused ones are forgotten."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._tokens[token] = None
            while len(self._tokens) > _MOST_TOKENS:
                self._tokens.popitem(last=False)
        return token

    def redeem(self, token: str) -> str | None:
        """Return a new session for a token that was not used before; None for any other text."""
        with self._lock:
            found = _find(self._tokens, token)
            if found is None:
                return None
            del self._tokens[found]
            session = secrets.token_urlsafe(32)
            self._sessions[session] = None
            while len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
            return session

    def is_session(self, session: str) -> bool:
        with self._lock:
            return _find(self._sessions, session) is not None


def _find(known: OrderedDict[str, None], text: str) -> str | None:
    """Return the equal text, in a time that does not depend on how much of it is right."""
    given = text.encode()
    matches = [item for item in known if secrets.compare_digest(item.encode(), given)]
    return matches[0] if matches else None


def is_same_site(fetch_site: str | None) -> bool:
    """Return whether a browser's Sec-Fetch-Site allows a request for data; programs and old browsers send none."""
    return fetch_site in (None, "same-origin", "none")
