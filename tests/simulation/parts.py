"""The processes of the world: what stands in the composition roots of the coordinator, the API and the agent, on a
store, an engine and a machine that are simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from coordinator.api.submit import (
    IdempotencyConflict,
    IdTaken,
    QueueFull,
    Submission,
    SubmitPump,
    TenantUnknown,
)
from coordinator.cluster import Cluster
from coordinator.commit import LeadershipLost
from coordinator.config import Settings
from coordinator.engines import Engine
from coordinator.leader import campaign
from coordinator.lifecycle import cancelled
from coordinator.model import Happening, Job, JobState
from coordinator.records import (
    Endpoint,
    decode,
    done_key,
    encode,
    folder_key,
    idempotency_key,
    job_key,
    new_job_id,
    queue_key,
)
from coordinator.replica import Replica
from coordinator.scheduler import serve_term
from coordinator.store import Delete, Put, Store, StoreUnavailable, StoreUncertain, unchanged
from jobspecs.spec import JobSpec
from nodeagent.agent import Agent, NodeIdentity
from nodeagent.gpu_source import GpuReader
from nodeagent.machine import Machine as MachineFacts
from nodeagent.presence import Presence
from nodeagent.runner import TaskKey
from tests.simulation.loop import Process
from tests.simulation.machine import Machine, RunnerFates, SimulatedRunner, SimulatedSteps
from vgpu.reasons import Reason, ReasonCode

CANCEL_ROUNDS = 10


async def coordinate(
    process: Process,
    store: Store,
    settings: Settings,
    identity: str,
    make_engine: Callable[[Replica], Engine],
) -> None:
    """A coordinator in the role `scheduler`: it follows the store, and leads one term after another."""
    replica = Replica(store, lambda: Cluster(settings), process.clock_ms)
    engine = make_engine(replica)
    following = asyncio.create_task(replica.run())
    leading = asyncio.create_task(_lead(process, store, settings, identity, replica, engine))
    try:
        await asyncio.wait((following, leading), return_when=asyncio.FIRST_COMPLETED)
        for task in (following, leading):
            if task.done():
                task.result()
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
        following.cancel()


async def _lead(
    process: Process, store: Store, settings: Settings, identity: str, replica: Replica, engine: Engine
) -> None:
    await replica.ready()
    while True:
        term = await campaign(store, settings, identity, process.clock_ms, address=identity)
        try:
            await serve_term(term, store, replica, engine, settings, process.clock_ms)
        except (LeadershipLost, StoreUnavailable):
            pass  # the next term
        finally:
            await asyncio.shield(term.resign())


class Api:
    """What the API does with submits and cancels: the pump is the real one."""

    def __init__(self, process: Process, store: Store, settings: Settings, random: Random) -> None:
        self._process = process
        self._store = store
        self._random = random
        self._pump = SubmitPump(
            store,
            max_operations=settings.max_writes_per_transaction,
            queue_jobs=settings.submit_queue_jobs,
            idempotency_seconds=settings.idempotency_seconds,
            clock_ms=process.clock_ms,
            random=random,
        )

    async def serve(self) -> None:
        self._pump.start()

    async def submit(self, spec: JobSpec, key: str, sent: Callable[[str], None]) -> str:
        """The id of the job; `sent` hears of each id before it is sent. StoreUnavailable, StoreUncertain."""
        for _ in range(3):
            now_ms = self._process.clock_ms()
            id = new_job_id(now_ms, self._random)
            happening = Happening(JobState.PENDING, now_ms, 1, Reason(ReasonCode.SUBMITTED))
            job = Job(id, spec, JobState.PENDING, now_ms, now_ms, history=(happening,))
            sent(id)
            etcd_key = idempotency_key(spec.tenant, key) if key else ""
            try:
                receipt = await self._pump.submit(Submission([job], etcd_key, spec.name))
            except IdTaken:
                continue
            except (QueueFull, TenantUnknown, IdempotencyConflict) as error:
                raise AssertionError(f"a submit was refused: {error!r}") from error
            return receipt.replayed.jobs[0] if receipt.replayed is not None else id
        raise AssertionError("no free job id was found")

    async def cancel(self, tenant: str, id: str) -> str:
        """ "cancel" once the wish is durable, "" when the job had ended. StoreUnavailable."""
        for _ in range(CANCEL_ROUNDS):
            found = [await self._store.get(key) for key in (queue_key(tenant, id), job_key(id), done_key(id))]
            item = next((item for item in found if item is not None), None)
            if item is None:
                continue  # it moved between the looks
            job = decode(Job, item.value)
            if job.state.is_final:
                return ""
            if job.state is JobState.CANCELLING:
                return "cancel"
            after = cancelled(job, self._process.clock_ms())
            put = Put(folder_key(after), encode(after))
            writes = (put,) if put.key == item.key else (Delete(item.key), put)
            try:
                if (await self._store.txn((unchanged(item.key, item.mod_revision),), writes)).succeeded:
                    return "cancel"
            except StoreUncertain:
                continue
        raise StoreUnavailable("the job changed again and again")


class Forgetful:
    """Stands for the file of expired outputs."""

    def add(self, key: TaskKey) -> None:
        """Nobody asks."""


async def run_agent(
    process: Process, store: Store, settings: Settings, machine: Machine, fates: RunnerFates
) -> None:
    presence = Presence(
        store,
        machine.name,
        f"machine-{machine.name}",
        settings.node_lease_seconds,
        Endpoint(machine.name, "", ""),
    )
    inventory = await presence.claim_when_reached()
    agent = Agent(
        NodeIdentity(machine.name, {}, ("exclusive", "timeslice", "mps"), "1", _engine_node(machine.name)),
        MachineFacts(f"machine-{machine.name}", 16_000, 64 * 1024),
        presence,
        store,
        SimulatedRunner(machine, fates),
        GpuReader(machine.fresh_source()),
        settings,
        Forgetful(),  # type: ignore[arg-type]
        process.clock_ms,
        known=inventory.gpus if inventory is not None else (),
        make_steps=lambda has: SimulatedSteps(machine, fates),  # type: ignore[arg-type,return-value]
        read_load=lambda: (None, None),
    )
    await agent.run()


def _engine_node(name: str) -> Callable[[], Awaitable[str]]:
    async def answer() -> str:
        return f"nomad-{name}"

    return answer
