"""The web server of the page: starlette on uvicorn, in a thread of the driver with an event loop of its own.

    GET /?token=...      once: sets the cookie and leads to /
    GET /                the page, and /static its parts
    GET /events          server-sent events: one for each part of the state that has changed
    GET /api/state       all of it, as JSON
    GET /api/stacks      the stacks of one worker

Everything is read only. `Guard` refuses what does not come from the user's own browser; `access` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import html
import os
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from gradwire.config import check_port
from gradwire.dashboard.access import Access, is_same_site
from gradwire.dashboard.collector import Collector, Row, State
from gradwire.dashboard.stacks import explain_failure, find_stacks
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.observe.log import get_logger
from gradwire.transports.tcp import is_loopback_host

try:
    import uvicorn
    from sse_starlette import EventSourceResponse, ServerSentEvent
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, RedirectResponse, Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ConfigurationError(
        f"the dashboard needs the package {(error.name or '').partition('.')[0]}: run pip install 'gradwire[dashboard]'"
    ) from error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from gradwire.rpc.agent import Agent

STATIC = Path(__file__).with_name("static")
INTERVAL_S = 1.0

_HOST = "127.0.0.1"
_STOP_S = 5.0
_MOST_CONNECTIONS = 64
_REQUEST_S = 10.0  # for a connection to send a request

_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

_log = get_logger(__name__)


class Dashboard:
    """The dashboard of a cluster; `gradwire.Cluster.dashboard` opens it.

    As a context manager it closes itself at the end. Notebooks show a link.
    """

    def __init__(self, agent: Agent, name: str, rows: Callable[[], Sequence[Row]], port: int = 0) -> None:
        self._name = name
        self._owner_pid = os.getpid()
        self._access = Access()
        self._lock = threading.Lock()  # guards _is_closed
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            self._listener = _listen(port)
            undo.callback(self._listener.close)
            self._port: int = self._listener.getsockname()[1]
            self._collector = Collector(agent, name, rows)
            undo.callback(self._collector.close)
            self._pages = _Pages(agent, self._collector, self._access, self._port)
            config = uvicorn.Config(
                self._pages.app,
                http=_Connection,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_MOST_CONNECTIONS,  # the event loop accepts as many at once, before it looks at one
                timeout_graceful_shutdown=1,
            )
            self._server = uvicorn.Server(config)
            self._thread = threading.Thread(target=self._run, name="gradwire-driver-dashboard", daemon=True)
            self._thread.start()
            undo.pop_all()
        _open_dashboards.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"http://{_HOST}:{self._port}/"
        return f"<Dashboard of {self._name}: {state}>"

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def port(self) -> int:
        """The port on loopback."""
        return self._port

    @property
    def url(self) -> str:
        """A link that opens the page in one browser, once; each look at this gives another."""
        return f"http://{_HOST}:{self._port}/?token={self._access.make_token()}"

    def _repr_html_(self) -> str:
        if self._is_closed:
            return f"<p>The page of {html.escape(self._name)} is closed.</p>"
        link = html.escape(self.url)
        return f'<p><a href="{link}" target="_blank" rel="noopener">Open the page of {html.escape(self._name)}</a></p>'

    def close(self) -> None:
        """Stop serving. Safe to call more than once."""
        if os.getpid() != self._owner_pid:  # before the lock, which a thread of the parent may have held
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        _open_dashboards.discard(self)
        self._pages.stop()
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._collector.close()
        self._listener.close()

    def leave_to_parent(self) -> None:
        """Close the copy of the socket in a process that the driver forked, so that the port ends with the driver."""
        self._listener.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            _log.exception("the dashboard of %s stopped unexpectedly", self._name)
        finally:
            self._pages.close()

    async def _serve(self) -> None:
        pump = asyncio.create_task(self._pages.pump())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pump


_open_dashboards: weakref.WeakSet[Dashboard] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for opened in tuple(_open_dashboards):
        opened.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _listen(port: int) -> socket.socket:
    check_port(port)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        listener.listen(_MOST_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"the dashboard cannot listen on port {port} of this machine: {error.strerror}; pass another port, or 0 for any"
        ) from error
    return listener


class _Connection(H11Protocol):
    """One connection. All users of the machine can open some, so their number and the time without a request have bounds."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._made_at = self.loop.time()
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # None before the first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > _MOST_CONNECTIONS:
            idle = [item for item in self.connections if isinstance(item, _Connection) and item.is_idle]
            oldest = min(idle, key=lambda item: item._made_at)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()

    def _expect_request(self) -> None:
        # uvicorn's own timer ends with the first byte, and there is none before the first request.
        self._stop_timer()
        self._idle_timer = self.loop.call_later(_REQUEST_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.is_idle:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()


class _Pages:
    """The page and the endpoints behind it. Only `stop` and `close` are called from other threads than the server's."""

    def __init__(self, agent: Agent, collector: Collector, access: Access, port: int) -> None:
        self._agent = agent
        self._collector = collector
        self._access = access
        self._cookie = f"gradwire-{port}"  # browsers send the cookies of all ports of a host
        self._pool = ThreadPoolExecutor(2, "gradwire-driver-dashboard")  # asks workers, which takes time
        # In memory: half a megabyte, and nothing else can be asked for.
        paths = [path for path in STATIC.rglob("*") if path.suffix in _MEDIA_TYPES]
        self._files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}
        self._state: State | None = None
        self._collected_at = 0.0  # when the collection of _state began, on the clock of the server's loop
        self._num_watching = 0
        self._failures: set[type[Exception]] = set()  # that were logged
        self._is_stopped = False
        self._changed: asyncio.Event | None = None  # set by the next state, which has an event of its own
        self._wanted: asyncio.Event | None = None
        self._collecting: asyncio.Lock | None = None  # held while the workers are asked: one at a time
        routes = [
            Route("/", self._page),
            Route("/events", self._events),
            Route("/api/state", self._get_state),
            Route("/api/stacks", self._stacks),
            Route("/static/{name:path}", self._static),
        ]
        self.app = Guard(Starlette(routes=routes), access, self._cookie)

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def pump(self) -> None:
        """Collect the state once a second while a page is open."""
        self._changed, self._wanted, self._collecting = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        while not self._is_stopped:
            if self._num_watching:
                await self._try_to_collect()
            self._wanted.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), INTERVAL_S)

    async def _try_to_collect(self) -> None:
        try:
            await self._collect()
        except Exception as error:
            if type(error) not in self._failures and not self._is_stopped:
                _log.exception("the dashboard could not be updated; this is logged once for each kind of error")
            self._failures.add(type(error))

    async def _collect(self) -> State:
        """Return a state that is not older than this call; those who wait at the same time share it."""
        assert self._changed is not None
        assert self._collecting is not None
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        async with self._collecting:
            if self._state is not None and self._collected_at >= asked_at:
                return self._state
            began_at = clock()
            state: State = await self._in_thread(self._collector.collect)
            self._state, self._collected_at = state, began_at
            self._changed.set()
            self._changed = asyncio.Event()
            return state

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *args))

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(self._files["index.html"])

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            return _problem(404, "no such file")
        return Response(self._files[name], media_type=_MEDIA_TYPES[Path(name).suffix])

    async def _get_state(self, request: Request) -> Response:
        try:
            state = await self._collect()
        except (GradwireError, RuntimeError) as error:
            return _problem(503, f"cannot query the workers: {error}")
        step = self._collector.choose(_chosen(request))
        return Response(msgspec.json.encode({**state.parts, "step": step}), media_type="application/json")

    async def _stacks(self, request: Request) -> Response:
        worker = request.query_params.get("worker", "")
        row = await self._in_thread(self._collector.find_row, worker)
        if row is None:
            return _problem(404, f"this cluster has no worker {worker!r}")
        pid, host = row.get("pid"), row.get("host") or ""
        try:
            found = await self._in_thread(find_stacks, self._agent, worker, pid, host)
        except GradwireError as error:
            return _problem(503, explain_failure(worker, error))
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def _events(self, request: Request) -> Response:
        return EventSourceResponse(self._stream(_chosen(request)), ping=15, send_timeout=10)

    async def _stream(self, context_id: int | None) -> AsyncIterator[ServerSentEvent]:
        assert self._wanted is not None
        sent: dict[str, bytes] = {}
        number = 0
        self._num_watching += 1
        self._wanted.set()  # the first page does not wait for the next second
        try:
            while not self._is_stopped:
                changed, state = self._changed, self._state
                assert changed is not None
                if state is not None and state.number != number:
                    number = state.number
                    parts = {**state.parts, "step": self._collector.choose(context_id)}
                    for name, part in parts.items():
                        data = msgspec.json.encode(part)
                        if sent.get(name) != data:
                            sent[name] = data
                            yield ServerSentEvent(data=data.decode(), event=name)
                    yield ServerSentEvent(data=str(number), event="tick")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), 0.25)
            yield ServerSentEvent(data="", event="closed")
        finally:
            self._num_watching -= 1


def _chosen(request: Request) -> int | None:
    text = request.query_params.get("step", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _problem(status: int, text: str) -> Response:
    return Response(msgspec.json.encode({"error": text}), status, media_type="application/json")


class Guard:
    """Lets requests of the user's browser through, and adds the headers that keep other pages out."""

    def __init__(self, app: ASGIApp, access: Access, cookie: str) -> None:
        self._app = app
        self._access = access
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no other kind is served

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name for name, _ in message["headers"]}
                added = [(k.encode(), v.encode()) for k, v in _HEADERS.items() if k.encode() not in named]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        answer = self._refuse(scope) or self._redeem(scope)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = _headers_of(scope)
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not is_loopback_host(headers.get("host", "")):
            return _refusal(421, "This page is only available on this machine: open it as 127.0.0.1 or localhost.")
        if scope["method"] not in ("GET", "HEAD"):
            return _refusal(405, "This page is read-only.")
        if scope["path"] == "/" and _token_of(scope) is not None:
            return None
        if not self._has_session(headers.get("cookie", "")):
            return _refusal(
                403,
                "This page needs a link with a new token. Run `gradwire dashboard`, or print cluster.dashboard().url "
                "in your program; each link works once.",
            )
        if scope["path"] != "/" and not is_same_site(headers.get("sec-fetch-site")):
            return _refusal(403, "Requests from other sites are refused.")
        return None

    def _redeem(self, scope: Scope) -> Response | None:
        token = _token_of(scope)
        if scope["path"] != "/" or token is None:
            return None
        if scope["method"] != "GET":
            return _refusal(405, "Open the link with a GET request; it works once.")
        session = self._access.redeem(token)
        if session is None:
            if self._has_session(_headers_of(scope).get("cookie", "")):
                return RedirectResponse("/", 303)  # the same browser again
            return _refusal(
                403,
                "This link has already been used, or belongs to another cluster. Run `gradwire dashboard`, or print "
                "cluster.dashboard().url in your program to get a new link.",
            )
        answer = RedirectResponse("/", 303)
        # Lax: with Strict, a browser that comes from a notebook would not send it right after this answer.
        answer.set_cookie(self._cookie, session, httponly=True, samesite="lax", path="/")
        return answer

    def _has_session(self, header: str) -> bool:
        pairs = [item.strip().partition("=") for item in header.split(";")]
        return any(name == self._cookie and self._access.is_session(value) for name, _, value in pairs)


def _headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _token_of(scope: Scope) -> str | None:
    found = parse_qs(scope["query_string"].decode("latin-1")).get("token")
    return found[0] if found else None


def _refusal(status: int, text: str) -> Response:
    # Not kept alive: a client that sends requests and reads no answers would hold a connection that is never idle.
    return Response(f"{text}\n", status, {"connection": "close"}, "text/plain; charset=utf-8")
