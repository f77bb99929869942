"""The journal: the same machine again, a torn last line, damage, and what is no event."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.elastic.events import EVENTS, Asked, Draining, Ended, Event, Joined, Left, Limits, Ready, Tick, TookOver
from shoal.elastic.journal import Journal, continued, newest, read, replay, written
from shoal.elastic.records import Malformed, decode, encode
from shoal.errors import LaunchError

pytestmark = pytest.mark.fast

HISTORY: list[Event] = [
    Joined(0.0, "a", "x1", 2, "10.0.0.1", 4000),
    Joined(0.5, "b", "x2", 1, "10.0.0.2", 4001),
    Tick(2.0),
    Ready(2.5, "a", 1),
    Ended(3.0, "a", 1, "failed", 1, 17, 'no "memory"\nat ä', 2, True),
    Left(3.5, "b", False, "silent"),
    Joined(4.0, "b", "x2", 1, "10.0.0.2", 4001, 0),
    TookOver(5.0, "b", "a", True, 1),
    Draining(6.0, "b", 2),
    Asked(7.0, 15),
]


def test_what_was_written_is_read_and_gives_the_same_machine(tmp_path: Path):
    journal = Journal(tmp_path / "run" / "journal")
    journal.append(HISTORY[:4])
    journal.append(HISTORY[4:])
    journal.close()
    assert read(tmp_path / "run" / "journal") == HISTORY
    assert vars(replay(Limits(), read(tmp_path / "run" / "journal"))) == vars(replay(Limits(), HISTORY))
    assert (tmp_path / "run" / "journal").stat().st_mode & 0o077 == 0


def test_a_torn_last_line_is_dropped_at_whatever_place(tmp_path: Path):
    journal = Journal(tmp_path / "journal")
    journal.append(HISTORY)
    whole = (tmp_path / "journal").read_bytes()
    last = len(whole) - len(journal.lines[-1]) - 1
    for cut in (last, last + 1, last + 30, len(whole) - 1):
        (tmp_path / "journal").write_bytes(whole[:cut])
        assert read(tmp_path / "journal") == HISTORY[:-1]


def test_a_journal_goes_on_as_the_newest_that_begins_alike(tmp_path: Path):
    own, others = Journal(), [Journal(tmp_path / f"{number}.journal") for number in range(4)]
    own.append(HISTORY[:2])
    for journal, events in zip(others, ([Tick(1.0)] * 9, [HISTORY[7], Tick(6.0)], [HISTORY[7]], []), strict=True):
        journal.append(HISTORY[1:2] if journal is others[3] else [*HISTORY[:2], *events])
    with open(tmp_path / "1.journal", "a") as file:
        file.write("damaged\ntorn")
    found = [continued(own.lines, lines) for lines in written(tmp_path)]
    assert found == [others[0].lines[2:], others[1].lines[2:], others[2].lines[2:], []]
    assert max(found, key=newest) == found[1]  # somebody took over in it, and it is longer than the other such
    assert written(tmp_path / "nowhere") == []


def test_damage_lines_that_are_missing_and_lines_in_another_order_are_found(tmp_path: Path):
    journal = Journal()
    journal.append(HISTORY)
    lines = journal.lines
    changed = [*lines[:2], lines[2].replace("2.0", "2.5"), *lines[3:]]
    for wrong in (changed, [*lines[:2], *lines[3:]], [lines[1], lines[0], *lines[2:]], [*lines[:3], *lines[2:]]):
        (tmp_path / "journal").write_text("".join(f"{line}\n" for line in wrong))
        with pytest.raises(LaunchError, match=r"line \d+ is damaged"):
            read(tmp_path / "journal")


def test_a_standby_takes_the_lines_in_their_order_only():
    journal, standby = Journal(), Journal()
    journal.append(HISTORY)
    assert [standby.take(line) for line in journal.lines[:4]] == HISTORY[:4]
    for wrong in (journal.lines[3], journal.lines[6], "", "0" * 16 + " {}", journal.lines[4] + " "):
        with pytest.raises(Malformed):
            standby.take(wrong)
    assert [standby.take(line) for line in journal.lines[4:]] == HISTORY[4:]


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot be written: .* Choose another run.dir"):
        Journal(tmp_path / "file" / "journal")


WRONG = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"[" * 20000,
    b'{"kind": "Tick"}',
    b'{"kind": "Tick", "time": "1"}',
    b'{"kind": "Tick", "time": 1, "more": 2}',
    b'{"kind": "Tick", "time": true}',
    b'{"kind": "Unknown", "time": 1}',
    b'{"kind": ["Tick"], "time": 1}',
    b'{"kind": "Asked", "time": 1, "number": 1e3}',
    b'{"kind": "Asked", "time": 1, "number": 123456789012345678901234567890}',
    b'{"kind": "Tick", "time": NaN}',
    encode(HISTORY[0]).replace(b'"a"', b'"../a"'),
    encode(HISTORY[0]).replace(b'"ranks": 2', b'"ranks": -1'),
    encode(HISTORY[0]).replace(b"4000", b"70000"),
    encode(HISTORY[4]).replace(b'"failed"', b'"odd"'),
]


@pytest.mark.parametrize("data", WRONG)
def test_what_is_no_record_is_refused(data: bytes):
    with pytest.raises(Malformed):
        decode(data, EVENTS)


@given(st.sampled_from(HISTORY), st.data())
def test_a_record_with_anything_else_in_a_field_is_refused_or_the_same_type(event, data):
    table = json.loads(encode(event))
    key = data.draw(st.sampled_from(sorted(table)))
    table[key] = data.draw(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.integers())
    )
    try:
        found = decode(json.dumps(table).encode(), EVENTS)
    except Malformed:
        return
    assert type(found).__name__ == table["kind"] and json.loads(encode(found)) == table


@given(st.binary(max_size=80))
def test_random_bytes_are_refused(data):
    with pytest.raises(Malformed):
        decode(data, EVENTS)
