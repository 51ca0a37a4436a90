"""Mappings that snapshots share with the state of the cluster, at a cost that does not grow with their size.

What is lent is kept in shards: small dicts that are never changed once lent. The next lending copies those shards in
which something changed since, and shares all others; if nothing changed it is the same object again.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Any, Generic, TypeVar
from zlib import crc32

# Entries in a shard: how many are copied for one change. Between the two the number of shards stays as it is.
_MOST_IN_SHARD = 256
_FEWEST_IN_SHARD = 32

# Names, or tuples that begin with one.
K = TypeVar("K", bound="str | tuple[str, int]")
V = TypeVar("V")


class Shared(Generic[K, V]):
    """The state's own side. `now` is for reading; changes go through the methods, and what was lent never shows them."""

    def __init__(self) -> None:
        self.now: dict[K, V] = {}
        self._changed: dict[K, None] = {}
        self._lent: Lent[K, V] = Lent(({},), 0)

    def __setitem__(self, key: K, value: V) -> None:
        self.now[key] = value
        self._changed[key] = None

    def pop(self, key: K) -> V | None:
        if key not in self.now:
            return None
        self._changed[key] = None
        return self.now.pop(key)

    def lend(self) -> Mapping[K, V]:
        """What it holds now, for good."""
        if self._changed:
            self._lent = self._lent.changed(self.now, self._changed)
            self._changed = {}
        return self._lent


class Lent(Mapping[K, V]):
    """Entries come in an order that depends on the keys and changes alone, in every process."""

    __slots__ = ("_count", "_mask", "_shards")

    def __init__(self, shards: tuple[dict[K, V], ...], count: int) -> None:
        self._shards = shards
        self._mask = len(shards) - 1
        self._count = count

    def changed(self, now: Mapping[K, V], keys: Mapping[K, None]) -> Lent[K, V]:
        """It as it would be with what `now` says of these keys; `now` says the same of all others."""
        shards, mask = list(self._shards), self._mask
        if len(now) > _MOST_IN_SHARD * len(shards) or (mask and len(now) < _FEWEST_IN_SHARD * len(shards)):
            return _spread(now)
        copied = set()
        for key in keys:
            place = _hash(key) & mask
            if place not in copied:
                copied.add(place)
                shards[place] = shards[place].copy()
            if key in now:
                shards[place][key] = now[key]
            else:
                shards[place].pop(key, None)
        return Lent(tuple(shards), len(now))

    def __getitem__(self, key: K) -> V:
        return self._shards[_hash(key) & self._mask if self._mask else 0][key]

    def get(self, key: K, default: Any = None) -> Any:
        return self._shards[_hash(key) & self._mask if self._mask else 0].get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._shards[_hash(key) & self._mask if self._mask else 0]

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._shards)

    def __len__(self) -> int:
        return self._count

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def __repr__(self) -> str:
        return repr(dict(self.items()))


class _Values(ValuesView[V]):
    _mapping: Lent[Any, V]

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(map(dict.values, self._mapping._shards))


class _Items(ItemsView[K, V]):
    _mapping: Lent[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return chain.from_iterable(map(dict.items, self._mapping._shards))


def _spread(now: Mapping[K, V]) -> Lent[K, V]:
    count = 1
    while len(now) > count * _MOST_IN_SHARD // 2:
        count *= 2
    shards: tuple[dict[K, V], ...] = tuple({} for _ in range(count))
    for key, value in now.items():
        shards[_hash(key) & (count - 1)][key] = value
    return Lent(shards, len(now))


def _hash(key: Any) -> int:
    """Not Python's own, which is another one in each process: a run must be the same again from its seed."""
    name = key if isinstance(key, str) else key[0]
    return crc32(name.encode("utf-8", "surrogatepass"))
