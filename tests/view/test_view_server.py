from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from wavetrain.errors import InputError
from wavetrain.schedule.timeline import Timeline
from wavetrain.view.server import MAX_QUERY, ViewServer, is_loopback

from .conftest import MakeTimeline

Answer = tuple[int, dict[str, str], bytes]


def ask(server: ViewServer, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def error_of(answer: Answer) -> str:
    text = json.loads(answer[2])["error"]
    assert isinstance(text, str)
    return text


@pytest.fixture
def server(make_timeline: MakeTimeline) -> Iterator[ViewServer]:
    def simulate(given: Mapping[str, str]) -> list[Timeline]:
        if given.get("schedule") == "bug":
            raise RuntimeError("secret inside")
        num_ranks = int(given.get("ranks", "2"))
        if num_ranks < 1:
            raise InputError(f"{num_ranks} ranks: a pipeline needs at least 1")
        names = [given["schedule"], *([given["compare"]] if "compare" in given else [])]
        return [make_timeline(num_ranks, 2, name=name) for name in names]

    with ViewServer(simulate, names=["gpipe", "1f1b"], settings={"schedule": "gpipe"}) as running:
        yield running


def test_page_and_its_headers(server: ViewServer) -> None:
    status, headers, body = ask(server, "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert "Python" not in headers["Server"]
    assert b'"settings": {"schedule": "gpipe"}' in body


def test_head_has_no_body(server: ViewServer) -> None:
    status, headers, body = ask(server, "/", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


def test_simulation(server: ViewServer) -> None:
    status, headers, body = ask(server, "/api/simulate?schedule=gpipe&compare=1f1b&ranks=3&waves=")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert [(t["name"], t["ranks"]) for t in json.loads(body)["timelines"]] == [("gpipe", 3), ("1f1b", 3)]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/simulate?schedule=gpipe&ranks=0", 400, "0 ranks: a pipeline needs at least 1"),
        ("/api/simulate?schedule=gpipe&rank=2", 400, "did you mean 'ranks'"),
        ("/api/simulate?schedule=gpipe&schedule=1f1b", 400, "schedule is given twice"),
        ("/api/simulate?schedule=%ff", 400, "cannot be read"),
        ("/api/simulate?" + "&".join(["schedule=a"] * 100), 400, "cannot be read"),
        ("/api/simulate?schedule=" + "a" * MAX_QUERY, 414, f"at most {MAX_QUERY}"),
        ("/api/simulate/", 404, "the page is at /"),
        ("/../../etc/passwd", 404, "the page is at /"),
        ("/page.py", 404, "the page is at /"),
        ("//[bad", 404, "the page is at /"),
    ],
)
def test_refusals_say_why(server: ViewServer, path: str, status: int, words: str) -> None:
    answer = ask(server, path)
    assert answer[0] == status
    assert words in error_of(answer)


def test_a_bug_is_told_to_the_terminal_not_to_the_client(server: ViewServer, capfd: pytest.CaptureFixture[str]) -> None:
    answer = ask(server, "/api/simulate?schedule=bug")
    assert answer[0] == 500
    assert "secret" not in answer[2].decode()
    assert "Traceback" not in answer[2].decode()
    assert "RuntimeError: secret inside" in capfd.readouterr().err


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods(server: ViewServer, method: str) -> None:
    answer = ask(server, "/", method=method)
    assert answer[0] == 405
    assert answer[1]["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("", 403),
    ],
)
def test_only_loopback_hosts_are_answered(server: ViewServer, host: str, status: int) -> None:
    assert ask(server, "/", headers={"Host": host})[0] == status


@pytest.mark.parametrize(("site", "status"), [("same-origin", 200), ("none", 200), ("cross-site", 403), ("same-site", 403)])
def test_other_sites_cannot_start_simulations(server: ViewServer, site: str, status: int) -> None:
    assert ask(server, "/api/simulate?schedule=gpipe", headers={"Sec-Fetch-Site": site})[0] == status


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("host", False)],
)
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_simulations_take_turns(make_timeline: MakeTimeline) -> None:
    begun, finish = threading.Event(), threading.Event()

    def simulate(given: Mapping[str, str]) -> list[Timeline]:
        begun.set()
        finish.wait(30)
        return [make_timeline()]

    with ViewServer(simulate, max_simulations=1, patience_seconds=0.05) as server:
        results: list[Answer] = []
        first = threading.Thread(target=lambda: results.append(ask(server, "/api/simulate?schedule=a")))
        first.start()
        assert begun.wait(30)
        busy = ask(server, "/api/simulate?schedule=b")
        assert busy[0] == 503
        assert "busy" in error_of(busy)
        assert busy[1]["Retry-After"] == "1"
        assert ask(server, "/")[0] == 200
        finish.set()
        first.join(30)
        assert results[0][0] == 200
        assert ask(server, "/api/simulate?schedule=c")[0] == 200


def test_a_client_that_left_costs_no_simulation(make_timeline: MakeTimeline) -> None:
    begun, finish, count = threading.Event(), threading.Event(), []

    def simulate(given: Mapping[str, str]) -> list[Timeline]:
        count.append(given["schedule"])
        begun.set()
        finish.wait(30)
        return [make_timeline()]

    with ViewServer(simulate, max_simulations=1, patience_seconds=30) as server:
        first = threading.Thread(target=lambda: ask(server, "/api/simulate?schedule=a"))
        first.start()
        assert begun.wait(30)
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            gone.sendall(b"GET /api/simulate?schedule=b HTTP/1.0\r\nHost: localhost\r\n\r\n")
        finish.set()
        first.join(30)
        assert ask(server, "/api/simulate?schedule=c")[0] == 200
        assert ask(server, "/api/simulate?schedule=d")[0] == 200
    assert count == ["a", "c", "d"]


def test_without_a_simulator_the_page_only_shows(make_timeline: MakeTimeline) -> None:
    with ViewServer(None, timelines=[make_timeline(name="run")]) as server:
        assert ask(server, "/")[0] == 200
        assert ask(server, "/api/simulate?schedule=gpipe")[0] == 404


def test_a_taken_port_is_a_clear_error(server: ViewServer) -> None:
    with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1 port {server.port}"):
        ViewServer(None, port=server.port)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'ranks'"):
        ViewServer(None, settings={"rank": "2"})


def test_interrupt_ends_it_cleanly() -> None:
    code = "from wavetrain.view.server import serve; serve(None, announce=lambda url: print(url, flush=True)); print('bye')"
    process: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (out, err, process.returncode) == ("bye\n", "", 0)


def test_it_stops_and_frees_its_port(make_timeline: MakeTimeline) -> None:
    with ViewServer(None, timelines=[make_timeline()]) as server:
        port = server.port
    with ViewServer(None, port=port) as again:
        assert ask(again, "/")[0] == 200


def test_a_spare_connection_is_not_answered_after_the_end(make_timeline: MakeTimeline) -> None:
    with ViewServer(None, timelines=[make_timeline()]) as server:
        spare = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        assert ask(server, "/")[0] == 200  # by now the spare one has been accepted, too
    with contextlib.closing(spare), contextlib.suppress(OSError):
        spare.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert spare.recv(100) == b""


def raw(server: ViewServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize(
    "request_text", [b"\r\n\r\n", b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"BREW / HTTP/1.1\r\n\r\n"]
)
def test_nonsense_does_not_stop_it(server: ViewServer, request_text: bytes) -> None:
    raw(server, request_text)
    assert ask(server, "/")[0] == 200


def test_payload_of_a_simulation_is_json(server: ViewServer) -> None:
    payload: dict[str, Any] = json.loads(ask(server, "/api/simulate?schedule=%3C%2Fscript%3E")[2])
    assert payload["timelines"][0]["name"] == "</script>"
