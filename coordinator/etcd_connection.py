"""How Serai reaches etcd: endpoints, TLS, login, deadlines, and what an error of etcd means to a caller of the store.

Owns the gRPC channel; knows nothing of keys. Only reads are sent a second time. A write whose answer was lost is
`StoreUncertain` unless the error proves that etcd never took it, because a retried compare-and-swap would report its
own first success as a refusal.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio
from attrs import evolve, field, frozen

from coordinator.etcdpb import etcd_pb2 as pb
from coordinator.store import (
    Compacted,
    LeaseLost,
    RequestTooLarge,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUncertain,
)

DEFAULT_PORT = 2379
READ_PAUSES_SECONDS = (0.05, 0.1)  # a read is tried once more after each
RESOLVE_EVERY_SECONDS = 5.0

# keepalive: etcd drops a client that pings more often than each 5 s. ping_timeout is a limit of its own (60 s) and
# rules the keepalive's answer, so both are set. Backoff: gRPC's own grows to 120 s. min_reconnect_backoff is, in spite
# of its name, the time a connection may take to be made. Retries of gRPC are off: a transaction is sent once.
_CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

# Texts of errors after which the request was certainly not applied: the channel had no connection to send it on, or
# the member refused it before proposing it.
_NOT_SENT = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "empty address list",
)
_NOT_TAKEN = ("etcdserver: no leader", "etcdserver: too many requests", "etcdserver: not capable")
_TOO_LARGE = ("too many operations in txn", "request is too large", "larger than max")
_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.NOT_FOUND,
)

Q_contra = TypeVar("Q_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)
Q = TypeVar("Q", bound="_Message")
A = TypeVar("A", bound="_Message")


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...

    @classmethod
    def FromString(cls, s: bytes) -> Any: ...


@frozen
class Method(Generic[Q, A]):
    """One remote procedure of etcd. `needs_leader`: a member that has lost its leader refuses it at once, rather than
    letting it wait. `writes`: a lost answer is uncertain, and it is never sent twice."""

    path: str
    request: type[Q]
    answer: type[A]
    writes: bool = False
    needs_leader: bool = True


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse, writes=True)
COMPACT = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
LEASE_GRANT = Method(
    "/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse, writes=True
)
# Revoking twice does no harm, so it may be tried again like a read.
LEASE_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse)
STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse, needs_leader=False)
ALARM = Method("/etcdserverpb.Maintenance/Alarm", pb.AlarmRequest, pb.AlarmResponse)
MEMBERS = Method(
    "/etcdserverpb.Cluster/MemberList", pb.MemberListRequest, pb.MemberListResponse, needs_leader=False
)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)


@frozen
class EtcdSettings:
    """Where etcd is and how to log in. `ca_file`, `cert_file` and `key_file` are paths of PEM files, read when a connection is made.

    All members' certificates must be valid for `server_name` (by default the host of the first endpoint), since the
    connection chooses among members by address. `timeout_seconds` is the deadline of one call.
    """

    endpoints: tuple[tuple[str, int], ...] = (("127.0.0.1", DEFAULT_PORT),)
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_seconds: float = 2.0

    def __attrs_post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("etcd: at least one endpoint is needed")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("etcd: cert_file and key_file are given together or not at all")
        if (self.ca_file or self.cert_file) and not self.tls:
            raise ValueError("etcd: certificates need https:// endpoints")
        if self.timeout_seconds <= 0:
            raise ValueError(f"etcd: timeout_seconds must be above 0, not {self.timeout_seconds}")

    @classmethod
    def from_url(cls, urls: str, **options: Any) -> EtcdSettings:
        """From "http://host:2379,http://..." or https; the scheme may be left out (http), and so may the port (2379).
        `options` are the other fields. A user and password in a URL are taken. Raises `ValueError`."""
        parsed = [
            urlsplit(part if "://" in part else f"http://{part}")
            for part in (p.strip() for p in urls.split(","))
            if part
        ]
        if not parsed:
            raise ValueError(f"etcd: no endpoint in {urls!r}")
        schemes = {url.scheme for url in parsed}
        if not schemes <= {"http", "https"} or len(schemes) > 1:
            raise ValueError(f"etcd: endpoints must be all http:// or all https://, not {sorted(schemes)}")
        if not all(url.hostname for url in parsed):
            raise ValueError("etcd: an endpoint has no host")
        if parsed[0].username:
            options = {"user": parsed[0].username, "password": parsed[0].password or ""} | options
        endpoints = tuple((url.hostname or "", url.port or DEFAULT_PORT) for url in parsed)
        return evolve(cls(endpoints=endpoints, tls=schemes == {"https"}), **options)


def translated(error: grpc.aio.AioRpcError, *, writes: bool) -> StoreError | ValueError:
    """What an error of a call means to the caller of the store."""
    code, text = error.code(), error.details() or ""
    if "database space exceeded" in text:
        return StoreFull(f"etcd's space quota is used up: compact, defragment, disarm the alarm ({text})")
    if any(part in text for part in _TOO_LARGE):
        return RequestTooLarge(text)
    if "requested lease not found" in text:
        return LeaseLost(text)
    if "required revision has been compacted" in text:
        return Compacted(0)
    if "duplicate key" in text:
        return ValueError("a transaction writes the same key twice")
    refused = code in _REFUSALS or any(part in text for part in _NOT_TAKEN)
    if not writes or refused or text.startswith(_NOT_SENT):
        return StoreUnavailable(f"etcd: {code.name}: {text}")
    return StoreUncertain(f"etcd: {code.name}: {text}")


def is_login_stale(text: str) -> bool:
    """The token has expired, or etcd was restarted and has forgotten it; a new login mends it."""
    return any(
        part in text for part in ("invalid auth token", "revision of auth store is old", "user name is empty")
    )


class EtcdConnection:
    """One channel to all members. Made on first use, inside the running loop."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self.closed = False
        self._channel: grpc.aio.Channel | None = None
        self._retired: list[grpc.aio.Channel] = []
        self._calls: dict[str, Callable[..., Any]] = {}
        self._target = ""
        self._resolved_at = 0.0
        self._token = ""
        self._connecting = asyncio.Lock()
        self._logging_in = asyncio.Lock()

    async def call(self, method: Method[Q, A], request: Q) -> A:
        """One unary call. Raises what `translated` says."""
        pauses = () if method.writes else READ_PAUSES_SECONDS
        for pause in (*pauses, None):
            try:
                return await self._logged_in(method, request)
            except StoreUnavailable as error:
                if pause is None or isinstance(error, StoreFull):
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def stream(self, method: Method[Q, A]) -> tuple[grpc.aio.StreamStreamCall[Q, A], str]:
        """A new stream, and the token that it was opened with (for `renew_login`)."""
        channel = await self._connect()
        token = await self._login()
        opened: grpc.aio.StreamStreamCall[Q, A] = channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.answer.FromString,
        )(None, metadata=self._metadata(method, token))
        return opened, token

    async def renew_login(self, stale: str) -> None:
        """Logs in anew, unless another call has done so since the token `stale` was current."""
        async with self._logging_in:
            if self._token == stale:
                self._token = ""
        await self._login()

    async def lost(self) -> None:
        """A caller could not reach etcd: looks whether the endpoints' names lead elsewhere by now."""
        if asyncio.get_running_loop().time() - self._resolved_at >= RESOLVE_EVERY_SECONDS:
            self._resolved_at = asyncio.get_running_loop().time()
            if await self._resolve() != self._target and self._channel is not None:
                # Closing it would cancel its calls in flight under their callers; so it is closed at the end.
                self._retired.append(self._channel)
                self._channel = None

    async def close(self) -> None:
        self.closed = True
        for channel in (self._channel, *self._retired):
            if channel is not None:
                await channel.close(None)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _logged_in(self, method: Method[Q, A], request: Q) -> A:
        token = await self._login()
        try:
            return await self._send(method, request, token)
        except grpc.aio.AioRpcError as error:
            if not self.settings.user or not is_login_stale(error.details() or ""):
                raise await self._failure(error, method) from None
        # A call with a stale token was refused before it was applied, so even a transaction may be sent again.
        await self.renew_login(token)
        try:
            return await self._send(method, request, self._token)
        except grpc.aio.AioRpcError as error:
            raise await self._failure(error, method) from None

    async def _failure(self, error: grpc.aio.AioRpcError, method: Method[Q, A]) -> Exception:
        failure = translated(error, writes=method.writes)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            await self.lost()
        return failure

    async def _send(self, method: Method[Q, A], request: Q, token: str) -> A:
        channel = await self._connect()
        call = self._calls.get(method.path)
        if call is None:
            call = self._calls[method.path] = channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
        answer: A = await call(
            request, timeout=self.settings.timeout_seconds, metadata=self._metadata(method, token)
        )
        return answer

    def _metadata(self, method: Method[Q, A], token: str) -> grpc.aio.Metadata:
        pairs = [("hasleader", "true")] if method.needs_leader else []
        if token:
            pairs.append(("token", token))
        return grpc.aio.Metadata(*pairs)

    async def _login(self) -> str:
        """The current token; empty where no user is set or etcd asks for none."""
        if not self.settings.user or self._token:
            return self._token
        async with self._logging_in:
            if not self._token:
                request = pb.AuthenticateRequest(name=self.settings.user, password=self.settings.password)
                try:
                    self._token = (await self._send(AUTHENTICATE, request, "")).token
                except grpc.aio.AioRpcError as error:
                    if "authentication is not enabled" not in (error.details() or ""):
                        raise await self._failure(error, AUTHENTICATE) from None
            return self._token

    # --- the channel --------------------------------------------------------------------------------------------------

    async def _connect(self) -> grpc.aio.Channel:
        if self.closed:
            raise StoreUnavailable("the store was closed")
        if self._channel is not None:
            return self._channel
        async with self._connecting:
            if self._channel is None:
                self._resolved_at = asyncio.get_running_loop().time()
                self._target = await self._resolve()
                if not self._target:
                    hosts = ", ".join(host for host, _ in self.settings.endpoints)
                    raise StoreUnavailable(f"etcd: no address found for {hosts}")
                credentials = await asyncio.to_thread(self._credentials)
                self._calls.clear()
                self._channel = self._open(credentials)
            return self._channel

    def _open(self, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        options: list[tuple[str, Any]] = list(_CHANNEL_OPTIONS)
        if credentials is None:
            return grpc.aio.insecure_channel(self._target, options)
        name = self.settings.server_name or self.settings.endpoints[0][0]
        options.append(("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(self._target, credentials, options)

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if not self.settings.tls:
            return None
        try:
            ca, key, cert = (
                Path(path).read_bytes() if path else None
                for path in (self.settings.ca_file, self.settings.key_file, self.settings.cert_file)
            )
        except OSError as error:
            raise StoreUnavailable(f"etcd: a certificate file cannot be read: {error}") from error
        return grpc.ssl_channel_credentials(ca, key, cert)

    async def _resolve(self) -> str:
        """A gRPC target of all addresses of all endpoints, one family only as gRPC asks; empty when none is known."""
        found: list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]] = []
        for host, port in self.settings.endpoints:
            found += [(address, port) for address in await _addresses(host)]
        version = 4 if any(address.version == 4 for address, _ in found) else 6
        chosen = dict.fromkeys((address, port) for address, port in found if address.version == version)
        if not chosen:
            return ""
        if version == 4:
            return "ipv4:" + ",".join(f"{address}:{port}" for address, port in chosen)
        return "ipv6:" + ",".join(f"[{address}]:{port}" for address, port in chosen)


async def _addresses(host: str) -> Sequence[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        pass
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [ipaddress.ip_address(info[4][0]) for info in infos]
