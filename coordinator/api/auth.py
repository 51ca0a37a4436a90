"""Who is asking: bearer tokens, of which only a hash is stored, and what a role may do.

The book of tokens follows /serai/tokens/ by watch, so a revoked token stops within moments on every instance. A token
that the book does not know is looked up once in the store, so a new one works everywhere at once.
"""

from __future__ import annotations

import asyncio
import logging

from attrs import frozen

from coordinator import records
from coordinator.api.problems import Problem
from coordinator.model import Job
from coordinator.store import Compacted, Store, StoreError

logger = logging.getLogger(__name__)

ADMIN = "admin"
TENANT = "tenant"
_RETRY_SECONDS = 1.0


@frozen
class Caller:
    """The identity behind a request."""

    role: str
    tenant: str
    label: str
    token_sha256: str

    @property
    def is_admin(self) -> bool:
        return self.role == ADMIN

    def may_see(self, tenant: str) -> bool:
        return self.is_admin or self.tenant == tenant

    def owns(self, job: Job) -> bool:
        return self.may_see(job.tenant)


class TokenBook:
    """`follow` runs until cancelled."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tokens: dict[str, records.Token] = {}
        self._revision = 0

    async def caller(self, authorization: str) -> Caller:
        """The caller of this Authorization header. Raises a 401 `Problem`, or a `StoreError` where it cannot be known."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise _denied(
                "a bearer token is needed", "send the header Authorization: Bearer TOKEN, or log in"
            )
        digest = records.token_hash(token)
        record = self._tokens.get(digest)
        if record is None:
            item = await self._store.get(records.TOKENS + digest)
            if item is None:
                raise _denied(
                    "this token is not known", "it may have been revoked: ask an administrator for another"
                )
            record = records.decode(records.Token, item.value)
            if item.mod_revision > self._revision:  # what the watch has passed and not kept was revoked since
                self._tokens[digest] = record
        return Caller(record.role, record.tenant, record.label, digest)

    def forget(self, digest: str) -> None:
        """At once, where this instance has revoked it itself."""
        self._tokens.pop(digest, None)

    async def follow(self) -> None:
        while True:
            try:
                listing = await self._store.list(records.TOKENS)
                self._tokens = {}
                for item in listing.items:
                    self._keep(item.key, item.value)
                self._revision = listing.revision
                async for batch in self._store.watch(records.TOKENS, listing.revision):
                    for change in batch.changes:
                        if change.deleted:
                            self._tokens.pop(change.item.key.removeprefix(records.TOKENS), None)
                        else:
                            self._keep(change.item.key, change.item.value)
                    self._revision = batch.revision
            except Compacted:
                continue
            except StoreError as error:
                logger.warning("tokens: the store is not there (%s); known tokens go on", error)
                await asyncio.sleep(_RETRY_SECONDS)

    def _keep(self, key: str, value: bytes) -> None:
        digest = key.removeprefix(records.TOKENS)
        try:
            self._tokens[digest] = records.decode(records.Token, value)
        except records.Unreadable as error:
            self._tokens.pop(digest, None)
            logger.warning("tokens: %s cannot be read: %s", digest, error)


def _denied(detail: str, hint: str) -> Problem:
    return Problem(401, "login_denied", detail, hint=hint)
