"""On which GPUs of a node a task fits: isolation beside what is there, and MIG instances as cards."""

from __future__ import annotations

from coordinator import model
from coordinator.fit import fit
from coordinator.model import Job
from coordinator.placement import Draft, Spot
from coordinator.snapshot import shape_of
from coordinator.usage import Headroom
from jobspecs.spec import JobSpec
from tests.builders import World, gpu, mig, node, piece, report, running, spec
from vgpu.inventory import NodeInventory
from vgpu.reasons import ReasonCode as R

NO_LIMIT = Headroom()


def world(*nodes: NodeInventory, jobs: tuple[Job, ...] = ()) -> World:
    w = World(*nodes)
    w.submit(*jobs)
    return w


def whole(id: str, on: str, *gpus: int) -> Job:
    return running(id, on, [piece(f"GPU-{on}-{n}") for n in gpus])


def place(w: World, of: JobSpec, headroom: Headroom = NO_LIMIT) -> Spot | None:
    shape = shape_of(of)
    return Draft(w.snapshot()).search(shape.tasks[0], shape.constraints).best(headroom)


def where(w: World, of: JobSpec) -> tuple[str, tuple[int, ...]] | None:
    spot = place(w, of)
    return (spot.node, spot.found.gpus) if spot else None


# --- isolation ---


def isolation_of(w: World, of: JobSpec) -> str | None:
    spot = place(w, of)
    return spot.found.isolations[0] if spot else None


def test_isolation_is_chosen_beside_what_is_on_the_gpu():
    w = world(node("n1", gpus=1))
    assert isolation_of(w, spec()) == "exclusive"
    assert isolation_of(w, spec(memory=1024, compute=100)) == "mps"
    w.submit(running("t", "n1", [piece("GPU-n1-0", 1024, 100, "timeslice")]))
    assert isolation_of(w, spec(memory=1024, compute=100)) == "timeslice"
    assert isolation_of(w, spec(memory=1024, compute=100, isolation="mps")) is None
    of = shape_of(spec(memory=1024, compute=100, isolation="mps"))
    assert fit(of.tasks[0], w.snapshot().nodes["n1"].row) is R.NO_ISOLATION


def test_an_isolation_asked_for_finds_the_gpu_that_can():
    w = world(node("n1", gpus=2), jobs=(running("t", "n1", [piece("GPU-n1-0", 1024, 100, "timeslice")]),))
    assert where(w, spec(memory=1024, compute=100, isolation="mps")) == ("n1", (1,))


# --- MIG ---


def mig_node() -> NodeInventory:
    """Card 0 in MIG mode with instances of the sizes that NVML gives, card 1 whole."""
    sizes = [(16384, 142), (33280, 285), (71424, 428)]
    instances = [mig("n1", 0, 2 + n, memory, compute) for n, (memory, compute) in enumerate(sizes)]
    return node("n1", [gpu("n1", 0, unavailable="GPU is in MIG mode"), gpu("n1", 1), *instances])


def test_mg1_sizes_are_those_of_nvml():
    """17000 MiB do not go into an instance of 16384, whatever its profile is called."""
    assert where(world(mig_node()), spec(memory=17000, compute=100)) == ("n1", (3,))
    assert where(world(mig_node()), spec(memory=16384, compute=100)) == ("n1", (2,))


def test_a_mig_instance_is_given_out_whole():
    w = world(mig_node())
    spot = place(w, spec(memory=17000, compute=100))
    assert spot is not None
    draft = Draft(w.snapshot())
    [placed] = draft.placements([spot])
    assert (placed.slices[0].gpu, placed.slices[0].memory_mib, placed.slices[0].compute_milli) == (
        "MIG-n1-0-3",
        33280,
        285,
    )
    assert draft.charge([spot]).memory == 33280, "what is granted is charged, not what was asked for"


def test_mg5_a_card_in_mig_mode_and_its_instances_are_never_a_whole_gpu():
    w = world(mig_node())
    assert where(w, spec()) == ("n1", (1,))
    assert place(w, spec(gpus=2)) is None
    w.submit(whole("w", "n1", 1))
    assert place(w, spec()) is None


def test_mg2_two_slices_may_be_two_instances_of_one_card():
    instances = [mig("n1", 0, 1 + n, 16384, 142) for n in range(7)]
    w = world(node("n1", [gpu("n1", 0, unavailable="MIG mode"), *instances]))
    assert where(w, spec(gpus=2, memory=10_000, compute=100)) == ("n1", (1, 2))
    assert place(w, spec(gpus=8, memory=10_000, compute=100)) is None


def test_an_instance_that_is_taken_is_not_free():
    w = world(mig_node(), jobs=(running("m", "n1", [piece("MIG-n1-0-3", 33280, 285, "mig")]),))
    assert where(w, spec(memory=17000, compute=100)) == ("n1", (4,))


def test_an_instance_with_foreign_use_is_not_given_out():
    w = world(mig_node())
    w.see(model.ReportSeen(report("n1", foreign={"MIG-n1-0-3": 1})))
    assert where(w, spec(memory=17000, compute=100)) == ("n1", (4,))
