"""``wavetrain view`` and Ctrl-C."""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest

from .command import PATIENCE, interrupt, run, start


def test_view_answers_on_this_machine_until_ctrl_c() -> None:
    process = start("view", "--json", "--schedule", "1f1b", "--ranks", 3, "--compare", "hanayo")
    try:
        assert process.stdout
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            text += line
        url = json.loads(text)["url"]
        address = urlsplit(url)
        assert address.hostname == "127.0.0.1"
        assert address.port
        with urllib.request.urlopen(url, timeout=PATIENCE) as page:
            assert "<html" in page.read().decode()
        with urllib.request.urlopen(f"{url}api/simulate?schedule=zb-wave&ranks=3&waves=1", timeout=PATIENCE) as answer:
            found = json.load(answer)
        assert [t["name"] for t in found["timelines"]] == ["zb-wave"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}api/simulate?schedule=zb-wav", timeout=PATIENCE)
        assert refused.value.code == 400
        assert "did you mean 'zb-wave'" in json.load(refused.value)["error"]
        refused.value.close()
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE):  # as a browser keeps one
            assert interrupt(process) == (0, "", "")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address.hostname, address.port), timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()


def test_view_refuses_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("view", "--port", taken.getsockname()[1])
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_ctrl_c_ends_a_long_search_with_one_line() -> None:
    process = start("simulate", "--schedule", "auto", "--ranks", 16, "--micro-batches", 128, "--hop-latency", 0.05)
    try:
        time.sleep(2)
        assert process.poll() is None, "the search was meant to take longer"
        code, out, err = interrupt(process)
        assert (code, out) == (128 + signal.SIGINT, "")
        assert err == "wavetrain: interrupted\n"
    finally:
        process.kill()
        process.communicate()
