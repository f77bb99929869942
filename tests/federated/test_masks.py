"""Masks vanish in a sum, and hide what is in it."""

import numpy as np
import pytest

from shoal.federated.masks import BITS, MOST, from_words, mask, masked, to_words, unmasked

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(3)
CLIENTS = (3, 5, 9, 12)
VALUES = {client: RNG.normal(scale=100.0, size=50) for client in CLIENTS}
OWN = {client: bytes([client]) * 32 for client in CLIENTS}
PAIRS = {(one, other): bytes([one, other]) * 16 for one in CLIENTS for other in CLIENTS if one < other}


def sent(client):
    pairs = {other: PAIRS[min(client, other), max(client, other)] for other in CLIENTS if other != client}
    return masked(to_words(VALUES[client], len(CLIENTS)), OWN[client], client, pairs)


@pytest.mark.parametrize("there", [CLIENTS, (3, 9, 12), (5, 12), (9,)])
def test_the_sum_is_the_plain_one_whoever_is_gone(there):
    gone = [client for client in CLIENTS if client not in there]
    total = sum((sent(client) for client in there), start=np.uint64(0))
    left_over = {(one, other): PAIRS[min(one, other), max(one, other)] for one in there for other in gone}
    found = unmasked(total, {client: OWN[client] for client in there}, left_over)
    plain = sum((to_words(VALUES[client], len(CLIENTS)) for client in there), start=np.uint64(0))
    assert np.array_equal(found, plain)
    assert np.abs(from_words(found) - sum(VALUES[client] for client in there)).max() <= len(there) * 2.0 ** -(BITS + 1)


def test_a_masked_vector_tells_nothing_without_the_masks():
    bits = np.unpackbits(sent(3).view(np.uint8)).mean()
    assert 0.45 < bits < 0.55 and not np.array_equal(sent(3), to_words(VALUES[3], 1))
    assert np.array_equal(mask(b"a" * 32, 7), mask(b"a" * 32, 9)[:7]) and not np.array_equal(
        mask(b"b" * 32, 7), mask(b"a" * 32, 7)
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e12])
def test_numbers_that_would_spoil_a_sum_are_refused(value):
    with pytest.raises(ValueError, match="lower learning rate"):
        to_words(np.array([1.0, value]), 1)


@pytest.mark.parametrize("clients", [1, 7, 8, 10_000])
def test_the_largest_numbers_of_all_clients_have_a_sum(clients):
    with pytest.raises(ValueError, match=f"spoil the sum of {clients}"):
        to_words(np.array([1.001 * MOST / clients]), clients)
    each = to_words(np.array([MOST / clients, -MOST / clients]), clients)
    total = from_words(each * np.uint64(clients))
    np.testing.assert_allclose(total, [MOST, -MOST], rtol=1e-12)
