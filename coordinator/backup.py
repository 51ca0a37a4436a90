"""A cluster's records as a file, and a file's records as a cluster.

The file holds one JSON object a line: a header, then each key that is not leased, in key order, all at one revision.

    {"serai_backup": 1, "revision": 4711, "at_ms": 1750000000000, "count": 2, "sha256": "..."}
    {"key": "/serai/tenants/a", "value": "{\"name\":\"a\"}"}
    {"key": "/serai/usage/x", "base64": "/w=="}

A value that is no text stands as base64. The digest is that of all lines after the header. Leased keys (who leads, which
nodes report) are left out, since they tell what was alive at that moment; answers to submits are kept although they are
leased, so that a submit that is repeated after a restore does not make a second job.

`restore` holds the leader's key while it writes, under no lease: no coordinator plans on half of a cluster, and every
write of one that led until now is refused. If it dies on the way, nobody leads until it is run again with `force`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from attrs import frozen

from coordinator import records
from coordinator.store import (
    Compare,
    Delete,
    KeyValue,
    Listing,
    Put,
    Store,
    StoreError,
    StoreUncertain,
    Write,
    absent,
    unchanged,
)

FORMAT = 1
# Below etcd's defaults of 128 operations and 1.5 MiB.
WRITES_PER_TRANSACTION = 100
BYTES_PER_TRANSACTION = 1 << 20
ATTEMPTS = 10  # a coordinator that stands by may be faster
HOLDER = "restore"


class BackupInvalid(ValueError):
    """The file is not a whole backup that this version can read; nothing was written."""


class RestoreRefused(Exception):
    """The cluster is not empty, or a coordinator leads it; nothing was written."""


@frozen
class Header:
    """`count` lines follow, whose bytes have this digest."""

    serai_backup: int
    revision: int
    at_ms: int
    count: int
    sha256: str


@frozen
class Restored:
    """Keys that were written, that stood there equal, and that were taken away."""

    written: int
    kept: int
    removed: int


@frozen
class _Line:
    key: str
    value: str | None = None
    base64: str | None = None


async def back_up(store: Store, at_ms: int) -> tuple[Header, bytes]:
    """The header and the whole file. Raises `StoreError`."""
    listing = await store.list(records.ROOT)
    lines = [_line(item) for item in listing.items if _is_kept(item)]
    body = b"".join(lines)
    header = Header(FORMAT, listing.revision, at_ms, len(lines), hashlib.sha256(body).hexdigest())
    return header, msgspec.json.encode(header) + b"\n" + body


def read_backup(data: bytes) -> tuple[Header, dict[str, bytes]]:
    """What `back_up` wrote, checked as a whole. Raises `BackupInvalid`."""
    first, _, body = data.partition(b"\n")
    header = _header(first)
    lines = body.splitlines()
    if len(lines) != header.count:
        raise BackupInvalid(f"it holds {len(lines)} records, its header says {header.count}: it was cut")
    if hashlib.sha256(body).hexdigest() != header.sha256:
        raise BackupInvalid("its records do not have the checksum of its header: it was changed or damaged")
    found: dict[str, bytes] = {}
    for number, text in enumerate(lines, start=2):
        key, value = _record(number, text)
        if key in found:
            raise BackupInvalid(f"line {number} has the key {key} a second time")
        found[key] = value
    return header, found


async def restore(store: Store, wanted: dict[str, bytes], at_ms: int, *, force: bool = False) -> Restored:
    """Makes the cluster hold exactly `wanted`, beside what is leased. Without `force` only an empty one is written to.
    Raises `RestoreRefused`; `StoreError` in the middle leaves the leader's key held (see above)."""
    listing = await store.list(records.ROOT)
    if not force:
        _check_free(listing)
    holder = await _take_leadership(store, listing, at_ms)
    listing = await store.list(records.ROOT)  # what the last leader wrote before it was shut out
    standing = {item.key: item for item in listing.items if item.key != records.LEADER and _is_kept(item)}
    leased = {item.key for item in listing.items if item.lease} - standing.keys()
    writes: list[Write] = [
        Put(key, value)
        for key, value in wanted.items()
        if key not in leased and (key not in standing or standing[key].value != value)
    ]
    gone = [Delete(key) for key in standing if key not in wanted]
    # What is wanted first: a grant that moved is never missing, and an agent that looks on stops nothing that stays.
    for chunk in _chunks([*writes, *gone]):
        await _write(store, holder, chunk)
    await _write(store, holder, [Delete(records.LEADER)])
    return Restored(len(writes), len(wanted) - len(writes), len(gone))


def _is_kept(item: KeyValue) -> bool:
    if item.key == records.LEADER:
        return False
    return not item.lease or item.key.startswith(records.IDEMPOTENCY)


def _line(item: KeyValue) -> bytes:
    try:
        line = _Line(item.key, value=item.value.decode())
    except UnicodeDecodeError:
        line = _Line(item.key, base64=base64.b64encode(item.value).decode())
    fields = {name: text for name in ("key", "value", "base64") if (text := getattr(line, name)) is not None}
    return msgspec.json.encode(fields) + b"\n"


def _header(text: bytes) -> Header:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict) or "serai_backup" not in found:
        raise BackupInvalid("it is no backup of Serai: its first line is no header")
    if found["serai_backup"] != FORMAT:
        raise BackupInvalid(
            f"it has the format {found['serai_backup']!r}, this version reads {FORMAT}: use the serai that wrote it"
        )
    try:
        return msgspec.convert(found, Header)
    except msgspec.ValidationError as error:
        raise BackupInvalid(f"its header: {error}") from error


def _record(number: int, text: bytes) -> tuple[str, bytes]:
    try:
        line = msgspec.json.decode(text, type=_Line)
        value = base64.b64decode(line.base64 or "", validate=True)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, ValueError) as error:
        raise BackupInvalid(f"line {number} is no record: {error}") from error
    if not line.key.startswith(records.ROOT) or line.key == records.LEADER:
        raise BackupInvalid(f"line {number} has the key {line.key!r}, which no backup holds")
    return line.key, line.value.encode() if line.value is not None else value


def _check_free(listing: Listing) -> None:
    for item in listing.items:
        if item.key == records.LEADER:
            raise RestoreRefused(f"{_named(item)} leads this cluster: stop the coordinators first")
    left = [item for item in listing.items if not item.lease]
    if left:
        raise RestoreRefused(
            f"this cluster is not empty: it holds {len(left)} records, such as {left[0].key}"
        )


def _named(item: KeyValue) -> str:
    try:
        leader = records.decode(records.Leadership, item.value)
    except records.Unreadable:
        return "somebody"
    return "an unfinished restore" if leader.id.startswith(f"{HOLDER}.") else f"the coordinator {leader.id}"


async def _take_leadership(store: Store, listing: Listing, at_ms: int) -> Compare:
    """Makes the leader's key ours; answers the condition that it still is. The old one is deleted first, since a key
    that is only put again keeps its creation revision, by which a leader knows its own."""
    before = next((item for item in listing.items if item.key == records.LEADER), None)
    held = Put(records.LEADER, records.encode(records.Leadership(f"{HOLDER}.{at_ms}", "", at_ms)))
    for _ in range(ATTEMPTS):
        if before is not None:
            await store.txn([unchanged(before.key, before.mod_revision)], [Delete(before.key)])
        result = await store.txn([absent(held.key)], [held])
        if result.succeeded:
            return unchanged(held.key, result.revision)
        before = await store.get(held.key)
    raise RestoreRefused("the leadership changes hands all the time: stop the coordinators first")


async def _write(store: Store, holder: Compare, writes: Sequence[Write]) -> None:
    for last in (False, False, True):
        try:
            result = await store.txn([holder], writes)
        except StoreUncertain:
            # Once more does no harm: the same values, under the same condition.
            if last:
                raise
            continue
        if not result.succeeded:
            raise StoreError("another restore or an operator took the leader's key; run the restore again")
        return


def _chunks(writes: Iterable[Write]) -> Iterator[list[Write]]:
    chunk: list[Write] = []
    size = 0
    for write in writes:
        more = len(write.key) + (len(write.value) if isinstance(write, Put) else 0)
        if chunk and (len(chunk) == WRITES_PER_TRANSACTION or size + more > BYTES_PER_TRANSACTION):
            yield chunk
            chunk, size = [], 0
        chunk.append(write)
        size += more
    if chunk:
        yield chunk
