"""Who has which samples."""

import numpy as np
import pytest

from shoal.errors import UserError
from shoal.federated.partition import by_document, by_label, check_partition, iid

pytestmark = pytest.mark.fast
LABELS = np.repeat(np.arange(10), 60)


def everything(shares):
    return sorted(shares.order.tolist())


def test_iid_deals_every_sample_once_and_evenly():
    shares = iid(103, 10, seed=0)
    assert everything(shares) == list(range(103)) and set(shares.counts) == {10, 11}
    assert not np.array_equal(shares.order, iid(103, 10, seed=1).order)
    assert np.array_equal(shares.order, iid(103, 10, seed=0).order)


def test_labels_are_uneven_with_a_small_alpha_and_even_with_a_large_one():
    def most(alpha):
        shares = by_label(LABELS, 8, alpha, seed=0)
        assert everything(shares) == list(range(600)) and shares.counts.min() >= 1
        parts = [np.bincount(LABELS[shares.of(client)], minlength=10) / shares.counts[client] for client in range(8)]
        return float(np.mean([part.max() for part in parts]))

    assert most(0.05) > 0.5 and most(1000.0) < 0.15


def test_everybody_has_a_sample_however_uneven_the_draw():
    shares = by_label(np.zeros(40, np.int64), 30, 0.01, seed=0)
    assert everything(shares) == list(range(40)) and shares.counts.min() == 1


def test_documents_stay_whole_and_there_are_no_more_clients_than_those():
    documents = np.repeat([4, 7, 7, 9, 2, 11], [50, 10, 10, 20, 5, 5])
    shares = by_document(documents, 3, seed=0)
    assert everything(shares) == list(range(100)) and sorted(shares.counts) == [25, 25, 50]
    assert all(
        len(set(documents[shares.of(client)]) & set(documents[shares.of(other)])) == 0
        for client in range(3)
        for other in range(client)
    )
    assert by_document(documents, 30, seed=0).clients == 5


def test_each_client_holds_out_a_share_of_its_own():
    shares = by_label(LABELS, 7, 0.3, seed=0)
    kept, held = shares.split(0.25, seed=0)
    for client in range(7):
        own = set(shares.of(client))
        assert set(kept.of(client)) | set(held.of(client)) == own and not set(kept.of(client)) & set(held.of(client))
        assert len(kept.of(client)) and (len(own) < 2 or len(held.of(client)))
    assert shares.split(0.0, seed=0)[1].counts.sum() == 0


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("labels", 'Did you mean "label"'),
        ({"name": "iid", "alpha": 1.0}, "alpha"),
        ({"name": "label", "alpha": 0}, "above"),
    ],
)
def test_a_wrong_partition_is_refused(option, says):
    with pytest.raises(UserError, match=says):
        check_partition(option)


def test_more_clients_than_samples_are_refused_and_none():
    with pytest.raises(UserError, match="give at most"):
        iid(5, 6, seed=0)
    with pytest.raises(UserError, match=r"federated\.clients = 0: give a number above 0"):
        by_label(LABELS, 0, 0.3, seed=0)


@pytest.mark.parametrize("alpha", [0.0, -1.0])
def test_shares_of_labels_need_an_alpha_above_zero(alpha):
    with pytest.raises(UserError, match=r"alpha = .*: give a number above 0"):
        by_label(LABELS, 8, alpha, seed=0)
