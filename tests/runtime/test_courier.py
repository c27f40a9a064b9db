"""The courier does jobs in order, beside the computing thread or at once, and loses no error."""

from __future__ import annotations

import pytest

from wavetrain.runtime.courier import Courier


def fail() -> None:
    raise LookupError("first")


@pytest.mark.parametrize("threaded", [False, True])
def test_jobs_are_done_in_order(threaded: bool) -> None:
    courier = Courier(threaded=threaded)
    done: list[int] = []
    for n in range(100):
        courier.put(done.append, n)
    assert courier.call(lambda: list(done)) == list(range(100))
    courier.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_is_raised_where_it_is_asked_for(threaded: bool) -> None:
    for _ in range(200):  # it must be there by the time the caller looks, every time
        courier = Courier(threaded=threaded)
        with pytest.raises(LookupError, match="first"):
            courier.call(fail)
        courier.close()


def test_the_first_error_is_told_later() -> None:
    courier = Courier(threaded=True)
    courier.put(fail)
    courier.put(lambda: 1 / 0)
    with pytest.raises(LookupError, match="first"):
        courier.call(int)
    with pytest.raises(LookupError, match="first"):
        courier.check()
    courier.close()
