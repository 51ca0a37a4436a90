"""A live cluster whose engine is Nomad: the fake one, in this process, so that a test can turn it against the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from attrs import frozen

from coordinator.client import Client
from jobspecs.container import LABEL_ATTEMPT, LABEL_JOB
from jobspecs.nomad_job import nomad_job_id
from tests.fakenomad import Container, FakeNomad, NomadServer
from tests.integration.live import LiveCluster, live_cluster

TENANT = "a"


@frozen
class Nomad:
    """`nodes` are Nomad's ids of the clients on our nodes."""

    live: LiveCluster
    admin: Client
    fake: FakeNomad
    web: NomadServer
    nodes: dict[str, str]

    async def start_coordinator(self, name: str) -> None:
        await self.live.start_coordinator(name, engine="nomad", nomad=self.web.address)

    def containers(self, job: str, attempt: int | None = None) -> list[Container]:
        """All that were ever started for the job."""
        return [
            container
            for container in self.fake.clients.containers.values()
            if container.labels[LABEL_JOB] == job and attempt in (None, int(container.labels[LABEL_ATTEMPT]))
        ]

    def finish(self, job: str, name: str, attempt: int = 1, *, exit_code: int = 0) -> None:
        """Its running containers end by themselves."""
        self.fake.clients.finish(nomad_job_id(TENANT, name, job, attempt), exit_code=exit_code)


@asynccontextmanager
async def nomad_cluster(folder: Path, gpus: int = 2, **settings: object) -> AsyncIterator[Nomad]:
    """Two nodes, n1 and n2, and one coordinator."""
    fake = FakeNomad()
    fake.clients.devices |= {f"/dev/nvidia{number}" for number in range(gpus)}
    nodes = {name: fake.add_node(f"client-of-{name}").id for name in ("n1", "n2")}
    web = NomadServer(fake, heartbeat_seconds=0.5)
    await web.start()
    try:
        async with live_cluster(folder, launch_retries=1, back_off_seconds=1, **settings) as live:
            await live.start_coordinator(engine="nomad", nomad=web.address)
            admin = await live.bootstrap()
            for name, id in nodes.items():
                await live.start_agent(name, f"simulated:{gpus}x16GiB:T4", "process", "--engine-node-id", id)
            await admin.create_tenant(TENANT, quota_memory="512GiB")
            yield Nomad(live, admin, fake, web, nodes)
    finally:
        await web.stop()
