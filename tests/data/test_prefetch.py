"""Working ahead: order, bound, errors, end."""

import threading

import pytest

from shoal.data import Prefetcher


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shoal-prefetch"]


@pytest.mark.fast
def test_order_and_end():
    ahead = Prefetcher(iter(range(20)))
    assert list(ahead) == list(range(20))
    assert list(ahead) == []
    assert workers() == []


@pytest.mark.fast
def test_no_more_than_depth_ahead():
    read: list[int] = []
    full = threading.Event()

    def source():
        for number in range(100):
            read.append(number)
            if number == 4:
                full.set()
            yield number

    with Prefetcher(source(), depth=3) as ahead:
        assert [next(ahead), next(ahead)] == [0, 1]
        assert full.wait(10)  # 2 taken and 3 ahead
        assert not threading.Event().wait(0.05)
        assert read == [0, 1, 2, 3, 4]
    assert workers() == []


@pytest.mark.fast
def test_an_error_comes_in_its_place():
    def source():
        yield 1
        raise KeyError("lost")

    ahead = Prefetcher(source())
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="lost"):
        next(ahead)
    assert list(ahead) == []
    assert workers() == []
