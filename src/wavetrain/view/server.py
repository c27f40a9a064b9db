"""The page, served with live controls. Standard library only.

The server knows nothing of schedules: it is given a function from query parameters to timelines, and the names to offer. It
listens on the loopback interface unless told otherwise, answers two things, and refuses the rest::

    GET /                   the page
    GET /api/simulate?…     {"timelines": [...]} (see payload.py), or {"error": "..."} with status 400, 414, 500 or 503

Any page in the user's browser can send requests to a loopback port. So a request must name a loopback host (against DNS
rebinding), a simulation must come from the page itself (``Sec-Fetch-Site``), and no answer may be read by another origin.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import sys
import threading
import traceback
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

from wavetrain.errors import InputError, WavetrainError, require_keys
from wavetrain.schedule.timeline import Timeline
from wavetrain.view.page import content_security_policy, render_page
from wavetrain.view.payload import dump_payloads

Simulate: TypeAlias = Callable[[Mapping[str, str]], Sequence[Timeline]]
"""From query parameters, as text, to the timelines to show. Raises WavetrainError for what it refuses."""

PARAMETERS: Final = (
    "schedule",
    "compare",
    "ranks",
    "micro_batches",
    "waves",
    "forward",
    "backward_input",
    "backward_weight",
    "hop_latency",
    "memory_cap",
)
"""The keys that a :data:`Simulate` may be given. A control that the user left empty is not among them."""

MAX_ACTIONS: Final = 400_000
"""The most actions that a request should simulate: about a second, and 20 MB. For the :data:`Simulate` to enforce."""

MAX_QUERY: Final = 2_000
"""The longest query that is read, in characters."""


class ViewServer:
    """A server of the page.

    It listens once made, and answers while its ``with`` block runs::

        with ViewServer(simulate, names=["gpipe", "1f1b"], settings={"schedule": "1f1b", "ranks": "4"}) as server:
            print(server.url)
            server.wait()

    Args:
        simulate: what a change of the controls runs. None: the page has no controls and shows ``timelines`` only.
        names: the schedules to choose from.
        settings: what the controls say at first, by :data:`PARAMETERS`.
        timelines: what is shown at first. Empty: the page simulates ``settings`` as soon as it is open.
        host: the address to listen on. Other than loopback, anyone who reaches it may run simulations.
        port: the port to listen on; 0 takes a free one.
        max_simulations: how many may run at a time.
        patience_seconds: how long a request waits for its turn before it is told that the server is busy.
    """

    def __init__(
        self,
        simulate: Simulate | None,
        *,
        names: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        timelines: Sequence[Timeline] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        max_simulations: int = 2,
        patience_seconds: float = 5.0,
    ) -> None:
        settings = dict(settings or {})
        require_keys("the page's settings", settings, PARAMETERS)
        live = {"names": list(names), "settings": settings} if simulate is not None else None
        page = render_page(timelines, live=live).encode()
        policy = f"{content_security_policy(live=live is not None)}; frame-ancestors 'none'"
        turns = _Turns(max_simulations, patience_seconds)
        site = _Site(page=page, policy=policy, simulate=simulate, turns=turns, check_host=is_loopback(host))
        try:
            self._http = _Listener((host, port), site)
        except (OSError, OverflowError) as error:
            raise InputError(f"cannot listen on {host} port {port}: {error}; give another --host or --port") from error
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        host = str(self._http.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def __enter__(self) -> ViewServer:
        # Polling often makes the end of the block prompt, and costs nothing that can be measured.
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, name="wavetrain-view", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Until interrupted."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)


def serve(
    simulate: Simulate | None,
    *,
    names: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    timelines: Sequence[Timeline] = (),
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = False,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve the page until Ctrl-C; see :class:`ViewServer`. ``announce`` is called with the address once it answers."""
    server = ViewServer(simulate, names=names, settings=settings, timelines=timelines, host=host, port=port)
    with contextlib.suppress(KeyboardInterrupt), server:
        if announce is not None:
            announce(server.url)
        if open_browser:
            webbrowser.open(server.url)
        server.wait()


def is_loopback(host: str) -> bool:
    """Whether a host name or address, without port, can only mean this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Turns:
    """At most so many simulations at a time; the others wait a while, and not too many of them."""

    WAITING = 16

    def __init__(self, running: int, patience_seconds: float) -> None:
        self._running = threading.BoundedSemaphore(running)
        self._present = threading.BoundedSemaphore(running + self.WAITING)
        self._patience = patience_seconds

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Yields whether it is this thread's turn."""
        if not self._present.acquire(blocking=False):
            yield False
            return
        try:
            if not self._running.acquire(timeout=self._patience):
                yield False
                return
            try:
                yield True
            finally:
                self._running.release()
        finally:
            self._present.release()


@dataclass(frozen=True, kw_only=True)
class _Site:
    """What all requests share."""

    page: bytes
    policy: str
    simulate: Simulate | None
    turns: _Turns
    check_host: bool


class _Listener(ThreadingHTTPServer):
    daemon_threads = True  # a simulation that still runs does not hold up the end

    def __init__(self, address: tuple[str, int], site: _Site) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.site = site
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        with self._lock:
            self._open.add(connection)
        return connection, address

    def close_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().close_request(request)

    def server_close(self) -> None:
        """Stop listening, and hang up: browsers keep spare connections open, which would be answered for a while yet."""
        super().server_close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that went away is no news
            traceback.print_exc()


class _Refusal(Exception):
    def __init__(self, status: HTTPStatus, text: str) -> None:
        self.status, self.text = status, text
        super().__init__(text)


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    server_version = "wavetrain"
    sys_version = ""
    timeout = 30  # seconds for a client to send its request

    def do_GET(self) -> None:
        try:
            self._answer()
        except _Refusal as refusal:
            self._refuse(refusal.status, refusal.text)
        except OSError:
            raise  # the client went away
        except Exception:
            traceback.print_exc()
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "a bug in wavetrain: its terminal shows what went wrong")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _refuse_method(self) -> None:
        text = f"{self.command} is not allowed: this server only answers GET and HEAD"
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, text, {"Allow": "GET, HEAD"})

    def _answer(self) -> None:
        site = self.server.site
        if site.check_host and not is_loopback(_without_port(self.headers.get("Host", ""))):
            raise _Refusal(HTTPStatus.FORBIDDEN, "this server answers to localhost and 127.0.0.1 only")
        path, _, query = self.path.partition("?")
        if path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", site.page)
        elif path == "/api/simulate" and site.simulate is not None:
            if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
                raise _Refusal(HTTPStatus.FORBIDDEN, "only the page itself may ask for a simulation")
            self._simulate(site.simulate, query)
        else:
            raise _Refusal(HTTPStatus.NOT_FOUND, "there is nothing here; the page is at /")

    def _simulate(self, simulate: Simulate, query: str) -> None:
        if len(query) > MAX_QUERY:
            text = f"the query has {len(query)} characters; at most {MAX_QUERY} are read"
            raise _Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, text)
        try:
            given = _parameters(query)
            with self.server.site.turns.turn() as mine:
                if self._client_left():
                    return
                if not mine:
                    raise _Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "busy with other simulations; try again in a moment")
                body = dump_payloads(simulate(given)).encode()
        except WavetrainError as error:
            raise _Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error
        self._send(HTTPStatus.OK, "application/json", body)

    def _client_left(self) -> bool:
        """Whether the client closed the connection: the page does, when a control changes again."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _refuse(self, status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None) -> None:
        retry = {"Retry-After": "1"} if status is HTTPStatus.SERVICE_UNAVAILABLE else {}
        self._send(status, "application/json", json.dumps({"error": text}).encode(), {**retry, **(headers or {})})

    def _send(self, status: HTTPStatus, content_type: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.server.site.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: only what went wrong on our side is told, as a traceback."""


for _method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
    setattr(_Handler, f"do_{_method}", _Handler._refuse_method)


def _parameters(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=4 * len(PARAMETERS), errors="strict")
    except ValueError as error:
        raise InputError("the query cannot be read; write it as key=value&key=value, in UTF-8") from error
    require_keys("the query", (key for key, _ in pairs), PARAMETERS)
    given: dict[str, str] = {}
    for key, value in pairs:
        if key in given:
            raise InputError(f"{key} is given twice; give it once")
        given[key] = value
    return {key: value for key, value in given.items() if value.strip()}


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.rpartition(":")[0] if ":" in host else host
