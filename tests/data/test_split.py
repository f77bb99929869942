"""The split by document."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import split_documents
from shoal.errors import UserError


@pytest.mark.fast
@given(st.integers(2, 300), st.floats(1e-9, 0.999999), st.integers(0, 2**32))
def test_each_document_is_on_one_side_and_no_side_is_empty(documents, validation, seed):
    split = split_documents(documents, validation, seed)
    assert sorted([*split.train, *split.validation]) == list(range(documents))
    assert len(split.train) and len(split.validation)
    assert (np.diff(split.train) > 0).all() and (np.diff(split.validation) > 0).all()


@pytest.mark.fast
def test_share_seed_and_growth():
    split = split_documents(20_000, 0.1, seed=0)
    assert len(split.validation) == pytest.approx(2000, abs=220)  # 5 sigma
    assert not np.array_equal(split.validation, split_documents(20_000, 0.1, seed=1).validation)
    grown = split_documents(30_000, 0.1, seed=0)
    assert np.array_equal(grown.validation[grown.validation < 20_000], split.validation)


@pytest.mark.fast
def test_nothing_held_out():
    split = split_documents(1, 0, seed=0)
    assert split.train.tolist() == [0]
    assert split.validation.tolist() == []


@pytest.mark.fast
@pytest.mark.parametrize(
    ("documents", "validation", "says"), [(1, 0.1, "needs at least 2"), (5, 1.0, "below 1"), (5, -0.1, "from 0")]
)
def test_refuses(documents, validation, says):
    with pytest.raises(UserError, match=says):
        split_documents(documents, validation, seed=0)
