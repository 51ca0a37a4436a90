"""What snapshots share with the state of the cluster at a cost that does not grow with its size: mappings, and lists of
what has changed from one to the next.

Nothing is copied. What is lent reads the state's own dict, and beside it what has changed since: before an entry
changes, the newest mapping that was lent notes what stood there. An older one looks through the notes of all that were
lent after it, and takes them over on the way, so that a mapping that is kept for long is not slow for it.

A mapping that was lent may be read by another thread while the state changes. Readers take the entry first and the
notes after it, and a note is made before its entry changes: so who saw a new entry finds the note.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Generic, TypeVar
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")

# What stands in a note for an entry that there was none of.
_NONE: Any = object()


class Changes(Generic[K]):
    """What has changed up to one moment, in order: the beginning of a list that only grows behind it."""

    __slots__ = ("_keys", "_length")

    def __init__(self, keys: list[K] | None = None) -> None:
        self._keys: list[K] = [] if keys is None else keys
        self._length = len(self._keys)

    def then(self, keys: Iterable[K], most: int) -> Changes[K]:
        """With these too, of the newest there is. Beyond `most` the list begins anew."""
        known = self._keys if self._length <= most else []
        known.extend(keys)
        return Changes(known)

    def since(self, earlier: Changes[K]) -> Sequence[K] | None:
        """What has changed between that moment and this one. None where that is not known: the list began anew, or it was
        no earlier one."""
        if self._keys is not earlier._keys or earlier._length > self._length:
            return None
        return self._keys[earlier._length : self._length]


class Shared(Generic[K, V]):
    """The state's own side. `now` is for reading; changes go through the methods, and what was lent never shows them."""

    def __init__(self) -> None:
        self.now: dict[K, V] = {}
        # Whoever was lent an older mapping keeps this one too; once nobody has any, there is nothing to note.
        self._lent: Callable[[], Lent[K, V] | None] = lambda: None

    def __setitem__(self, key: K, value: V) -> None:
        lent = self._lent()
        if lent is not None and key not in lent.before:
            lent.before[key] = self.now.get(key, _NONE)
        self.now[key] = value

    def pop(self, key: K) -> V | None:
        if key not in self.now:
            return None
        lent = self._lent()
        if lent is not None and key not in lent.before:
            lent.before[key] = self.now[key]
        return self.now.pop(key)

    def lend(self) -> Lent[K, V]:
        """What it holds now, for good. The same object as last time where nothing changed and somebody has it still."""
        last = self._lent()
        if last is not None and not last.before:
            return last
        lent = Lent(self.now)
        if last is not None:
            last.newer = lent
        self._lent = ref(lent)
        return lent


class Lent(Mapping[K, V]):
    """Entries come in the order in which they came into the state; those that have left it since come last."""

    __slots__ = ("__weakref__", "_count", "_now", "before", "newer")

    def __init__(self, now: dict[K, V]) -> None:
        self._now = now
        self._count = len(now)
        self.before: dict[K, V] = {}
        self.newer: Lent[K, V] | None = None

    def get(self, key: object, default: Any = None) -> Any:
        found = self._found(key)
        return default if found is _NONE else found

    def __getitem__(self, key: K) -> V:
        found = self._found(key)
        if found is _NONE:
            raise KeyError(key)
        return found  # type: ignore[no-any-return]

    def __contains__(self, key: object) -> bool:
        return self._found(key) is not _NONE

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        return iter(self._then())

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def __repr__(self) -> str:
        return repr(self._then())

    # What comes after a mapping is read before its notes: should another thread take those over at the same time, they
    # stand in both, and the first note of an entry is the right one.

    def _found(self, key: Any) -> Any:
        found = self._now.get(key, _NONE)
        if self.newer is not None:
            self._take_over()
        lent: Lent[K, V] | None = self
        while lent is not None:
            after = lent.newer
            before = lent.before.get(key, self)  # itself: no note
            if before is not self:
                return before
            lent = after
        return found

    def _then(self) -> dict[K, V]:
        """As a dict of its own."""
        then, notes = self._now.copy(), dict[K, V]()
        if self.newer is not None:
            self._take_over()
        lent: Lent[K, V] | None = self
        while lent is not None:
            after = lent.newer
            notes = {**lent.before, **notes}
            lent = after
        for key, value in notes.items():
            if value is _NONE:
                then.pop(key, None)
            else:
                then[key] = value
        return then

    def _take_over(self) -> None:
        """The notes of those that were lent later, less the newest: more may be noted there."""
        while (newer := self.newer) is not None and (after := newer.newer) is not None:
            for key, value in newer.before.copy().items():
                self.before.setdefault(key, value)
            self.newer = after


class _Values(ValuesView[V]):
    _mapping: Lent[Any, V]

    def __iter__(self) -> Iterator[V]:
        return iter(self._mapping._then().values())


class _Items(ItemsView[K, V]):
    _mapping: Lent[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return iter(self._mapping._then().items())
