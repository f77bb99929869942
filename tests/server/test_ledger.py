"""The accounts of a part under each policy, without threads or sockets; sharing out; the journal's file."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import UserError
from shoal.server.journal import Journal
from shoal.server.ledger import Gradient, Ledger, Outcome
from shoal.server.policies import Async, Batch, BoundedStaleness, Sync
from shoal.server.shares import Rows, Share, balanced

pytestmark = pytest.mark.fast


def ledger(policy, clients=3) -> Ledger:
    made = Ledger(policy)
    for rank in range(clients):
        made.join(rank, "first", 0)
    return made


def push(to: Ledger, rank: int, version: int | None = None) -> Outcome:
    member = to.members[rank]
    at = to.version if version is None else version
    made = Gradient(rank, member.incarnation, member.sequence + 1, at, frozenset(), [])
    assert not to.problem(made)
    return to.take(made)


def test_sync_updates_once_all_have_pushed_in_the_order_of_ranks_and_drops_what_is_late():
    book = ledger(Sync(3))
    assert push(book, 2).update is None and push(book, 0).update is None
    assert book.problem(Gradient(0, "first", 2, 0, frozenset(), [])).endswith("pull before the next")
    update = push(book, 1).update
    assert [each.rank for each in update.gradients] == [0, 1, 2] and update.weight == 1.0
    late = push(book, 1, version=0)
    assert (late.lag, late.weight, late.update) == (1, 0.0, None) and (book.version, book.dropped) == (1, 1)


def test_batch_updates_once_for_every_k_pushes_whoever_they_come_from():
    book = ledger(Batch(3))
    made = [push(book, rank, version=0).update for rank in (0, 0, 2, 1, 0, 0)]
    assert [update is not None for update in made] == [False, False, True, False, False, True]
    assert [each.rank for each in made[2].gradients] == [0, 0, 2] and book.version == 2


def test_lag_scales_the_learning_rate_or_drops_the_gradient():
    book = ledger(Async(scale="inverse", drop_above=2))
    assert [push(book, 0).update.weight for _ in range(3)] == [1.0] * 3
    assert push(book, 1, version=1).update.weight == pytest.approx(1 / 3)
    assert push(book, 2, version=1).update is None
    assert dict(book.lags) == {0: 3, 2: 1, 3: 1} and book.dropped == 1


def test_a_client_waits_that_is_more_than_s_pushes_ahead_of_the_slowest():
    policy = BoundedStaleness(2)
    book, everyone = ledger(policy, 2), {0, 1}
    for ahead in range(3):
        assert policy.awaited(0, book.members, everyone, book.version) == (False, [])
        assert policy.staleness(0, book.members, everyone) == ahead
        push(book, 0)
    assert policy.awaited(0, book.members, everyone, book.version) == (True, [1])
    assert policy.awaited(0, book.members, {0}, book.version) == (False, [])  # client 1 has gone
    assert book.clock_for(5, everyone) == 0 and book.clock_for(5, {0}) == 3  # who comes late owes nothing


def test_a_push_counts_once_and_one_out_of_order_is_refused():
    book = ledger(Async())
    push(book, 0)
    assert book.is_known(0, "first", 1) and not book.is_known(0, "first", 2)
    assert book.problem(Gradient(0, "first", 3, 1, frozenset(), [])) == "push 3 after push 1"
    assert "there are 0 to 1" in book.problem(Gradient(0, "first", 2, 2, frozenset(), []))
    book.join(0, "second", 0)
    assert not book.is_known(0, "second", 1)


def test_accounts_come_back_from_their_state():
    book = ledger(Async())
    push(book, 1)
    again = Ledger(Async())
    again.restore(book.state())
    assert again.state() == book.state() and again.members[1].clock == 1


@pytest.mark.parametrize("wrong", [lambda: Sync(0), lambda: Batch(k=True), lambda: BoundedStaleness(-1)])
def test_policies_refuse_numbers_that_make_no_sense(wrong):
    with pytest.raises(UserError):
        wrong()


def test_parameters_are_balanced_by_bytes_and_rows_by_a_hash():
    sizes = {"a": 70, "b": 40, "c": 30, "d": 30, "e": 1}
    assert balanced(sizes, 2) == [["a", "e"], ["b", "c", "d"]] or balanced(sizes, 2) == [["a", "d"], ["b", "c", "e"]]
    rows = Rows(1000, 3)
    server, place = rows.place(torch.arange(1000))
    for index in range(3):
        mine = torch.arange(1000)[server == index]
        assert sorted(place[server == index].tolist()) == list(range(rows.size(index)))
        assert torch.equal(rows.of(index, slice(None)).sort().values, mine)
        assert torch.equal(rows.place(rows.of(index, slice(None)))[1], torch.arange(rows.size(index)))
        assert abs(len(mine) - 333) <= 1 and abs(int((mine < 100).sum()) - 33) <= 3  # popular rows are spread, too
    with pytest.raises(UserError, match="give a server's number"):
        Share(2, 2)


def test_a_journal_gives_what_was_written_and_cuts_off_a_torn_end(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path, durable=True)
    for number in range(3):
        journal.append({"number": number}, [torch.arange(number), torch.full((5,), 0.5)])
    journal.close()
    whole = path.read_bytes()
    for torn in (whole[:-1], whole + whole[:50], whole[:-3] + b"xyz"):
        path.write_bytes(torn)
        read = Journal(path, durable=False)
        entries = list(read.entries())
        count = 3 if len(torn) > len(whole) else 2
        assert [about for about, _ in entries] == [{"number": number} for number in range(count)]
        assert torch.equal(entries[1][1][0].view(torch.int64), torch.arange(1))
        read.append({"number": 9})
        read.close()
        assert [about["number"] for about, _ in Journal(path, durable=False).entries()][count:] == [9]
