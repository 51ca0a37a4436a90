"""The large faults: what each kind does to the world, and how it passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from coordinator.model import NodeAdmin
from coordinator.records import LEADER, admin_key, encode
from coordinator.store import Delete, Put
from nodeagent.gpu_source import GpusNotReady, WhyNotReady
from tests.simulation.machine import Machine
from tests.simulation.scenario import Fault
from tests.simulation.store import cut_watches

if TYPE_CHECKING:
    from tests.simulation.world import World


def strike(world: World, fault: Fault) -> None:
    if world.calm or world.checks.failure is not None:
        return
    world.faults[fault.kind] += 1
    world.checks.tell(f"FAULT {fault.kind} seconds={fault.seconds} target={fault.target} value={fault.value}")
    KINDS[fault.kind](world, fault)


def _of(names: Sequence[str], fault: Fault) -> str:
    return names[fault.target % len(names)]


def _coordinator(world: World, fault: Fault) -> str:
    return f"c{fault.target % world.scenario.coordinators + 1}"


def _node(world: World, fault: Fault) -> Machine:
    return world.machines[_of(sorted(world.machines), fault)]


def _pause(world: World, name: str, seconds: float) -> None:
    process = world.processes[name]
    process.pause()
    world.loop.later(seconds, process.resume)


def _cut(world: World, name: str, seconds: float) -> None:
    process = world.processes[name]
    process.is_cut = True
    cut_watches(world.server, process, seconds)

    def mend() -> None:
        process.is_cut = False

    world.loop.later(seconds, mend)


def _coordinator_crash(world: World, fault: Fault) -> None:
    world.kill(_coordinator(world, fault), fault.seconds)


def _coordinator_pause(world: World, fault: Fault) -> None:
    _pause(world, _coordinator(world, fault), fault.seconds)


def _coordinator_cut(world: World, fault: Fault) -> None:
    _cut(world, _coordinator(world, fault), fault.seconds)


def _leader_crash(world: World, fault: Fault) -> None:
    world.kill(world.leader(), fault.seconds)


def _leader_pause(world: World, fault: Fault) -> None:
    _pause(world, world.leader(), fault.seconds)


def _leader_lease_revoked(world: World, fault: Fault) -> None:
    for item in world.server.items(LEADER):
        world.server.drop_lease(item.lease)


def _leader_key_deleted(world: World, fault: Fault) -> None:
    world.server.execute(None, b"", (), [Delete(LEADER)])


def _leader_resigns(world: World, fault: Fault) -> None:
    """As in a planned stop; the process ends when it has handed over."""
    name = world.leader()
    world.processes[name].terminate()
    world.loop.later(1.5, world.kill, name, fault.seconds)


def _api_crash(world: World, fault: Fault) -> None:
    world.kill("api", fault.seconds)


def _agent_crash(world: World, fault: Fault) -> None:
    world.kill(_node(world, fault).name, fault.seconds)


def _agent_crash_wiped(world: World, fault: Fault) -> None:
    """What it keeps on disk is gone; its containers are not."""
    world.kill(_node(world, fault).name, fault.seconds)
    _node(world, fault).daemons.clear()


def _agent_pause(world: World, fault: Fault) -> None:
    _pause(world, _node(world, fault).name, fault.seconds)


def _agent_cut(world: World, fault: Fault) -> None:
    _cut(world, _node(world, fault).name, fault.seconds)
    if world.scenario.engine == "nomad":
        world.nomad.cut(_node(world, fault).name, fault.seconds)


def _machine_off(world: World, fault: Fault, wiped: bool = False) -> None:
    machine = _node(world, fault)
    machine.power_off(wiped)
    world.processes[machine.name].kill()

    def on() -> None:
        machine.power_on()
        world.start(machine.name)

    world.loop.later(fault.seconds, on)


def _machine_wiped(world: World, fault: Fault) -> None:
    _machine_off(world, fault, wiped=True)


def _gpu_lost(world: World, fault: Fault) -> None:
    machine = _node(world, fault)
    uuid = _of(sorted(machine.gpus), fault)
    machine.lose_gpu(uuid)
    world.loop.later(fault.seconds, machine.restore_gpu, uuid)


def _gpus_unreadable(world: World, fault: Fault) -> None:
    machine = _node(world, fault)
    machine.source.set_not_ready(GpusNotReady(WhyNotReady.DRIVER_NOT_LOADED, "by the simulation"))
    world.loop.later(fault.seconds, lambda: machine.source.set_not_ready(None))


def _runner_down(world: World, fault: Fault) -> None:
    machine = _node(world, fault)
    machine.engine_is_down = True

    def up() -> None:
        machine.engine_is_down = False

    world.loop.later(fault.seconds, up)


def _store(world: World, name: str, value: object, calm: object, seconds: float) -> None:
    setattr(world.server, name, value)
    world.loop.later(seconds, setattr, world.server, name, calm)


def _store_full(world: World, fault: Fault) -> None:
    _store(world, "is_full", True, False, fault.seconds)


def _store_down(world: World, fault: Fault) -> None:
    _store(world, "is_down", True, False, fault.seconds)
    cut_watches(world.server, None, fault.seconds)


def _store_slow(world: World, fault: Fault) -> None:
    _store(world, "slow_seconds", 0.1 + abs(fault.value % 25) / 10, 0.0, fault.seconds)


def _compaction(world: World, fault: Fault) -> None:
    world.server.compact_to(world.server.revision - fault.target % 3)


def _watch_cut(world: World, fault: Fault) -> None:
    cut_watches(world.server, world.processes[_of(sorted(world.processes), fault)], fault.seconds)


def _clock_step(world: World, fault: Fault) -> None:
    name = _of(sorted(world.skews_ms), fault)
    world.skews_ms[name] += fault.value
    if name in world.machines:
        world.machines[name].skew_ms = world.skews_ms[name]


def _cordon(world: World, fault: Fault) -> None:
    name = _node(world, fault).name
    put = Put(admin_key(name), encode(NodeAdmin(name, cordoned=True)))
    world.server.execute(None, b"", (), [put])
    calm = Put(admin_key(name), encode(NodeAdmin(name)))
    world.loop.later(fault.seconds, world.server.execute, None, b"", (), [calm])


def _nomad_down(world: World, fault: Fault) -> None:
    world.nomad.is_down = True
    world.loop.later(fault.seconds, setattr, world.nomad, "is_down", False)


def _nomad_events_lost(world: World, fault: Fault) -> None:
    world.nomad.loses_events = True
    world.loop.later(fault.seconds, setattr, world.nomad, "loses_events", False)


def _nomad_client_cut(world: World, fault: Fault) -> None:
    """The client alone: Serai's agent beside it is reached."""
    world.nomad.cut(_node(world, fault).name, fault.seconds)


def _nomad_restart(world: World, fault: Fault) -> None:
    world.nomad.restart()


KINDS: Mapping[str, Callable[[World, Fault], None]] = {
    "coordinator_crash": _coordinator_crash,
    "coordinator_pause": _coordinator_pause,
    "coordinator_cut": _coordinator_cut,
    "leader_crash": _leader_crash,
    "leader_pause": _leader_pause,
    "leader_lease_revoked": _leader_lease_revoked,
    "leader_key_deleted": _leader_key_deleted,
    "leader_resigns": _leader_resigns,
    "api_crash": _api_crash,
    "agent_crash": _agent_crash,
    "agent_crash_wiped": _agent_crash_wiped,
    "agent_pause": _agent_pause,
    "agent_cut": _agent_cut,
    "machine_off": _machine_off,
    "machine_wiped": _machine_wiped,
    "gpu_lost": _gpu_lost,
    "gpus_unreadable": _gpus_unreadable,
    "runner_down": _runner_down,
    "store_full": _store_full,
    "store_down": _store_down,
    "store_slow": _store_slow,
    "compaction": _compaction,
    "watch_cut": _watch_cut,
    "clock_step": _clock_step,
    "cordon": _cordon,
    "nomad_down": _nomad_down,
    "nomad_events_lost": _nomad_events_lost,
    "nomad_restart": _nomad_restart,
    "nomad_client_cut": _nomad_client_cut,
}
