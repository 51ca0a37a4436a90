import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobspecs.fields import MAX_FAULTS
from jobspecs.reading import (
    MAX_LAUNCH_BYTES,
    SpecInvalid,
    binary_notices,
    parse_json,
    parse_yaml,
    read_spec,
    spec_view,
)
from jobspecs.spec import JobSpec, TaskSpec
from jobspecs.units import MAX_CPU_MILLI, MAX_SIZE_MIB
from vgpu.slices import SliceRequest


def read(**fields):
    return read_spec({"image": "pytorch:2", **fields}, tenant="team-a")


def faults(mapping, tenant="team-a"):
    with pytest.raises(SpecInvalid) as error:
        read_spec(mapping, tenant=tenant)
    assert error.value.faults
    return {fault.field: fault for fault in error.value.faults}


def faults_of(**fields):
    return faults({"image": "pytorch:2", **fields})


def test_the_smallest_job_has_documented_defaults():
    """AP-11: image and GPU only."""
    spec = read_spec(parse_yaml("image: registry.local/ai/pytorch:2\ngpus: 1"), tenant="team-a")
    assert spec == JobSpec(
        name="pytorch",
        tenant="team-a",
        tasks=(TaskSpec("main", 1, "registry.local/ai/pytorch:2", gpus=SliceRequest(count=1)),),
    )
    assert (spec.max_runtime_seconds, spec.retries, spec.stop_grace_seconds) == (None, 0, 10)


def test_everything_at_once():
    spec = read_spec(
        parse_yaml(
            """
            name: train
            tenant: team-a
            image: pytorch:2
            command: [python, train.py, --epochs, 10, --lr, 0.10]
            tasks: 2
            gpus: {count: 2, memory: 20GiB, compute: 50%, model: A100, isolation: timeslice}
            cpu: 500m
            memory: 4GiB
            shm: 1GiB
            env: {LEVEL: debug, SIZE: 10, RATE: 0.10}
            priority: -5
            max_runtime: 5-00:00:00
            retries: 3
            constraints: {zone: a, rack: 7}
            stop_grace: 1m
            """
        ),
        tenant=None,
    )
    gpus = SliceRequest(2, 20480, 500, "A100", "timeslice")
    command = ("python", "train.py", "--epochs", "10", "--lr", "0.10")
    env = {"LEVEL": "debug", "SIZE": "10", "RATE": "0.10"}
    task = TaskSpec("main", 2, "pytorch:2", command, env, gpus, 500, 4096, 1024)
    assert spec == JobSpec("train", "team-a", (task,), -5, 432_000, 3, {"zone": "a", "rack": "7"}, 60)


def test_all_faults_are_told_at_once_with_their_paths():
    """AP-11, FR-6, FR-9, EX-9: not the first one only."""
    found = faults(
        {
            "name": "x" * 300,
            "tenant": "team-b",
            "gpu_memory": "8GiB",
            "privileged": True,
            "memory": "8GB",
            "priority": 5000,
            "retries": -1,
            "max_runtime": 60,
            "constraints": ["zone"],
            "env": {"NVIDIA_VISIBLE_DEVICES": "all"},
            "tasks": [
                {"count": 0, "gpus": {"memory": "1GiB", "compute": "10%", "count": 0}},
                {
                    "image": "y",
                    "gpus": {"memory": "1GiB", "compute": "150%", "colour": "red"},
                    "memory": "1GiB",
                },
                {"image": "y", "command": "python train.py", "memory": 5},
            ],
        }
    )
    assert set(found) == {
        "name", "tenant", "gpu_memory", "privileged", "memory", "priority", "retries", "max_runtime", "constraints",
        "env.NVIDIA_VISIBLE_DEVICES", "tasks[0].count", "tasks[0].image", "tasks[0].gpus.count",
        "tasks[1].gpus.compute", "tasks[1].gpus.colour", "tasks[2].command", "tasks[2].memory",
    }  # fmt: skip
    assert found["priority"].limit == "-1000 to 1000"
    assert found["priority"].value == 5000
    assert "gpus" in found["gpu_memory"].message
    assert "8GiB" in found["memory"].message


@pytest.mark.parametrize("name", ["image", "gpus", "command", "env", "cpu", "memory", "shm", "tasks", "priority",
                                  "max_runtime", "retries", "constraints", "stop_grace", "name", "tenant"])  # fmt: skip
@pytest.mark.parametrize("value", [True, {"x": {}}, [[]], "", float("nan"), -1, "\x00", object()])
def test_each_field_with_a_value_of_the_wrong_type(name, value):
    """AP-11: a fault that names the field, and never another exception."""
    if (name, value) == ("priority", -1):
        assert read(priority=-1).priority == -1
        return
    found = faults_of(**{name: value})
    assert all(field.split(".")[0].split("[")[0] == name for field in found), found


@pytest.mark.parametrize("value", [[], "text", None, 5, [{}], True])
def test_what_is_no_mapping_is_no_spec(value):
    assert "" in faults(value)


@pytest.mark.parametrize(
    "name",
    [
        "/Users/x/demo",
        "why?",
        "@a",
        "a b",
        "a%2Fb",
        "..",
        "a#b",
        "ümlaut",
        "¯\\_(ツ)_/¯",
        "x" * 63,
        "x" * 128,
    ],
)
def test_names_are_free_text_and_kept_byte_for_byte(name):
    """AP-1, AP-2, AP-4"""
    assert read(name=name).name == name
    assert spec_view(read(name=name))["name"] == name


@pytest.mark.parametrize(
    "name", ["", " ", "a\nb", "a\0", "x" * 129, "x" * 300, "\ud800", "a\u202eb", 5, "a\tb"]
)
def test_names_refused(name):
    """AP-2: at submit, and with the limit."""
    assert faults_of(name=name)["name"].limit == "1 to 128 printable characters"


@pytest.mark.parametrize("tenant", ["", "A", "a/b", "-a", "a.", "x" * 64, "a b", "ü", 7, "a\n"])
def test_tenants_refused(tenant):
    assert "tenant" in faults({"image": "x", "tenant": tenant}, tenant=None)


def test_tenant_comes_from_the_token():
    """AP-7: another tenant in the body is a fault, and an administrator must name one."""
    assert read().tenant == "team-a"
    assert read(tenant="team-a").tenant == "team-a"
    assert faults_of(tenant="team-b")["tenant"].limit == "team-a"
    assert "tenant" in faults({"image": "x"}, tenant=None)


@pytest.mark.parametrize("count", [-1, 10**6, 1.5, "2", True])
def test_gpu_counts_out_of_range(count):
    """FR-9"""
    assert faults_of(gpus={"count": count})["gpus.count"].limit == "0 to 128"
    assert "gpus" in faults_of(gpus=count)


def test_gpus():
    assert (
        read(gpus=0).tasks[0].gpus == read(gpus=None).tasks[0].gpus == read().tasks[0].gpus == SliceRequest()
    )
    assert read(gpus={}).tasks[0].gpus == SliceRequest(count=1)
    assert read(gpus={"count": 0}).tasks[0].gpus == SliceRequest()
    assert read(gpus={"compute": "50%"}).tasks[0].gpus == SliceRequest(1, None, 500)
    assert read(gpus={"isolation": "mig", "memory": "16GiB"}).tasks[0].gpus == SliceRequest(
        1, 16384, 1, "", "mig"
    )


def test_memory_without_compute_is_refused():
    """FR-10: such a slice would run without bound beside others that are charged for compute."""
    found = faults_of(gpus={"memory": "1GiB"})
    assert "50%" in found["gpus.compute"].message


@pytest.mark.parametrize("memory", [-5, 0, "0GiB", "8000Mi", "8GB", "8g", 8000, "8000"])
def test_gpu_memory_refused(memory):
    """FR-6, FR-9"""
    assert "gpus.memory" in faults_of(gpus={"memory": memory, "compute": "50%"})


def test_isolation():
    assert "mps" in str(faults_of(gpus={"isolation": "magic"})["gpus.isolation"].limit)
    assert "gpus.isolation" in faults_of(gpus={"isolation": "exclusive", "compute": "50%"})
    assert "gpus.isolation" in faults_of(gpus={"isolation": ["mps"]})


@pytest.mark.parametrize(
    "name",
    ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_X", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "SERAI_TASK"],
)
def test_names_that_decide_about_gpus_are_ours(name):
    """EX-9"""
    assert f"env.{name}" in faults_of(env={name: "all"})


def test_no_value_of_a_variable_is_ever_repeated():
    """AP-5, AP-6: a canary in every place where a value may be wrong."""
    canary = "s3cret"
    for env in (
        {"NVIDIA_X": canary}, {"1": canary}, {"A": canary + "\0"}, {"A": [canary]}, {"A": {"b": canary}},
        {"A": canary * 20_000}, canary, [canary], {"A": canary + "\ud800"},
    ):  # fmt: skip
        with pytest.raises(SpecInvalid) as error:
            read(env=env)
        assert canary not in str(error.value)
        assert canary not in repr(error.value.faults)
    shown = spec_view(read(env={"HF_TOKEN": canary}))
    assert shown["env"] == {"HF_TOKEN": "***"}
    assert canary not in repr(shown)
    several = read(tasks=[{"env": {"HF_TOKEN": canary}}, {}])
    assert canary not in repr(spec_view(several))


def test_commands():
    assert read(command=["sh", "-c", "echo a\nb", ""]).tasks[0].command == ("sh", "-c", "echo a\nb", "")
    assert '["sh", "-c", "..."]' in faults_of(command="python train.py")["command"].message
    assert "command[1]" in faults_of(command=["a", True])
    assert "command[0]" in faults_of(command=[""])
    assert faults_of(command=["x" * 70_000])["command"].limit == "65536 bytes"
    assert "command" in faults_of(command=["x"] * 2000)


@pytest.mark.parametrize("image", ["", " ", "a b", "-x", "x;y", "ü", "a\nb", "x" * 600, None])
def test_images_refused(image):
    assert "image" in faults({"image": image})


def test_tasks_inherit_what_they_do_not_name():
    spec = read(
        env={"A": "1", "B": "2"},
        memory="2GiB",
        gpus=1,
        tasks=[
            {"count": 3, "env": {"B": "3"}},
            {"name": "ps", "gpus": 0, "memory": "1GiB", "command": ["serve"]},
        ],
    )
    worker, server = spec.tasks
    assert (worker.name, worker.count, worker.env, worker.memory_mib) == (
        "task-0",
        3,
        {"A": "1", "B": "3"},
        2048,
    )
    assert worker.gpus == SliceRequest(count=1)
    assert (server.name, server.gpus, server.memory_mib, server.command) == (
        "ps",
        SliceRequest(),
        1024,
        ("serve",),
    )
    assert spec.task_count == 4


def test_a_fault_in_an_inherited_field_is_told_once_and_where_it_stands():
    assert set(faults_of(memory="8GB", tasks=[{}, {}, {"memory": "1GiB"}])) == {"memory"}


def test_shared_memory_must_fit_into_the_memory():
    assert "raise memory from 1GiB" in faults_of(shm="8GiB")["shm"].message
    assert read(memory="16MiB").tasks[0].shm_mib == 16
    assert set(faults_of(shm="2GiB", memory="zzz")) == {"memory"}


def test_numbers_of_tasks():
    assert faults_of(tasks=2001)["tasks"].limit == "1 to 2000"
    assert faults_of(tasks=[{"count": 1500}, {"count": 501}])["tasks"].value == 2001
    assert "tasks" in faults_of(tasks=[])
    assert "tasks[1].name" in faults_of(tasks=[{"name": "a"}, {"name": "a"}])
    assert "tasks[0]" in faults_of(tasks=["x"])
    assert "tasks" in faults_of(tasks=[{}] * 257)


def test_a_job_that_no_transaction_could_hold_is_refused():
    """Each task carries its own copy of the environment in its grant, and all grants are one transaction."""
    env = {"DATA": "x" * 10_000}
    assert read(env=env, tasks=100)
    fault = faults_of(env=env, tasks=1000)["tasks"]
    assert fault.limit == f"{MAX_LAUNCH_BYTES} bytes"
    many = [{"env": {"X": str(number) * 30_000}} for number in range(20)]
    assert faults_of(tasks=many)["tasks"].limit == "524288 bytes"


def test_faults_are_bounded():
    with pytest.raises(SpecInvalid) as error:
        read(**{f"field{number}": 1 for number in range(10_000)})
    assert len(error.value.faults) == MAX_FAULTS


def test_sizes_with_one_letter_are_said_to_be_binary():
    mapping = parse_json(
        '{"memory": "8G", "gpus": {"memory": "600000M"}, "shm": "64MiB", "env": {"memory": "1G"}}'
    )
    assert binary_notices(mapping) == (
        "memory: 8G is read as 8GiB (binary)",
        "gpus.memory: 600000M is read as 600000MiB (binary)",
    )


def test_a_view_is_json_and_names_what_was_submitted():
    spec = read(gpus={"memory": "20GiB", "compute": "12.5%"}, cpu=1.5, max_runtime="36h")
    assert msgspec.json.decode(msgspec.json.encode(spec_view(spec))) == {
        "name": "pytorch", "tenant": "team-a", "tasks": 1, "image": "pytorch:2", "command": [], "env": {},
        "gpus": {"count": 1, "memory": "20GiB", "compute": "125m"}, "cpu": "1500m", "memory": "1GiB", "shm": "64MiB",
        "priority": 0, "max_runtime": "36h", "retries": 0, "constraints": {}, "stop_grace": "10s",
    }  # fmt: skip


TEXT = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
ENV = st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30), max_size=4)  # fmt: skip
FRACTIONS = st.builds(
    SliceRequest, st.integers(1, 128), st.integers(1, MAX_SIZE_MIB), st.integers(1, 1000), st.one_of(st.just(""), TEXT),
    st.sampled_from(["", "mps", "timeslice", "mig"]),
)  # fmt: skip
WHOLE = st.builds(SliceRequest, st.integers(1, 128), isolation=st.sampled_from(["", "exclusive", "mps"]))
PARTS = st.builds(SliceRequest, st.integers(1, 128), st.none(), st.integers(1, 1000))


@st.composite
def task_specs(draw, name):
    memory_mib = draw(st.integers(10, MAX_SIZE_MIB))
    return TaskSpec(
        name,
        draw(st.integers(1, 8)),
        draw(st.from_regex(r"[a-z0-9]{1,8}(:[a-z0-9.]{1,5})?", fullmatch=True)),
        tuple(draw(st.lists(TEXT, max_size=3))),
        draw(ENV.filter(lambda env: not any(key.startswith(("NVIDIA_", "CUDA_", "SERAI_")) for key in env))),
        draw(st.one_of(st.just(SliceRequest()), WHOLE, PARTS, FRACTIONS)),
        draw(st.integers(10, MAX_CPU_MILLI)),
        memory_mib,
        draw(st.integers(1, memory_mib)),
    )


@st.composite
def job_specs(draw):
    names = draw(st.one_of(st.just(["main"]), st.lists(TEXT, min_size=1, max_size=3, unique=True)))
    return JobSpec(
        draw(TEXT),
        draw(st.from_regex(r"[a-z0-9]{1,8}([._-][a-z0-9]{1,8})?", fullmatch=True)),
        tuple(draw(task_specs(name)) for name in names),
        draw(st.integers(-1000, 1000)),
        draw(st.one_of(st.none(), st.integers(1, 10**8))),
        draw(st.integers(0, 100)),
        draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        draw(st.integers(0, 3600)),
    )


def test_what_is_shown_can_be_submitted_again_property():
    seen = set()

    @given(job_specs())
    @settings(max_examples=400)  # enough to see every isolation
    def holds(spec):
        view = spec_view(spec, mask=False)
        assert read_spec(view, tenant=None) == spec
        assert read_spec(parse_json(msgspec.json.encode(view)), tenant=spec.tenant) == spec
        seen.add((len(spec.tasks) > 1, spec.max_runtime_seconds is None))
        seen.update(task.gpus.isolation for task in spec.tasks)
        seen.update("env" for task in spec.tasks if task.env)

    holds()
    assert {(True, True), (False, False), "mps", "mig", "", "env"} <= seen


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "image", "tasks", "gpus", "memory", "count", "env", "zzz"]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_any_value_is_read_or_refused_property(value):
    try:
        spec = read_spec(value, tenant="team-a")
    except SpecInvalid as error:
        msgspec.json.encode([(fault.field, fault.limit, fault.value) for fault in error.faults])
    else:
        assert spec.tasks
