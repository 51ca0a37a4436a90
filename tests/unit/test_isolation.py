import pytest

from vgpu.inventory import Gpu
from vgpu.isolation import BACKENDS, choose, cut, gpu_settings, gpu_steps, holder
from vgpu.isolation.settings import Device, Mount
from vgpu.reasons import Reason, ReasonCode
from vgpu.slices import Slice, SliceRequest

ALL = ("exclusive", "mig", "mps", "timeslice")
WHOLE = SliceRequest(count=1)
HALF = SliceRequest(count=1, memory_mib=4096, compute_milli=500)


def gpu(
    uuid="GPU-a", *, paths=("/dev/nvidia0", "/dev/nvidiactl"), parent="", memory_mib=16384, compute_milli=1000
):
    return Gpu(
        uuid, 0, "Simulated A100", memory_mib, memory_mib, paths, parent=parent, compute_milli=compute_milli
    )


def asked(isolation, **fields):
    return SliceRequest(count=1, isolation=isolation, **fields)


CARD, INSTANCE = gpu(), gpu("MIG-a", parent="GPU-a")
FRACTION = {"memory_mib": 4096, "compute_milli": 500}


@pytest.mark.parametrize(
    ("request_", "on", "offered", "sharing", "expected"),
    [
        (WHOLE, CARD, ALL, (), "exclusive"),
        (WHOLE, CARD, ALL, ("timeslice",), ReasonCode.NOT_ENOUGH_IDLE_GPUS),
        (WHOLE, CARD, ("timeslice",), (), ReasonCode.NO_ISOLATION),
        (HALF, CARD, ALL, (), "mps"),
        (HALF, CARD, ALL, ("mps",), "mps"),
        (HALF, CARD, ("exclusive", "timeslice"), (), "timeslice"),
        # the two do not mix, and who has no wish takes the one that is there
        (HALF, CARD, ALL, ("timeslice",), "timeslice"),
        (asked("mps", **FRACTION), CARD, ALL, ("timeslice",), ReasonCode.NO_ISOLATION),
        (asked("timeslice", **FRACTION), CARD, ALL, ("mps",), ReasonCode.NO_ISOLATION),
        (HALF, CARD, ALL, ("exclusive",), ReasonCode.NO_ISOLATION),
        (asked("timeslice", **FRACTION), CARD, ALL, (), "timeslice"),
        (asked("mps"), CARD, ALL, (), "mps"),
        (asked("exclusive", **FRACTION), CARD, ALL, (), ReasonCode.NO_ISOLATION),
        (asked("mps", **FRACTION), CARD, ("timeslice",), (), ReasonCode.NO_ISOLATION),
        (asked("from-the-future", **FRACTION), CARD, ALL, (), ReasonCode.NO_ISOLATION),
        # MG-5: a part of a card is never offered as a card
        (WHOLE, INSTANCE, ALL, (), ReasonCode.GPU_IN_MIG_MODE),
        (asked("exclusive"), INSTANCE, ALL, (), ReasonCode.GPU_IN_MIG_MODE),
        (asked("mps", **FRACTION), INSTANCE, ALL, (), ReasonCode.GPU_IN_MIG_MODE),
        (HALF, INSTANCE, ALL, (), "mig"),
        (HALF, INSTANCE, ("exclusive", "timeslice"), (), ReasonCode.NO_ISOLATION),
        (HALF, INSTANCE, ALL, ("mig",), ReasonCode.GPU_OCCUPIED),
        (asked("mig", **FRACTION), CARD, ALL, (), ReasonCode.NO_ISOLATION),
    ],
)
def test_choose(request_, on, offered, sharing, expected):
    answer = choose(request_, on, offered, sharing)
    assert (answer.code if isinstance(answer, Reason) else answer) == expected


def test_a_task_on_several_gpus_gets_no_mps():
    """A CUDA process talks to one MPS daemon, and a daemon serves one GPU."""
    several = SliceRequest(count=2, memory_mib=4096, compute_milli=500)
    assert choose(several, CARD, ALL, ()) == "timeslice"
    refused = choose(several, CARD, ("exclusive", "mps"), ())
    assert isinstance(refused, Reason)
    assert "one GPU" in refused.detail


def test_choose_keeps_its_rules_for_every_mix():
    """What is chosen is offered, honours a wish, and never brings mps and timeslice, or an owner and another, together."""
    chosen = set()
    requests = [WHOLE, HALF, *(asked(name, **fields) for name in ALL for fields in ({}, FRACTION))]
    for request_ in requests:
        for on in (CARD, INSTANCE):
            for sharing in [(), *((name,) for name in ALL)]:
                for offered in [ALL, *((name,) for name in ALL)]:
                    answer = choose(request_, on, offered, sharing)
                    if isinstance(answer, Reason):
                        continue
                    chosen.add(answer)
                    assert answer in offered
                    assert request_.isolation in ("", answer)
                    assert not sharing or {answer} == set(sharing) <= {"mps", "timeslice"}
    assert chosen == set(ALL)


def test_cut():
    """MG-1: the sizes of an instance are its own, not those of the request."""
    assert cut(WHOLE, CARD, "exclusive") == Slice("GPU-a", 16384, 1000, "exclusive")
    assert cut(HALF, CARD, "mps") == Slice("GPU-a", 4096, 500, "mps")
    instance = gpu("MIG-a", parent="GPU-a", memory_mib=33280, compute_milli=285)
    request_ = SliceRequest(count=1, memory_mib=17000, compute_milli=1, isolation="mig")
    assert cut(request_, instance, "mig") == Slice("MIG-a", 33280, 285, "mig")


def test_no_gpu_means_that_no_gpu_is_visible():
    """EX-9"""
    assert gpu_settings((), {}, "devices").env == {
        "NVIDIA_VISIBLE_DEVICES": "void",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_gpus_are_named_by_uuid_and_shared_control_nodes_are_mounted_once():
    """EX-10"""
    gpus = {
        "GPU-b": gpu("GPU-b", paths=("/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")),
        "GPU-d": gpu("GPU-d", paths=("/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm")),
    }
    slices = (Slice("GPU-d", 16384, 1000, "exclusive"), Slice("GPU-b", 8192, 500, "timeslice"))
    settings = gpu_settings(slices, gpus, "devices")
    assert settings.env == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-d,GPU-b",
        "CUDA_VISIBLE_DEVICES": "GPU-d,GPU-b",
        "SERAI_GPU_MEMORY_MIB": "16384,8192",
        "SERAI_GPU_COMPUTE_MILLI": "1000,500",
    }
    paths = [device.host_path for device in settings.devices]
    assert paths == ["/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"]
    assert all(device.container_path == device.host_path for device in settings.devices)


def test_simulated_gpus_do_not_collide():
    gpus = {name: gpu(name, paths=("/dev/null",)) for name in ("GPU-a", "GPU-b")}
    slices = [Slice(name, 1024, 100, "timeslice") for name in gpus]
    assert gpu_settings(slices, gpus, "devices").devices == (
        Device("/dev/null", "/dev/nvidia0", "rw"),
        Device("/dev/null", "/dev/nvidia1", "rw"),
    )
    two_files = gpu(paths=("/dev/null", "/dev/zero"))
    inside = gpu_settings(slices[:1], {"GPU-a": two_files}, "devices").devices
    assert [device.container_path for device in inside] == ["/dev/nvidia0", "/dev/nvidia0.1"]


def test_runtime_and_cdi_bring_the_devices_themselves():
    slices = (Slice("GPU-a", 16384, 1000, "exclusive"),)
    by_runtime = gpu_settings(slices, {"GPU-a": CARD}, "nvidia-runtime")
    assert (by_runtime.runtime, by_runtime.devices) == ("nvidia", ())
    assert by_runtime.env["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility,video"
    by_cdi = gpu_settings(slices, {"GPU-a": CARD}, "cdi")
    assert (by_cdi.cdi_devices, by_cdi.devices) == (("nvidia.com/gpu=GPU-a",), ())


def test_mps():
    slices = (Slice("GPU-x", 16384, 1000, "exclusive"), Slice("GPU-a", 8192, 255, "mps"))
    settings = gpu_settings(slices, {"GPU-a": CARD, "GPU-x": gpu("GPU-x")}, "devices")
    assert settings.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "1=8192M"  # it is the second GPU inside
    assert settings.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert settings.env["CUDA_MPS_PIPE_DIRECTORY"] == "/run/serai/mps/GPU-a/pipe"
    assert settings.env["CUDA_MPS_LOG_DIRECTORY"] == "/run/serai/mps/GPU-a/log"
    assert settings.mounts == (
        Mount("/run/serai/mps/GPU-a/pipe", "/run/serai/mps/GPU-a/pipe", read_only=False),
        Mount("/run/serai/mps/GPU-a/shm", "/dev/shm", read_only=False),
    )
    (step,) = gpu_steps(slices)
    assert (step.kind, step.gpu) == ("start_mps_daemon", "GPU-a")
    # The step of another slice of this GPU is the same one, so that the daemon is started once.
    assert gpu_steps((Slice("GPU-a", 1024, 100, "mps"),)) == (step,)


@pytest.mark.parametrize(
    ("compute_milli", "percentage"), [(1, "1"), (9, "1"), (10, "1"), (999, "99"), (1000, "100")]
)
def test_mps_percentage_is_whole_and_never_zero(compute_milli, percentage):
    settings = gpu_settings((Slice("GPU-a", 1024, compute_milli, "mps"),), {"GPU-a": CARD}, "devices")
    assert settings.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percentage


def test_mps_settings_name_every_gpu_by_its_ordinal_and_the_smallest_share():
    slices = (Slice("GPU-a", 8192, 500, "mps"), Slice("GPU-b", 4096, 300, "mps"))
    env = BACKENDS["mps"].launch_settings(slices, (0, 1)).env
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M,1=4096M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"


def test_every_backend_says_who_holds_a_slice():
    known = {"hardware", "kernel", "driver", "client_process", "library", "watch", "nobody"}
    for name, backend in BACKENDS.items():
        assert backend.name == name
        assert {backend.holder.memory_by, backend.holder.compute_by} <= known
    assert holder("mps").memory_by == "client_process"
    assert holder("from-the-future").memory_by == "nobody"


def test_mig_instances_exist_already_and_need_no_steps():
    slices = (Slice("MIG-a", 4864, 142, "mig"),)
    paths = ("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22")
    settings = gpu_settings(slices, {"MIG-a": gpu("MIG-a", parent="GPU-a", paths=paths)}, "devices")
    assert settings.env["NVIDIA_VISIBLE_DEVICES"] == "MIG-a"
    assert [device.container_path for device in settings.devices] == list(paths)
    assert gpu_steps(slices) == ()
