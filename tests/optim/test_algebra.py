"""What OptEx does with small matrices leaves the machine to whoever needs it."""

from __future__ import annotations

import os
import statistics
import threading
import time

import numpy as np
import pytest
import torch
from threadpoolctl import ThreadpoolController

from wavetrain.optim import OptEx
from wavetrain.optim.algebra import small

PAUSE = 0.03


def busy_after(work: object) -> float:
    """Seconds of processor time that this process takes in a pause after ``work``, the median of several."""
    assert callable(work)
    found = []
    for _ in range(15):
        work()
        begin = time.process_time()
        time.sleep(PAUSE)
        found.append(time.process_time() - begin)
    return statistics.median(found)


def test_no_thread_waits_for_more_after_a_round() -> None:
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.randn(200))
    scale = torch.linspace(0.1, 1, 200)
    opt = OptEx(torch.optim.Adam([x], lr=1e-3), parallel=4)

    def step() -> None:
        opt.step(lambda i: (scale * (x + 0.1 * torch.randn(200)) ** 2).sum())

    for _ in range(12):  # until the history is full
        step()
    assert busy_after(step) < PAUSE / 3


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a single core has no other threads")
def test_numpy_has_one_thread_within_and_as_many_as_before_after() -> None:
    matrix = np.eye(64) + np.ones((64, 64))
    alone = busy_after(lambda: np.linalg.eigh(matrix))
    with small():
        within = busy_after(lambda: np.linalg.eigh(matrix))
    assert within < PAUSE / 3
    if alone > PAUSE / 3:  # NumPy's library wakes others here
        assert busy_after(lambda: np.linalg.eigh(matrix)) > PAUSE / 3


def test_two_threads_that_are_in_it_by_turns_leave_numpy_as_it_was() -> None:
    libraries = ThreadpoolController().select(user_api="blas")

    def threads() -> list[int]:
        return [one["num_threads"] for one in libraries.info()]

    before = threads()
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with small():
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=other)
    with small():
        assert threads() == [1] * len(before)
        thread.start()
        assert inside.wait(30)
    done.set()
    thread.join()
    assert threads() == before
