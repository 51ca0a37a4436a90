"""What an isolation backend adds to a container, and the steps that make it true on the node: data, no action."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen


@frozen
class Device:
    """A device node mounted into the container through Docker's device API."""

    host_path: str
    container_path: str
    permissions: str = "rw"


@frozen
class Mount:
    """A bind mount that a backend needs (never a user's)."""

    source: str
    target: str
    read_only: bool = True


@frozen
class GpuSettings:
    """How the slices of one task enter its container. `runtime` and `cdi_devices` are used where the node mounts GPUs
    that way; otherwise `devices` are the device nodes themselves."""

    env: Mapping[str, str] = field(factory=dict)
    devices: tuple[Device, ...] = ()
    mounts: tuple[Mount, ...] = ()
    runtime: str = ""
    cdi_devices: tuple[str, ...] = ()


@frozen
class Step:
    """Something the node agent does before the container starts and undoes when the grant goes.

    `kind` is one of: start_mps_daemon, create_mig_instance. The same step (same kind, GPU and parameters) asked for by
    two grants is done once and undone when the last of them goes.
    """

    kind: str
    gpu: str
    parameters: Mapping[str, str] = field(factory=dict)


@frozen
class Holder:
    """Who holds a slice to its size: hardware, kernel, driver, client_process, library, watch, or nobody."""

    memory_by: str
    compute_by: str
