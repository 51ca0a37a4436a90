"""All settings of a coordinator and of a node agent, with every default in one place. Frozen; checked when made."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from vgpu.topology import TopologyCosts


class SettingInvalid(ValueError):
    """A setting is out of range: names the setting, its limit and the value."""


@frozen
class FairnessSettings:
    """Whose turn it is, and who may hold a reservation (`coordinator.fairness`). `window_seconds` is W of the time share;
    `max_wait_seconds` the bounded wait. A job counts as within its tenant's share if `round_up_milli` thousandths of it
    are. Who withdraws a job for which slices were reserved gets no reservation for `withdrawal_seconds`.
    A job that waits for what nobody knows the end of has no reservation any more after `hold_seconds`."""

    policy: str = "serai"
    space_weight: int = 1
    time_weight: int = 1
    window_seconds: int = 24 * 3600
    max_wait_seconds: int = 72 * 3600
    round_up_milli: int = 500
    withdrawal_seconds: int = 24 * 3600
    hold_seconds: int = 7 * 24 * 3600


@frozen
class Settings:
    """Timing rule: keep_alive_seconds * 2 < lease_seconds, and report_seconds * 2 < node_lease_seconds <= lost_seconds.
    While more than `mass_silence_percent` of the nodes are silent together, none of them is given up, for at most
    `mass_silence_hold_seconds` (`coordinator.silence`); 0 seconds or 100 percent turn that off."""

    cluster: str = "serai"
    engine: str = "agent"  # agent | nomad
    lease_seconds: int = 3
    keep_alive_seconds: int = 1
    report_seconds: int = 10
    node_lease_seconds: int = 30
    lost_seconds: int = 600
    mass_silence_percent: int = 50
    mass_silence_hold_seconds: int = 3600
    launch_deadline_seconds: int = 600
    stop_deadline_seconds: int = 120
    orphan_grace_seconds: int = 30
    launch_retries: int = 3
    back_off_seconds: int = 5
    placements_per_cycle: int = 500
    jobs_per_transaction: int = 40
    max_writes_per_transaction: int = 128
    done_retention_seconds: int = 7 * 24 * 3600
    done_retention_jobs: int = 100_000
    log_retention_seconds: int = 3600
    idempotency_seconds: int = 24 * 3600
    compact_every_seconds: int = 60
    compact_keep_revisions: int = 200_000
    compact_keep_seconds: int = 300
    submit_queue_jobs: int = 20_000
    fairness: FairnessSettings = field(factory=FairnessSettings)
    topology: TopologyCosts = field(factory=TopologyCosts)

    def __attrs_post_init__(self) -> None:
        if self.engine not in ("agent", "nomad"):
            raise SettingInvalid(f"engine must be agent or nomad, not {self.engine!r}")
        for name in ("lease_seconds", "keep_alive_seconds", "report_seconds", "placements_per_cycle"):
            if getattr(self, name) < 1:
                raise SettingInvalid(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.mass_silence_percent <= 100:
            raise SettingInvalid(
                f"mass_silence_percent must be from 0 to 100, not {self.mass_silence_percent}"
            )
        if self.max_writes_per_transaction < 2:
            raise SettingInvalid("max_writes_per_transaction must be at least 2")
        # A leader that misses one renewal must still have time for a second before its key is gone.
        if self.keep_alive_seconds * 2 >= self.lease_seconds:
            raise SettingInvalid(
                f"keep_alive_seconds * 2 must be below lease_seconds, not {self.keep_alive_seconds} and {self.lease_seconds}"
            )
        if self.report_seconds * 2 >= self.node_lease_seconds:
            raise SettingInvalid(
                f"report_seconds * 2 must be below node_lease_seconds, not {self.report_seconds} and {self.node_lease_seconds}"
            )


def from_mapping(values: Mapping[str, object]) -> Settings:
    """Settings from a parsed file. Unknown names are refused."""
    known = {attribute.name: attribute for attribute in Settings.__attrs_attrs__}
    nested = {"fairness": FairnessSettings, "topology": TopologyCosts}
    arguments: dict[str, object] = {}
    for name, value in values.items():
        if name not in known:
            raise SettingInvalid(f"unknown setting {name!r}; known: {', '.join(sorted(known))}")
        if name in nested:
            if not isinstance(value, Mapping):
                raise SettingInvalid(f"{name} must be a mapping, not {value!r}")
            arguments[name] = nested[name](**value)
        else:
            arguments[name] = value
    return Settings(**arguments)  # type: ignore[arg-type]
