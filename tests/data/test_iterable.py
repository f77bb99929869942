"""Iterable datasets: running ids, a place that can be saved, one reader for all ranks."""

import json
import threading
from itertools import islice
from queue import Queue

import pytest

from shoal.data import IterableSource
from shoal.errors import UserError


def seen(batches) -> list[tuple]:
    """(step, epoch, ids, values) of each batch."""
    return [(b.step, b.epoch, b.ids, b.load(b.ids)["x"].tolist()) for b in batches]


class Plain:
    """Five samples, 0 to 4; counts the items read."""

    def __init__(self) -> None:
        self.items_read = 0

    def __iter__(self):
        for x in range(5):
            self.items_read += 1
            yield {"x": x}


class Stateful(Plain):
    """Knows its place and its epoch, and goes on from a loaded place only in that epoch."""

    epoch = at = start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.start = epoch, 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.start = state["at"]

    def __iter__(self):
        for x in range(self.start, 5):
            self.items_read += 1
            self.at = x + 1
            yield {"x": 10 * self.epoch + x}


TWO_EPOCHS = [
    (0, 0, (0, 1), [0, 1]),
    (1, 0, (2, 3), [2, 3]),
    (2, 0, (4,), [4]),
    (3, 1, (5, 6), [0, 1]),
    (4, 1, (7, 8), [2, 3]),
    (5, 1, (9,), [4]),
]


@pytest.mark.fast
def test_two_epochs_by_hand():
    assert seen(IterableSource(Plain()).batches(2, epochs=2)) == TWO_EPOCHS
    assert seen(islice(IterableSource(Plain()).batches(2), 6)) == TWO_EPOCHS


@pytest.mark.fast
def test_the_epoch_is_told():
    values = [value for *_, value in seen(IterableSource(Stateful()).batches(5, epochs=3))]
    assert values == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]]


@pytest.mark.fast
def test_what_can_be_read_once_ends():
    assert seen(IterableSource({"x": x} for x in range(3)).batches(2)) == [(0, 0, (0, 1), [0, 1]), (1, 0, (2,), [2])]
    assert seen(IterableSource([]).batches(2)) == []


@pytest.mark.fast
def test_nothing_is_read_ahead_and_any_part_is_loaded():
    plain = Plain()
    batch = next(IterableSource(plain).batches(3))
    assert plain.items_read == 3
    assert batch.load([2, 0])["x"].tolist() == [2, 0]


@pytest.mark.fast
@pytest.mark.parametrize(("kind", "items_read"), [(Plain, lambda taken: taken), (Stateful, lambda taken: 0)])
@pytest.mark.parametrize("stop", range(8))
def test_resume_at_any_batch(kind, items_read, stop):
    whole = seen(IterableSource(kind()).batches(2, epochs=3))
    first = IterableSource(kind())
    head = seen(islice(first.batches(2, epochs=3), stop))
    state = json.loads(json.dumps(first.state_dict()))
    iterable = kind()
    second = IterableSource(iterable)
    second.load_state_dict(state)
    assert second.state_dict() == state
    tail = seen(islice(second.batches(2, epochs=3), 1))
    if tail[0][1] == state["epoch"]:
        assert iterable.items_read == items_read(state["samples_in_epoch"]) + len(tail[0][2])
    assert head + tail + seen(second.batches(2, epochs=3)) == whole  # a second call goes on, too


@pytest.mark.fast
@pytest.mark.parametrize("kind", [Plain, Stateful])
@pytest.mark.parametrize("trained", range(6))
def test_a_batch_that_was_not_trained_comes_again(kind, trained):
    """Here and from a state, saved before or after it was asked for again."""
    whole = seen(IterableSource(kind()).batches(2, epochs=2))
    first = IterableSource(kind())
    seen(islice(first.batches(2, epochs=2), trained + 1))
    states = [first.state_dict(trained)]
    first.go_to(trained)
    states.append(first.state_dict(trained))
    assert seen(first.batches(2, epochs=2)) == whole[trained:]
    for state in json.loads(json.dumps(states)):
        again = IterableSource(kind())
        again.load_state_dict(state)
        again.go_to(trained)
        assert seen(again.batches(2, epochs=2)) == whole[trained:]


@pytest.mark.fast
def test_several_batches_that_were_not_trained_are_in_a_state_only():
    source, again = IterableSource(Plain()), IterableSource(Plain())
    seen(islice(source.batches(2), 5))
    again.load_state_dict(source.state_dict(2))
    assert seen(islice(again.batches(2), 4)) == TWO_EPOCHS[2:]
    with pytest.raises(UserError, match=r"up to step 4 were taken .* and the engine is at step 2: only the last"):
        source.go_to(2)


def test_a_streaming_dataset_of_hugging_face():
    datasets = pytest.importorskip("datasets")

    def make() -> IterableSource:
        return IterableSource(
            datasets.Dataset.from_dict({"x": list(range(7))})
            .to_iterable_dataset(num_shards=2)
            .shuffle(seed=1, buffer_size=1)
        )

    whole = seen(make().batches(2, epochs=3))
    assert [sorted(x for _, e, _, values in whole if e == epoch for x in values) for epoch in range(3)] == [
        list(range(7))
    ] * 3
    for stop in (1, 4, 6):
        first, second = make(), make()
        head = seen(islice(first.batches(2, epochs=3), stop))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert head + seen(second.batches(2, epochs=3)) == whole


@pytest.mark.fast
def test_one_rank_reads_for_all():
    """Two ranks as threads, dispatch as a queue."""
    plain, channel, results = Plain(), Queue(), {}

    def send(samples):
        channel.put(samples)
        return samples

    def receive(samples):
        assert samples is None
        return channel.get(timeout=10)

    def rank(name, source, dispatch):
        results[name] = seen(source.batches(2, dispatch=dispatch, epochs=2))

    threads = [
        threading.Thread(target=rank, args=("reader", IterableSource(plain), send)),
        threading.Thread(target=rank, args=("other", IterableSource(Plain(), reads=False), receive)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results["reader"] == results["other"] == TWO_EPOCHS
    assert plain.items_read == 10


@pytest.mark.fast
def test_refuses():
    with pytest.raises(UserError, match="global_batch is 0"):
        next(IterableSource(Plain()).batches(0))
