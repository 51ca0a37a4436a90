"""What the agent takes a GPU for between two looks at the inventory."""

from __future__ import annotations

from nodeagent.gpu_source import GpuReader
from nodeagent.monitoring import GpuMonitor
from nodeagent.simulated import SimulatedSource


async def test_nothing_starts_on_a_gpu_that_the_last_measurement_found_lost() -> None:
    """The inventory is read once a minute. A leader that has not heard yet may have placed a job on it."""
    source = SimulatedSource("n1", "2x16GiB:T4")
    monitor = GpuMonitor(GpuReader(source), lambda: 0)
    await monitor.refresh()
    await monitor.measure(lambda pid: "", {})
    lost, well = (gpu.uuid for gpu in source.read_inventory().gpus)
    assert monitor.availability() == {lost: "", well: ""}
    source.lose(lost)
    await monitor.measure(lambda pid: "", {})
    assert not await monitor.refresh(), "it is not due"
    assert monitor.availability() == {lost: "GPU is lost", well: ""}
    await monitor.close()
