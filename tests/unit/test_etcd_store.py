"""The parts of the etcd store that need no etcd: settings, what errors mean, and how a long list is cut in pages."""

from __future__ import annotations

from bisect import bisect_left

import grpc
import grpc.aio
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from coordinator import etcd_store
from coordinator.etcd_connection import EtcdSettings, translated
from coordinator.etcd_watch import prefix_end
from coordinator.store import LeaseLost, RequestTooLarge, StoreFull, StoreUnavailable, StoreUncertain

# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "endpoints", "tls"),
    [
        ("http://127.0.0.1:2379", (("127.0.0.1", 2379),), False),
        ("etcd-0, etcd-1:1234", (("etcd-0", 2379), ("etcd-1", 1234)), False),
        ("https://a:1,https://[::1]:2/", (("a", 1), ("::1", 2)), True),
    ],
)
def test_endpoints_are_read(url: str, endpoints: tuple[tuple[str, int], ...], tls: bool) -> None:
    read = EtcdSettings.from_url(url)
    assert (read.endpoints, read.tls) == (endpoints, tls)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("", {}, "no endpoint"),
        (" , ", {}, "no endpoint|no host"),
        ("http://a,https://b", {}, "all http:// or all https://"),
        ("ftp://a", {}, "all http:// or all https://"),
        ("http://a", {"ca_file": "ca.pem"}, "need https://"),
        ("https://a", {"cert_file": "c.pem"}, "together"),
        ("http://a", {"timeout_seconds": 0}, "above 0"),
        ("http://a:99999", {}, "(?i)port"),
    ],
)
def test_wrong_settings_are_named(url: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EtcdSettings.from_url(url, **options)


def test_a_password_is_not_shown() -> None:
    """AP-6."""
    read = EtcdSettings.from_url("http://root:s3cret@a", timeout_seconds=1)
    assert (read.user, read.password) == ("root", "s3cret")
    assert "s3cret" not in repr(read)


# --- errors ----------------------------------------------------------------------------------------------------------

CODES = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "text", "of_write", "of_read"),
    [
        (
            CODES.UNAVAILABLE,
            "failed to connect to all addresses; last error: refused",
            StoreUnavailable,
            StoreUnavailable,
        ),
        (
            CODES.UNAVAILABLE,
            "connections to all backends failing; last error: x",
            StoreUnavailable,
            StoreUnavailable,
        ),
        (CODES.UNAVAILABLE, "etcdserver: no leader", StoreUnavailable, StoreUnavailable),
        (CODES.RESOURCE_EXHAUSTED, "etcdserver: too many requests", StoreUnavailable, StoreUnavailable),
        (CODES.PERMISSION_DENIED, "etcdserver: permission denied", StoreUnavailable, StoreUnavailable),
        (CODES.UNAUTHENTICATED, "etcdserver: invalid auth token", StoreUnavailable, StoreUnavailable),
        (CODES.UNAVAILABLE, "Socket closed", StoreUncertain, StoreUnavailable),
        (CODES.UNAVAILABLE, "recvmsg:Connection reset by peer", StoreUncertain, StoreUnavailable),
        (CODES.UNAVAILABLE, "etcdserver: request timed out", StoreUncertain, StoreUnavailable),
        (CODES.UNAVAILABLE, "etcdserver: leader changed", StoreUncertain, StoreUnavailable),
        (CODES.DEADLINE_EXCEEDED, "Deadline Exceeded", StoreUncertain, StoreUnavailable),
        (CODES.UNKNOWN, "context deadline exceeded", StoreUncertain, StoreUnavailable),
        (CODES.CANCELLED, "", StoreUncertain, StoreUnavailable),
        (CODES.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", StoreFull, StoreFull),
        (
            CODES.INVALID_ARGUMENT,
            "etcdserver: too many operations in txn request",
            RequestTooLarge,
            RequestTooLarge,
        ),
        (CODES.INVALID_ARGUMENT, "etcdserver: request is too large", RequestTooLarge, RequestTooLarge),
        (
            CODES.RESOURCE_EXHAUSTED,
            "grpc: received message larger than max (3 vs. 2)",
            RequestTooLarge,
            RequestTooLarge,
        ),
        (CODES.NOT_FOUND, "etcdserver: requested lease not found", LeaseLost, LeaseLost),
    ],
)
def test_what_an_error_means(code: grpc.StatusCode, text: str, of_write: type, of_read: type) -> None:
    """Only what etcd certainly never took is `StoreUnavailable` for a write."""
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=text)
    assert type(translated(error, writes=True)) is of_write
    assert type(translated(error, writes=False)) is of_read


# --- pages -----------------------------------------------------------------------------------------------------------


def test_the_end_of_a_prefix_is_its_first_other_key() -> None:
    assert prefix_end(b"/a/") == b"/a0"
    assert prefix_end(b"/a\xff\xff") == b"/b"
    assert prefix_end(b"\xff\xff") == prefix_end(b"") == b"\0", "to the end of all keys"


class Keys:
    """What etcd answers to a Range, and what it has to walk for it."""

    def __init__(self, keys: list[bytes], value_bytes: int) -> None:
        self.keys = sorted(set(keys))
        self.value_bytes = value_bytes
        self.walked = self.requests = 0

    def range(self, start: bytes, end: bytes, limit: int) -> tuple[list[bytes], int]:
        low = bisect_left(self.keys, start)
        high = len(self.keys) if end == b"\0" else bisect_left(self.keys, end)
        self.requests += 1
        self.walked += max(0, high - low)
        return self.keys[low:high][:limit], max(0, high - low)

    def read(self, prefix: bytes) -> list[bytes]:
        pages = etcd_store._Pages([etcd_store.Span(prefix or b"\0", prefix_end(prefix))])
        found: list[bytes] = []
        while not pages.done:
            keys, count = self.range(pages.start, pages.bound, pages.size)
            found += keys
            pages.advance(keys, count, sum(len(key) + self.value_bytes for key in keys))
            assert self.requests < 20_000, "does not come to an end"
        return found


folders = st.lists(
    st.sampled_from([b"a", b"b", b"ab", b"long-name", b"\xff", b"\x01"]), min_size=1, max_size=3
)
clusters = st.lists(
    st.tuples(folders, st.integers(0, 2**40), st.integers(1, 1_500), st.sampled_from([1, 7, 2**20])),
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(clusters, st.sampled_from([b"", b"/a", b"/a/", b"/\xff"]), st.sampled_from([10, 1_000, 100_000]))
def test_pages_hold_every_key_once_property(
    groups: list[tuple[list[bytes], int, int, int]], prefix: bytes, value_bytes: int
) -> None:
    keys = [
        b"/" + b"/".join(path) + b"/%013x" % (first + step * n)
        for path, first, count, step in groups
        for n in range(count)
    ]
    store = Keys(keys, value_bytes)
    found = store.read(prefix)
    event(f"pages: {'one' if store.requests == 1 else 'several'}")
    assert found == [key for key in store.keys if key.startswith(prefix)]


@pytest.mark.parametrize(("tenants", "jobs"), [(1, 100_000), (50, 2_000), (5_000, 20)])
def test_pages_of_many_keys_are_not_quadratic(tenants: int, jobs: int) -> None:
    """100,000 jobs, in runs of ids as bursts of submissions make them. Pages of 1,000 with nothing but a limit would
    walk 50 times as many keys as there are."""
    keys = [
        b"/serai/queue/tenant-%04d/%016d" % (tenant, (n // 100) * 10**9 + n)
        for tenant in range(tenants)
        for n in range(jobs)
    ]
    store = Keys(keys, 600)
    assert store.read(b"/serai/queue/") == store.keys
    assert store.walked < 12 * len(keys)
    assert store.requests < 200
