import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.model import Allocation, Job, JobState, TaskPlacement
from coordinator.records import encode
from jobspecs.container import Grant
from jobspecs.reading import MAX_LAUNCH_BYTES, read_spec
from jobspecs.render import (
    NomadRefused,
    container_name,
    containers_for,
    docker_arguments,
    grant_for,
    grants_for,
    nomad_job,
    nomad_job_id,
    nomad_refusal,
    parse_nomad_job_id,
)
from jobspecs.task_fields import launch_bytes
from vgpu.inventory import Gpu, NodeInventory
from vgpu.slices import Slice

GOLDEN = Path(__file__).parent.parent / "golden"
JOB = "01jd3x8kabcdefgh"


def node(name, gpus=2, *, container_gpus="devices", prefix="GPU"):
    return NodeInventory(
        node=name,
        machine_id=name,
        agent_version="1",
        gpus=tuple(
            Gpu(f"{prefix}-{name}-{index}", index, "Simulated A100", 40960, 40960, ("/dev/null",))
            for index in range(gpus)
        ),
        links=(),
        cpu_milli=16_000,
        memory_mib=65_536,
        container_gpus=container_gpus,
        simulated=True,
    )


NODES = {"n1": node("n1"), "n2": node("n2")}


def spec_of(**fields):
    return read_spec({"name": "train: ümlaut", "image": "serai-test:1", **fields}, tenant="team-a")


def allocation_of(spec, *tasks):
    """`tasks` are (node, slice, ...) in the order of their numbers."""
    placed = tuple(
        TaskPlacement(number, where, tuple(slices), spec.task(number).cpu_milli, spec.task(number).memory_mib)
        for number, (where, *slices) in enumerate(tasks)
    )
    return Allocation(1, placed, 1_000)


def gang():
    spec = spec_of(
        tasks=[
            {"count": 1, "gpus": {"memory": "8GiB", "compute": "25%", "isolation": "mps"}},
            {"name": "whole", "gpus": 2, "env": {"LEVEL": "debug"}, "cpu": 2, "memory": "4GiB"},
        ],
        command=["sh", "-c", "echo ${HOME} %{x} $HOME 100%"],
        env={"TOKEN": "${HOME}"},
        stop_grace="20s",
        max_runtime="1h",
    )
    allocation = allocation_of(
        spec,
        ("n2", Slice("GPU-n2-1", 8192, 250, "mps")),
        ("n1", Slice("GPU-n1-1", 40960, 1000, "exclusive"), Slice("GPU-n1-0", 40960, 1000, "exclusive")),
    )
    return spec, allocation


def gang_grants(engine="agent", **options):
    spec, allocation = gang()
    return spec, grants_for(JOB, spec, allocation, NODES, engine=engine, cluster="serai", **options)


def golden(name, value):
    """The file is the expectation. To change it on purpose, delete it and run the test twice."""
    path = GOLDEN / name
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{name} was missing and is written now: read it, and run again")
    assert json.loads(text) == json.loads(path.read_text())


def test_golden_docker_arguments():
    _, grants = gang_grants()
    golden(
        "docker_gang.json",
        [docker_arguments(item, container_name(item)) for grant in grants for item in grant.containers],
    )


@pytest.mark.parametrize("version", ["1.6.3", "1.8.0"])
def test_golden_nomad_job(version):
    spec, grants = gang_grants("nomad")
    ids = {"n1": "11111111-1111-1111-1111-111111111111", "n2": "22222222-2222-2222-2222-222222222222"}
    job = nomad_job(JOB, spec, grants, ids, version=version, fence=4711)
    golden(f"nomad_gang_{version}.json", job)


def test_one_grant_for_each_node_and_each_task_once():
    spec, grants = gang_grants("nomad", ran_ms=600_000)
    assert [(grant.node, [item.task for item in grant.containers]) for grant in grants] == [
        ("n1", [1]),
        ("n2", [0]),
    ]
    assert {(grant.engine, grant.attempt, grant.tenant, grant.granted_at_ms) for grant in grants} == {
        ("nomad", 1, "team-a", 1_000)
    }
    # CT-3: what earlier attempts ran counts, and a limit that is used up is no longer than a moment.
    assert grants[0].max_runtime_ms == 3_000_000
    _, used_up = gang_grants(ran_ms=10**9)
    assert used_up[0].max_runtime_ms == 1
    assert (
        grant_for("n2", JOB, spec, gang()[1], NODES, engine="nomad", cluster="serai", ran_ms=600_000)
        == grants[1]
    )
    assert [step.kind for step in grants[1].containers[0].steps] == ["start_mps_daemon"]
    assert grants[0].containers[0].steps == ()


def test_a_grant_survives_its_record():
    _, grants = gang_grants()
    for grant in grants:
        assert msgspec.json.decode(encode(grant), type=Grant) == grant


def test_environment_of_a_container():
    """EX-9, EX-10: ours lies over the user's, GPUs stand by UUID in the order of the slices."""
    _, grants = gang_grants()
    env = grants[0].containers[0].env
    assert env == {
        "TOKEN": "${HOME}",
        "LEVEL": "debug",
        "SERAI_JOB_ID": JOB,
        "SERAI_TENANT": "team-a",
        "SERAI_ATTEMPT": "1",
        "SERAI_TASK": "1",
        "SERAI_TASKS": "2",
        "SERAI_TASK_NAME": "whole",
        "SERAI_NODE": "n1",
        "SERAI_CPU_MILLI": "2000",
        "SERAI_MEMORY_MIB": "4096",
        "NVIDIA_VISIBLE_DEVICES": "GPU-n1-1,GPU-n1-0",
        "CUDA_VISIBLE_DEVICES": "GPU-n1-1,GPU-n1-0",
        "SERAI_GPU_MEMORY_MIB": "40960,40960",
        "SERAI_GPU_COMPUTE_MILLI": "1000,1000",
    }


def test_a_spec_that_was_stored_with_reserved_names_still_cannot_see_other_gpus():
    """EX-9: the second line of defence, for records that another version wrote."""
    spec = spec_of()
    task = replace(spec.tasks[0], env={"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "0,1"})
    (container,) = containers_for(JOB, 1, replace(spec, tasks=(task,)), [(0, (), "n1")], NODES, "serai")
    assert (container.env["NVIDIA_VISIBLE_DEVICES"], container.env["CUDA_VISIBLE_DEVICES"]) == ("void", "")


def test_ways_into_a_container():
    spec = spec_of(gpus=1)
    piece = Slice("GPU-n1-0", 40960, 1000, "exclusive")
    hosts = {}
    for way in ("devices", "nvidia-runtime", "cdi"):
        nodes = {"n1": node("n1", container_gpus=way)}
        (container,) = containers_for(JOB, 1, spec, [(0, (piece,), "n1")], nodes, "serai")
        hosts[way] = docker_arguments(container, "x")["HostConfig"]
    assert hosts["devices"]["Devices"] == [
        {"PathOnHost": "/dev/null", "PathInContainer": "/dev/nvidia0", "CgroupPermissions": "rw"}
    ]
    assert (hosts["nvidia-runtime"]["Runtime"], hosts["nvidia-runtime"]["Devices"]) == ("nvidia", [])
    assert hosts["cdi"]["DeviceRequests"] == [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-n1-0"]}]
    assert "Runtime" not in hosts["devices"]
    assert "DeviceRequests" not in hosts["devices"]


def test_nomad_refuses_cdi():
    spec = spec_of(gpus=1)
    allocation = allocation_of(spec, ("n1", Slice("GPU-n1-0", 40960, 1000, "exclusive")))
    nodes = {"n1": node("n1", container_gpus="cdi")}
    grants = grants_for(JOB, spec, allocation, nodes, engine="nomad", cluster="serai")
    with pytest.raises(NomadRefused) as error:
        nomad_job(JOB, spec, grants, {"n1": "x"}, version="1.9.1", fence=1)
    assert "CDI" in error.value.reason.detail


@pytest.mark.parametrize(
    "value",
    [
        "${node.unique.id}",
        "a ${NOMAD_ALLOC_ID} b",
        "${attr.cpu.arch}",
        "${meta.x}",
        "${B}",
        "$${B}",
        "${SERAI_TASK}",
    ],
)
def test_environment_that_nomad_would_rewrite_is_refused_without_its_value(value):
    spec = spec_of(env={"A": "s3cret" + value, "B": "1"})
    reason = nomad_refusal(spec)
    assert reason.subjects == ("env.A",)
    assert "s3cret" not in repr(reason)
    with pytest.raises(NomadRefused):
        nomad_job(JOB, spec, [], {}, version="1.6.3", fence=1)


@pytest.mark.parametrize(
    "value", ["${HOME}", "$HOME", "100%", "%{x}", "${1+1}", "${", "$${HOME}", "${node}", "${a b}"]
)
def test_environment_that_nomad_leaves_alone(value):
    assert nomad_refusal(spec_of(env={"A": value})) is None


@pytest.mark.parametrize(
    ("word", "refused"), [("$${X}", True), ("%%{X}", True), ("${X} %{X}", False), ("$$X", False)]
)
def test_commands_that_cannot_be_escaped_are_refused(word, refused):
    reason = nomad_refusal(spec_of(tasks=[{}, {"command": ["echo", word]}]))
    assert (reason is not None) == refused
    if reason is not None:
        assert reason.subjects == ("tasks[1].command[1]",)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("train", "train"), ("/Users/x/demo", "users-x-demo"), ("why?", "why"), ("..", "job"), ("ümlaut", "mlaut"),
        ("¯\\_(ツ)_/¯", "job"), ("a b", "a-b"), ("x" * 128, "x" * 40), ("A%2FB", "a-2fb"), ("a.b.a7", "a-b-a7"),
    ],
)  # fmt: skip
def test_nomad_job_ids(name, slug):
    """AP-1, AP-2: whatever the name, the id stands in a path as it is and leads back to the job."""
    nomad_id = nomad_job_id("team.a-1", name, JOB, 12)
    assert nomad_id == f"team.a-1.{slug}-{JOB}.a12"
    assert parse_nomad_job_id(nomad_id) == ("team.a-1", JOB, 12)


@pytest.mark.parametrize(
    "other", ["", "redis", "team-a.train.a1", "x/dispatch-1-2", "team.x-y.a0", "team.x-y.a1 "]
)
def test_jobs_of_others_are_not_taken_for_ours(other):
    assert parse_nomad_job_id(other) is None


@pytest.mark.parametrize(("version", "key"), [("1.6.3", "MaxClientDisconnect"), ("1.7.7", "MaxClientDisconnect"),
                                              ("1.8.0-beta.1", "Disconnect"), ("v1.10.0", "Disconnect"), ("2.0.5+ent", "Disconnect")])  # fmt: skip
def test_disconnect_by_version(version, key):
    spec, grants = gang_grants("nomad")
    job = nomad_job(JOB, spec, grants, {"n1": "a", "n2": "b"}, version=version, fence=1)
    for group in job["TaskGroups"]:
        assert [name for name in ("MaxClientDisconnect", "Disconnect") if name in group] == [key]


def test_logs_of_nomad_fit_on_the_disk_that_is_asked_for():
    spec, grants = gang_grants("nomad")
    job = nomad_job(JOB, spec, grants, {"n1": "a", "n2": "b"}, version="1.6.3", fence=1)
    for group in job["TaskGroups"]:
        logs = group["Tasks"][0]["LogConfig"]
        assert logs["MaxFiles"] * logs["MaxFileSizeMB"] < group["EphemeralDisk"]["SizeMB"]


def test_the_size_estimate_is_never_below_what_is_stored():
    """What passes the limit at submit must pass etcd's limit when it is committed."""
    env = {"TEXT": 'quotes " and \\ and \n control \x01 and ümlaut' * 20}
    cases = [
        (spec_of(tasks=100, env=env), ()),
        (spec_of(tasks=100, gpus={"memory": "8GiB", "compute": "25%"}), ("mps",)),
        (spec_of(tasks=100, gpus=8, command=["x" * 500] * 4), ("exclusive",) * 8),
    ]
    for spec, isolations in cases:
        wide = {
            "node-with-a-long-name-0123456789": node(
                "node-with-a-long-name-0123456789", 8, prefix="GPU-0123456789abcdef"
            )
        }
        (name,) = wide
        gpus = wide[name].gpus
        slices = tuple(Slice(gpus[k].uuid, 40960, 1000, isolation) for k, isolation in enumerate(isolations))
        placed = tuple(TaskPlacement(number, name, slices, 1000, 1024) for number in range(spec.task_count))
        allocation = Allocation(1, placed, 10**12)
        job = Job(JOB, spec, JobState.ALLOCATED, 10**12, 10**12, allocation=allocation)
        grants = grants_for(JOB, spec, allocation, wide, engine="agent", cluster="a-cluster-with-a-name")
        stored = len(encode(job)) + sum(len(encode(grant)) for grant in grants)
        estimate = sum(task.count * launch_bytes(task) for task in spec.tasks)
        assert stored <= estimate + 2000
        assert stored > estimate / 2  # and not so far above that it refuses what would do
    assert MAX_LAUNCH_BYTES < 1_500_000
