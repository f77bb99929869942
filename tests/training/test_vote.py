"""The hash of what a rank holds, and what a vote of replicas on hashes says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm import digest as digests
from shoal.comm.digest import combined, digest
from shoal.training.vote import judge

pytestmark = pytest.mark.fast


@given(
    st.integers(1, 70),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
    st.integers(0, 3),
    st.data(),
)
def test_a_flipped_bit_changes_the_hash_wherever_it_is(numel, dtype, offset, data):
    values = (torch.arange(numel + offset) % 7).to(dtype)[offset:]
    before = int(digest(values))
    assert before == int(digest(values.clone()))  # by the values alone, not by where they lie
    seen = values.clone().view(torch.uint8)
    place = data.draw(st.integers(0, seen.numel() - 1))
    seen[place] ^= 1 << data.draw(st.integers(0, 7))
    assert int(digest(seen)) != before


def test_values_that_change_places_change_the_hash(monkeypatch):
    monkeypatch.setattr(digests, "_BLOCK", 4)  # within a block, and across blocks
    values = torch.arange(32, dtype=torch.float64)
    hashes = {int(digest(values))}
    for one, other in [(0, 1), (0, 4), (3, 29), (30, 31)]:
        changed = values.clone()
        changed[one], changed[other] = values[other], values[one]
        hashes.add(int(digest(changed)))
    assert len(hashes) == 5
    assert combined([values, values + 1]) != combined([values + 1, values])
    assert combined([]) == 0 and int(digest(torch.zeros(0))) == int(digest(torch.zeros(0)))


@pytest.mark.parametrize(
    "told, wrong, tied",
    [
        ([{"weights/0": "a"}] * 4, {}, {}),
        ([{"weights/0": "a"}, {"weights/0": "b"}, {"weights/0": "a"}], {1: ["weights"]}, {}),
        ([{"weights/0": "a"}, {"weights/0": "b"}], {}, {0: ["weights"], 1: ["weights"]}),
        ([{"m/0": x} for x in "aabb"], {}, {place: ["m"] for place in range(4)}),
        ([{"m/0": x} for x in "abc"], {}, {place: ["m"] for place in range(3)}),
        ([{"m/0": x} for x in "aabca"], {2: ["m"], 3: ["m"]}, {}),
        # two groups of replicas, and a rank that has a copy of nothing
        ([{"m/0": "a"}, {"m/1": "b"}, {"m/0": "a"}, {"m/1": "c"}, {}], {}, {1: ["m"], 3: ["m"]}),
        ([{"m/0": "a", "w/0": "a"}, {"m/0": "b", "w/0": "b"}, {"m/0": "a", "w/0": "a"}], {1: ["m", "w"]}, {}),
    ],
)
def test_a_majority_is_right_and_two_that_differ_are_both_suspect(told, wrong, tied):
    assert judge(told) == (wrong, tied)
