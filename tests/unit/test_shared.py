"""What snapshots share with the state: always what a copy would hold, however large it grows and shrinks."""

from __future__ import annotations

from random import Random
from threading import Event, Thread
from weakref import ref

import pytest

from coordinator.shared import Changes, Shared


@pytest.mark.parametrize("name", [str, lambda n: (str(n), n % 3)], ids=["names", "tuples"])
def test_what_was_lent_stays_and_holds_what_a_copy_would(name) -> None:
    """In phases: it grows to thousands, shrinks to nothing and grows again, lent every now and then."""
    random = Random(3)
    shared: Shared = Shared()
    lent, largest, smallest = [], 0, 10_000
    for phase in range(6):
        for step in range(2_500):
            key = name(random.randrange(4_000))
            if random.random() < (0.9 if phase % 2 == 0 else 0.1):
                shared[key] = (phase, step)
            else:
                left = shared.now.get(key)
                assert shared.pop(key) == left
            if step % 250 == 0 or random.random() < 0.01:
                lent.append((shared.lend(), dict(shared.now)))
        while phase % 2 and shared.now:
            shared.pop(next(iter(shared.now)))
        lent.append((shared.lend(), dict(shared.now)))
        largest, smallest = max(largest, len(lent[-1][0])), min(smallest, len(lent[-1][0]))
    assert (largest > 1_000, smallest) == (True, 0)
    for mapping, copy in lent:
        assert dict(mapping.items()) == copy
        assert mapping == copy
        assert len(mapping) == len(copy)
        assert sorted(mapping) == sorted(copy)
        assert sorted(mapping.values()) == sorted(copy.values())
        for n in range(0, 4_000, 37):
            key = name(n)
            assert mapping.get(key) == copy.get(key)
            assert (key in mapping) is (key in copy)
            if key in copy:
                assert mapping[key] == copy[key]


def test_what_did_not_change_is_lent_again() -> None:
    shared: Shared[str, int] = Shared()
    shared["a"] = 1
    lent = shared.lend()
    assert shared.lend() is lent
    assert shared.pop("b") is None
    assert shared.lend() is lent
    shared.pop("a")
    assert shared.lend() == {}
    assert lent == {"a": 1}
    with pytest.raises(KeyError):
        shared.lend()["a"]
    with pytest.raises(TypeError):
        lent["a"] = 2


def test_what_is_noted_is_what_changed_while_somebody_has_it() -> None:
    shared: Shared[str, int] = Shared()
    for n in range(20_000):
        shared[str(n)] = n
    first = shared.lend()
    shared["17"] = -1
    shared.pop("18")
    second = shared.lend()
    shared["17"] = -2
    shared["new"] = 1
    third = shared.lend()
    assert set(first.before) == {"17", "18"}
    assert set(second.before) == {"17", "new"}
    assert (first["17"], second["17"], third["17"]) == (17, -1, -2)
    assert ("18" in first, "18" in second, "new" in second) == (True, False, False)
    fourth = ref(shared.lend())
    del first, second, third
    shared["19"] = 0
    assert fourth() is None
    assert shared.lend().before == {}


def test_what_was_lent_long_ago_is_not_looked_up_through_all_that_was_lent_since() -> None:
    shared: Shared[int, int] = Shared()
    shared[0] = 0
    old, between = shared.lend(), []
    for n in range(1, 1_000):
        shared[n % 7] = n
        between.append(shared.lend())
    assert (dict(old), old.get(0), old.get(1)) == ({0: 0}, 0, None)
    assert old.newer is between[-1]
    assert [lent[6] for lent in between[5:20]] == [6] * 7 + [13] * 7 + [20]


def test_another_thread_reads_what_was_lent_while_the_state_changes() -> None:
    shared: Shared[int, int] = Shared()
    for n in range(500):
        shared[n] = 0
    lent, wrong, is_over = shared.lend(), [], Event()

    def read() -> None:
        while not is_over.is_set():
            if len(dict(lent.items())) != 500 or any(lent.values()) or lent.get(7) != 0 or 501 in lent:
                wrong.append(dict(lent.items()))

    readers = [Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for n in range(30_000):
        shared[n % 700] = n
        shared.pop((n * 7) % 700)
        if n % 10 == 0:
            shared.lend()
    is_over.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert dict(lent) == dict.fromkeys(range(500), 0)


def test_odd_names_are_names() -> None:
    """Names come from records that anybody may have written."""
    shared: Shared[str, int] = Shared()
    for name in ("", "\ud800", "\0", "x" * 10_000):
        shared[name] = len(name)
        assert shared.lend()[name] == len(name)


def test_changes_between_two_moments_until_there_are_too_many() -> None:
    first = Changes[int]()
    second = first.then([1, 2], 3)
    third = second.then([2, 3], 3)
    assert (second.since(first), third.since(first), third.since(second)) == ([1, 2], [1, 2, 2, 3], [2, 3])
    assert third.since(third) == []
    assert first.since(second) is None, "a later one"
    anew = third.then([4], 3)
    assert [anew.since(earlier) for earlier in (first, second, third)] == [None] * 3
    assert anew.then([5], 3).since(anew) == [5]
