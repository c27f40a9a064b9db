from __future__ import annotations

import json

import pytest

from .command import run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


def test_doctor_tries_things_out() -> None:
    done = run("doctor", "--json")
    found = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert found["two ranks"]["ok"], found["two ranks"]
    assert found["torch"]["ok"]
    assert isinstance(found["bf16 products on the CPU"]["ok"], bool)  # true or false, but the command lives to tell
    assert done.returncode == (0 if found["bf16 products on the CPU"]["ok"] else 1)
