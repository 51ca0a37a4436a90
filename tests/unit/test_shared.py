"""What snapshots share with the state: always what a copy would hold, however large it grows and shrinks."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.shared import Shared


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


def test_one_change_of_many_entries_copies_few() -> None:
    shared: Shared[str, int] = Shared()
    for n in range(20_000):
        shared[str(n)] = n
    before = shared.lend()
    shared["17"] = -1
    after = shared.lend()
    same = [a is b for a, b in zip(before._shards, after._shards, strict=True)]
    assert same.count(False) == 1
    assert max(map(len, after._shards)) < 400


def test_odd_names_are_names() -> None:
    """Names come from records that anybody may have written."""
    shared: Shared[str, int] = Shared()
    for name in ("", "\ud800", "\0", "x" * 10_000):
        shared[name] = len(name)
        assert shared.lend()[name] == len(name)
