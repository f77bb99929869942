"""Samples computed once: what comes back, several processes, killed writers, damage, capacity."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shoal.data.cached import CachedDataset, LocalStore, local
from shoal.data.cached.record import HEADER, opened, pack, seal, unpack
from shoal.data.loader import stack_samples
from shoal.errors import UserError

CONTEXT = multiprocessing.get_context("fork")


class Squares:
    """Item i is i squared, four times; counts how often items were computed, over all processes."""

    def __init__(self, samples: int, value: Callable[[int], int] = lambda i: i * i):
        self.samples, self.value, self.computed = samples, value, CONTEXT.Value("i", 0)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict:
        with self.computed.get_lock():
            self.computed.value += 1
        return {"x": torch.full((4,), float(self.value(index))), "label": index}


def values(cached: CachedDataset) -> list[float]:
    return [float(sample["x"][3]) for sample in cached]


SAMPLES = [
    {"x": torch.arange(6).view(2, 3), "y": torch.tensor(1.5), "empty": torch.zeros(0, 3)},
    {
        "bf16": torch.randn(3).bfloat16(),
        "bool": torch.tensor([True, False]),
        "u8": torch.tensor([1, 255], dtype=torch.uint8),
    },
    {
        "array": np.arange(4, dtype=np.int16),
        "scalar": np.float32(0.1),
        "flag": np.bool_(True),
        "strided": np.arange(8)[::2],
    },
    {"int": 2**70, "float": 0.1, "nan": float("nan"), "bool": True, "text": "naïve\n\udcff", "none": None},
    {"transposed": torch.arange(6).view(2, 3).T, "expanded": torch.ones(1).expand(5)},
    {},
]


@pytest.mark.fast
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_comes_back_as_it_was(sample):
    back = unpack(pack(sample))
    assert list(back) == list(sample)
    for key, value in sample.items():
        assert type(back[key]) is type(value)
        if isinstance(value, torch.Tensor | np.ndarray):
            assert back[key].dtype == value.dtype
            torch.testing.assert_close(torch.as_tensor(back[key]), torch.as_tensor(value), rtol=0, atol=0)
        else:
            assert back[key] == value or value != value


@pytest.mark.fast
def test_views_of_one_tensor_are_kept_apart():
    tokens = torch.arange(5)
    back = unpack(pack({"input_ids": tokens[:-1], "labels": tokens[1:], "again": tokens[1:]}))
    assert [value.tolist() for value in back.values()] == [[0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]]
    back["labels"].zero_()
    assert back["again"].tolist() == [1, 2, 3, 4]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ([1, 2], "a sample is a list"),
        ({1: 2}, "the key 1"),
        ({"x": {"y": 1}}, r"sample\['x'\] is a dict"),
        ({"x": object()}, r"sample\['x'\] is a object"),
        ({"x": np.array(["a"])}, r"sample\['x'\] is a ndarray"),
        ({"x": np.zeros(1, ">f4")}, "dtype >f4"),
        ({"x": torch.eye(2).to_sparse()}, "sparse"),
        ({"x": torch.zeros(1, dtype=torch.complex128)}, "complex128"),
    ],
)
def test_what_no_record_can_hold_is_refused(sample, says):
    with pytest.raises(UserError, match=says):
        pack(sample)


@pytest.mark.fast
@given(st.binary(max_size=60), st.integers(0, 500), st.integers(1, 255))
def test_any_changed_or_missing_byte_is_seen(payload, position, flip):
    record = bytearray(seal(7, payload))
    assert opened(7, bytes(record)) == payload
    assert opened(8, bytes(record)) is None
    for cut in {0, len(record) // 2, len(record) - 1} - {len(record)}:
        assert opened(7, bytes(record[:cut])) is None
    position %= len(record)
    record[position] ^= flip
    assert opened(7, bytes(record)) is None or HEADER.size - 4 <= position < HEADER.size  # four bytes are filling


@pytest.mark.fast
def test_each_sample_is_computed_once(tmp_path):
    dataset = Squares(10)
    cached = CachedDataset(dataset, name="squares", path=tmp_path)
    assert len(cached) == 10
    assert values(cached) == values(cached) == [float(i * i) for i in range(10)]
    assert cached[3]["label"] == 3
    assert dataset.computed.value == 10
    again = CachedDataset(dataset, name="squares", path=tmp_path)
    batch = stack_samples([again[2], again[5]])
    assert batch["x"][:, 0].tolist() == [4.0, 25.0]
    assert dataset.computed.value == 10


@pytest.mark.fast
def test_a_read_is_a_copy_of_its_own(tmp_path):
    cached = CachedDataset(Squares(2), name="squares", path=tmp_path)
    for _ in range(2):
        cached[1]["x"].zero_()
    assert values(cached) == [0.0, 1.0]


@pytest.mark.fast
def test_other_names_and_sizes_are_apart(tmp_path):
    first, second = Squares(4), Squares(4, lambda i: i + 100)
    assert values(CachedDataset(first, name="first", path=tmp_path)) == [0, 1, 4, 9]
    assert values(CachedDataset(second, name="second", path=tmp_path)) == [100, 101, 102, 103]
    assert values(CachedDataset(Squares(3, lambda i: -i), name="first", path=tmp_path)) == [0, -1, -2]


@pytest.mark.fast
def test_indices_are_those_of_a_sequence(tmp_path):
    cached = CachedDataset(Squares(2), name="squares", path=tmp_path)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            cached[index]


def _fill(cached: CachedDataset, order: list[int], answers) -> None:
    answers.put([float(cached[i]["x"][0]) for i in order])


def test_several_processes_fill_and_read_one_store(tmp_path):
    samples, orders = 200, [list(range(200)), list(range(199, -1, -1)), [i * 77 % 200 for i in range(200)]]
    dataset = Squares(samples)
    shared = CachedDataset(dataset, name="squares", path=tmp_path)
    answers = CONTEXT.Queue()
    caches = [
        shared,
        shared,
        CachedDataset(dataset, name="squares", path=tmp_path),
    ]  # two forked copies of one, and one of its own
    processes = [
        CONTEXT.Process(target=_fill, args=(c, order, answers)) for c, order in zip(caches, orders, strict=True)
    ]
    for process in processes:
        process.start()
    found = sorted(sum(answers.get(timeout=30)) for _ in processes)
    for process in processes:
        process.join(30)
    assert found == [float(sum(i * i for i in range(samples)))] * 3
    before = dataset.computed.value
    assert values(shared) == [float(i * i) for i in range(samples)]
    assert dataset.computed.value == before
    (records,) = tmp_path.rglob("records.bin")
    assert records.stat().st_size % samples == 0  # every sample was appended once, though some were computed twice


def test_threads_append_each_sample_once(tmp_path):
    store = LocalStore(tmp_path, 50, 1 << 20)
    threads = [threading.Thread(target=lambda: [store.put(i, b"x" * 8) for i in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.get(i) for i in range(50)] == [b"x" * 8] * 50
    assert (tmp_path / "records.bin").stat().st_size == 50 * (HEADER.size + 8)


def test_workers_of_a_data_loader(tmp_path):
    cached = CachedDataset([{"x": torch.tensor(i)} for i in range(8)], name="numbers", path=tmp_path)
    for _ in range(2):
        loader = DataLoader(cached, batch_size=4, num_workers=2, multiprocessing_context="fork")
        assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.fast
def test_a_pickled_cache_is_the_same_cache(tmp_path):
    """As spawned workers get it."""
    cached = CachedDataset([{"x": i} for i in range(3)], name="numbers", path=tmp_path)
    cached[1]
    copy = pickle.loads(pickle.dumps(cached))
    copy._dataset = None
    assert copy[1] == {"x": 1}


def _write_for_ever(directory, started) -> None:
    store = LocalStore(directory, 100_001, 1 << 30)
    for index in range(100_000):
        store.put(index, bytes([index % 251]) * (1 + index % 5000))
        if index == 20:
            started.set()


def test_killed_writers_leave_only_whole_records(tmp_path):
    """Killed at whatever point, four times over: what is there is right, and the next writer goes on."""
    for round_ in range(4):
        started = CONTEXT.Event()
        writer = CONTEXT.Process(target=_write_for_ever, args=(tmp_path, started))
        writer.start()
        assert started.wait(30)
        time.sleep(0.003 * round_)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(30)
        store = LocalStore(tmp_path, 100_001, 1 << 30)
        there = [(i, payload) for i in range(100_000) if store._index[1 + i] and (payload := store.get(i)) is not None]
        assert len(there) >= 20
        assert all(payload == bytes([i % 251]) * (1 + i % 5000) for i, payload in there)
        store.put(100_000, b"after")
        assert store.get(100_000) == b"after"


class Dying:
    """An index whose writer dies before the write number `writes`."""

    def __init__(self, index, writes: int):
        self.index, self.writes = index, writes

    def __getitem__(self, place):
        return self.index[place]

    def __setitem__(self, place, value):
        if self.writes == 0:
            raise KeyboardInterrupt
        self.writes -= 1
        self.index[place] = value


@pytest.mark.fast
@pytest.mark.parametrize("writes", [-1, 0, 1])
def test_a_writer_killed_between_two_writes(tmp_path, monkeypatch, writes):
    """Dies within the record, before its end is known, and before it is referred to."""
    store = LocalStore(tmp_path, 3, 1 << 20)
    store.put(0, b"zero")

    def half(descriptor, record, start):
        monkeypatch.undo()
        os.pwrite(descriptor, record[: len(record) // 2], start)
        raise KeyboardInterrupt

    if writes < 0:
        monkeypatch.setattr(local.os, "pwrite", half)
    else:
        store._index = Dying(store._index, writes)
    with pytest.raises(KeyboardInterrupt):
        store.put(1, b"one")
    other = LocalStore(tmp_path, 3, 1 << 20)
    assert [other.get(i) for i in range(3)] == [b"zero", None, None]
    other.put(2, b"two, longer than what was left")
    other.put(1, b"one")
    assert [store.get(i) for i in range(3)] == [b"zero", b"one", b"two, longer than what was left"]


@pytest.mark.fast
@pytest.mark.parametrize("damage", ["payload", "cut short", "reference into nowhere", "another's record"])
def test_damage_is_a_miss_and_mended(tmp_path, damage):
    dataset = Squares(3)
    assert values(CachedDataset(dataset, name="squares", path=tmp_path)) == [0, 1, 4]
    (records,), (index,) = tmp_path.rglob("records.bin"), tmp_path.rglob("index.bin")
    places = np.memmap(index, np.int64, "r+")
    if damage == "payload":
        with open(records, "r+b") as file:
            file.seek(int(places[2]) - 1 + HEADER.size + 150)
            file.write(b"?")
    elif damage == "cut short":
        os.truncate(records, int(places[2]) + 5)
    elif damage == "reference into nowhere":
        places[2] = 10**12
    else:
        places[2] = places[3]
    opened_anew = CachedDataset(dataset, name="squares", path=tmp_path)
    assert values(opened_anew) == [0, 1, 4]
    assert dataset.computed.value == (5 if damage == "cut short" else 4)
    assert values(opened_anew) == values(CachedDataset(dataset, name="squares", path=tmp_path)) == [0, 1, 4]
    assert dataset.computed.value == (5 if damage == "cut short" else 4)


@pytest.mark.fast
def test_a_full_store_computes_the_rest_and_says_so_once(tmp_path):
    dataset = Squares(10)
    record = len(pack(dataset[0])) + HEADER.size
    cached = CachedDataset(dataset, name="squares", path=tmp_path, capacity_bytes=4 * record + 60)
    with pytest.warns(UserWarning, match="is full at"):
        assert values(cached) == [float(i * i) for i in range(10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values(cached) == [float(i * i) for i in range(10)]
    assert dataset.computed.value == 1 + 10 + 6
    (records,) = tmp_path.rglob("records.bin")
    assert records.stat().st_size <= 4 * record + 60


@pytest.mark.fast
def test_a_full_disk_is_a_full_store(tmp_path, monkeypatch):
    cached = CachedDataset(Squares(3), name="squares", path=tmp_path)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local.os, "pwrite", no_space)
    with pytest.warns(UserWarning, match="No space left"):
        assert values(cached) == [0, 1, 4]


@pytest.mark.fast
def test_refuses(tmp_path):
    (tmp_path / "file").write_text("")
    for options, says in [
        ({"name": ""}, "name is empty"),
        ({"name": "x", "path": tmp_path / "file"}, "cannot be opened"),
        ({"name": "x", "url": "redis://127.0.0.1", "path": tmp_path}, "maxmemory"),
        ({"name": "x", "url": "redis://127.0.0.1", "capacity_bytes": 5}, "maxmemory"),
    ]:
        with pytest.raises(UserError, match=says):
            CachedDataset(Squares(1), **options)
