"""Group commit of submitted jobs: requests append to one queue, and a few transactions in flight empty it.

There is no timer: an idle slot takes a single submission at once, and while all slots are busy what arrives meanwhile
shares the next transaction. In each transaction

    IF   the queue key of each job is absent, its tenant's record is as read, its idempotency key is as read
    THEN put each job, and its idempotency record

so that a submission (one job or a list) lands whole or not at all. What a transaction was refused for is taken out or
read again, and the others go at once without it. A transaction whose answer was lost is read back before anything else:
each transaction also asks that a fence key, made up by this process, is absent, and putting that key makes sure that a
transaction which is still under way will never be applied.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from attrs import define, field, frozen

from coordinator import records
from coordinator.model import Job, Tenant
from coordinator.store import (
    Compare,
    KeyValue,
    LeaseLost,
    Put,
    RequestTooLarge,
    Store,
    StoreError,
    StoreUnavailable,
    StoreUncertain,
    TxnResult,
    absent,
    unchanged,
)

logger = logging.getLogger(__name__)

IN_FLIGHT = 3
# etcd takes 1.5 MiB a request; keys and compares come on top of the values.
TRANSACTION_BYTES = 1_000_000
QUEUE_BYTES = 32 * 1024 * 1024
_FENCE_SECONDS = 3600
_ROUNDS = 20
_RETRY_SECONDS = 0.05


class QueueFull(Exception):
    """More is waiting to be written than this process holds. `limit` and `value` are jobs or bytes, as `unit` says."""

    def __init__(self, unit: str, limit: int, value: int) -> None:
        super().__init__(f"{value} {unit} wait to be written, at most {limit} may")
        self.unit, self.limit, self.value = unit, limit, value


class TenantUnknown(Exception):
    """There is no such tenant, or (`closing`) it is being deleted."""

    def __init__(self, tenant: str, closing: bool) -> None:
        super().__init__(tenant)
        self.tenant, self.closing = tenant, closing


class IdempotencyConflict(Exception):
    """The idempotency key was used with another body."""


class IdTaken(Exception):
    """A job of this id is there already: take new ids."""


@frozen
class Receipt:
    """The submission is durable at `revision`. `replayed` is the record of an earlier submission with the same
    idempotency key and body, whose answer is to be given again; nothing was written then."""

    revision: int
    replayed: records.Idempotency | None = None


@define(eq=False)
class Submission:
    """Jobs that are written all or none. `key` is the etcd key of their idempotency record, empty for none."""

    jobs: Sequence[Job]
    key: str = ""
    body_sha256: str = ""
    values: list[bytes] = field(factory=list)
    bytes: int = 0
    key_revision: int = 0  # of the idempotency record that has expired and is overwritten
    done: asyncio.Future[Receipt] = field(factory=lambda: asyncio.get_running_loop().create_future())

    def __attrs_post_init__(self) -> None:
        self.values = [records.encode(job) for job in self.jobs]
        self.bytes = sum(map(len, self.values)) + 200 * len(self.jobs)

    @property
    def operations(self) -> int:
        """Compares it may need, without the fence; never more writes than that."""
        return len(self.jobs) + len({job.tenant for job in self.jobs}) + bool(self.key)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # its request may be gone: nobody need look

    def succeed(self, receipt: Receipt) -> None:
        if not self.done.done():
            self.done.set_result(receipt)


class SubmitPump:
    """`start` and `close` bracket its work. `observe_batch` is told the number of jobs in each durable transaction,
    `observe_revision` its revision."""

    def __init__(
        self,
        store: Store,
        *,
        max_operations: int,
        queue_jobs: int,
        idempotency_seconds: int,
        clock_ms: Callable[[], int],
        random: Random,
        observe_batch: Callable[[int], None] = lambda jobs: None,
        observe_revision: Callable[[int], None] = lambda revision: None,
    ) -> None:
        self.newest_revision = 0  # of what this process has made durable
        self._store = store
        self._max_operations = max_operations - 1  # the fence
        self._queue_jobs = queue_jobs
        self._idempotency_seconds = idempotency_seconds
        self._clock_ms = clock_ms
        self._random = random
        self._observe_batch = observe_batch
        self._observe_revision = observe_revision
        self._waiting: deque[Submission] = deque()
        self._arrived = asyncio.Event()
        self._jobs = 0
        self._bytes = 0
        self._tenants: dict[str, int] = {}  # mod_revision of tenants that took jobs
        self._fence = self._new_fence()
        self._leases: dict[int, int] = {}  # hour -> lease of the idempotency records of that hour
        self._workers: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def waiting_jobs(self) -> int:
        return self._jobs

    def start(self) -> None:
        self._workers = [asyncio.create_task(self._work(), name=f"submit-{n}") for n in range(IN_FLIGHT)]

    async def close(self) -> None:
        """Writes what was already taken in, then ends. New submissions are refused."""
        self._closed = True
        self._arrived.set()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def submit(self, submission: Submission) -> Receipt:
        """Returns once the submission is durable. Raises `QueueFull`, `RequestTooLarge`, `TenantUnknown`,
        `IdempotencyConflict`, `IdTaken`, or a `StoreError` (nothing was written, unless it is `StoreUncertain`).
        If the caller is cancelled the submission still goes its way."""
        if self._closed:
            raise QueueFull("jobs", 0, len(submission.jobs))
        if submission.operations > self._max_operations or submission.bytes > TRANSACTION_BYTES:
            raise RequestTooLarge(
                f"{submission.operations} operations and {submission.bytes} bytes; a submission takes at most"
                f" {self._max_operations} and {TRANSACTION_BYTES}"
            )
        for unit, limit, value in (
            ("jobs", self._queue_jobs, self._jobs + len(submission.jobs)),
            ("bytes", QUEUE_BYTES, self._bytes + submission.bytes),
        ):
            if value > limit:
                raise QueueFull(unit, limit, value)
        self._jobs += len(submission.jobs)
        self._bytes += submission.bytes
        self._waiting.append(submission)
        self._arrived.set()
        return await asyncio.shield(submission.done)

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                if self._closed:
                    return
                self._arrived.clear()
                await self._arrived.wait()
            batch = self._take()
            try:
                await self._commit(batch)
            except Exception as error:  # a request must get its answer, and the pump must go on
                if not isinstance(error, StoreError):
                    logger.exception("submit: a transaction failed")
                for submission in batch:
                    submission.fail(error)
            finally:
                self._jobs -= sum(len(submission.jobs) for submission in batch)
                self._bytes -= sum(submission.bytes for submission in batch)

    def _take(self) -> list[Submission]:
        batch = [self._waiting.popleft()]
        operations, size = batch[0].operations, batch[0].bytes
        keys = {batch[0].key} - {""}
        while self._waiting:
            following = self._waiting[0]
            # Two of one idempotency key must not share a transaction: the second has to see the first.
            if (
                operations + following.operations > self._max_operations
                or size + following.bytes > TRANSACTION_BYTES
                or following.key in keys
            ):
                break
            batch.append(self._waiting.popleft())
            operations += following.operations
            size += following.bytes
            keys |= {following.key} - {""}
        return batch

    async def _commit(self, batch: Sequence[Submission]) -> None:
        left = list(batch)
        for _ in range(_ROUNDS):
            tenants = await self._tenants_of(left)
            left = _with_open_tenants(left, tenants)
            if not left:
                return
            fence = self._fence
            try:
                lease = await self._lease() if any(submission.key for submission in left) else 0
                result = await self._store.txn(_compares(left, tenants, fence), _writes(left, lease))
            except LeaseLost:
                self._leases.clear()
                continue
            except StoreUncertain:
                revision = await self._read_back(left, fence)
                if revision is None:
                    continue
                self._settle(left, revision)
                return
            if result.succeeded:
                self._settle(left, result.revision)
                return
            left = await self._without_refused(left, tenants, result.seen)
        for submission in left:
            submission.fail(StoreUnavailable("other writes came first, again and again"))

    def _settle(self, batch: Sequence[Submission], revision: int) -> None:
        self.newest_revision = max(self.newest_revision, revision)
        for submission in batch:
            submission.succeed(Receipt(revision))
        self._observe_batch(sum(len(submission.jobs) for submission in batch))
        self._observe_revision(revision)

    async def _tenants_of(self, batch: Sequence[Submission]) -> dict[str, int]:
        """The mod_revision of each tenant that takes jobs; 0 for one that is being deleted."""
        found: dict[str, int] = {}
        for name in sorted(_tenants(batch)):
            known = self._tenants.get(name)
            if known is None:
                item = await self._store.get(records.tenant_key(name))
                if item is None:
                    continue
                closing = records.decode(Tenant, item.value).closing
                known = 0 if closing else item.mod_revision
                if known:
                    self._tenants[name] = known
            found[name] = known
        return found

    async def _without_refused(
        self, batch: Sequence[Submission], tenants: dict[str, int], seen: dict[str, KeyValue | None]
    ) -> list[Submission]:
        """Those that may go again, after a refusal that saw these keys."""
        for name, revision in tenants.items():
            item = seen.get(records.tenant_key(name))
            if item is None or item.mod_revision != revision:
                self._tenants.pop(name, None)
        left = []
        for submission in batch:
            if any(seen.get(records.queue_key(job.tenant, job.id)) is not None for job in submission.jobs):
                submission.fail(IdTaken())
                continue
            item = seen.get(submission.key) if submission.key else None
            found = item.mod_revision if item else 0
            if found == submission.key_revision or not await self._replay(submission):
                left.append(submission)
        return left

    async def _replay(self, submission: Submission) -> bool:
        """Answers a submission whose idempotency key is used; False where that use has expired or gone."""
        item = await self._store.get(submission.key)
        submission.key_revision = item.mod_revision if item else 0
        if item is None:
            return False
        record = records.decode(records.Idempotency, item.value)
        if record.at_ms + self._idempotency_seconds * 1000 <= self._clock_ms():
            return False
        if record.body_sha256 != submission.body_sha256:
            submission.fail(IdempotencyConflict())
        else:
            submission.succeed(Receipt(item.mod_revision, replayed=record))
        return True

    async def _read_back(self, batch: Sequence[Submission], fence: str) -> int | None:
        """After a lost answer: the revision at which the batch is known to be durable, None where it never will be.
        First the fence is put, so that the transaction cannot arrive after it was looked for. One transaction wrote
        all of the batch, so one job speaks for all; wherever its record has moved to counts."""
        job = batch[0].jobs[0]
        queue, idempotency = records.queue_key(job.tenant, job.id), max(one.key for one in batch)
        keys = (queue, records.job_key(job.id), records.done_key(job.id), idempotency)
        failure: StoreError | None = None
        if self._fence == fence:
            # Before it is put: should that answer be lost too, nothing more must go by a fence that may be there.
            self._fence = self._new_fence()
        for _ in range(_ROUNDS):
            try:
                lease = await self._store.grant_lease(_FENCE_SECONDS)
                await self._store.txn([], [Put(fence, b"{}", lease)])
                result = await self._store.txn([absent(key) for key in keys if key], [])
                return _written_at(result, keys)
            except StoreError as error:
                failure = error
                await asyncio.sleep(_RETRY_SECONDS)
        raise StoreUncertain("the answer to a submit was lost and could not be read back") from failure

    def _new_fence(self) -> str:
        return records.fence_key(f"{self._random.getrandbits(64):016x}")

    async def _lease(self) -> int:
        """One lease for all idempotency records of an hour: the store forgets them by itself."""
        hour = self._clock_ms() // 3_600_000
        if hour not in self._leases:
            lease = await self._store.grant_lease(self._idempotency_seconds + 2 * 3600)
            self._leases = {hour: lease}
        return self._leases[hour]


def _written_at(result: TxnResult, keys: tuple[str, str, str, str]) -> int | None:
    """The revision of the transaction whose job stands under one of `keys` (queue, jobs, done; last the idempotency
    key of one of its submissions, or empty); None where there is no such job. Nobody writes an idempotency record a
    second time, and a record that waits was created by its submit; of one that has moved only later is known."""
    queue, live, done, idempotency = (result.seen.get(key) for key in keys)
    if result.succeeded or not (queue or live or done):
        return None
    if idempotency is not None:
        return idempotency.mod_revision
    return queue.create_revision if queue is not None else result.revision


def _tenants(batch: Sequence[Submission]) -> set[str]:
    return {job.tenant for submission in batch for job in submission.jobs}


def _with_open_tenants(batch: Sequence[Submission], tenants: dict[str, int]) -> list[Submission]:
    """Fails the submissions whose tenant is gone or going, and returns the others."""
    left = []
    for submission in batch:
        bad = sorted(job.tenant for job in submission.jobs if not tenants.get(job.tenant))
        if bad:
            submission.fail(TenantUnknown(bad[0], closing=bad[0] in tenants))
        else:
            left.append(submission)
    return left


def _compares(batch: Sequence[Submission], tenants: dict[str, int], fence: str) -> list[Compare]:
    compares = [absent(fence)]
    compares += [unchanged(records.tenant_key(name), tenants[name]) for name in sorted(_tenants(batch))]
    for submission in batch:
        compares += [absent(records.queue_key(job.tenant, job.id)) for job in submission.jobs]
        if submission.key:
            compares.append(unchanged(submission.key, submission.key_revision))
    return compares


def _writes(batch: Sequence[Submission], lease: int) -> list[Put]:
    writes: list[Put] = []
    for submission in batch:
        pairs = zip(submission.jobs, submission.values, strict=True)
        writes += [Put(records.queue_key(job.tenant, job.id), value) for job, value in pairs]
        if submission.key:
            ids = tuple(job.id for job in submission.jobs)
            record = records.Idempotency(submission.body_sha256, ids, submission.jobs[0].submitted_at_ms)
            writes.append(Put(submission.key, records.encode(record), lease))
    return writes
