"""What a record is in memory: the same as it was when it was written, and no more of it."""

from __future__ import annotations

from coordinator import records
from coordinator.lifecycle import allocated
from coordinator.model import Allocation, Happening, JobSeen, JobState, TaskPlacement
from coordinator.store import Change, KeyValue
from tests.builders import START_MS, job, piece
from vgpu.reasons import Reason, ReasonCode


def test_a_job_that_is_read_holds_the_reason_of_its_place_once():
    waiting = job("j", history=(Happening(JobState.PENDING, START_MS, 1, Reason(ReasonCode.SUBMITTED)),))
    placed = Reason(ReasonCode.PLACED, {"gpus": 1, "nodes": 1}, ("n1",))
    where = (TaskPlacement(0, "n1", (piece("GPU-n1-0"),), 1000, 1024),)
    live = allocated(waiting, Allocation(1, where, START_MS, placed=placed))
    item = KeyValue(records.job_key("j"), records.encode(live), 7, 7)
    seen = records.event(Change(item))
    assert seen == JobSeen(live, 7)
    assert isinstance(seen, JobSeen)
    assert seen.job.allocation is not None
    assert seen.job.reason is seen.job.allocation.placed is seen.job.history[1].reason
    assert seen.job.history[0].reason == Reason(ReasonCode.SUBMITTED)
    assert records.encode(seen.job) == item.value
    again = records.event(Change(item))
    assert isinstance(again, JobSeen)
    assert again.job.reason is not None
    assert again.job.reason.numbers is seen.job.reason.numbers, "jobs that are placed alike share the numbers"
