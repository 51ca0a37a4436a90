"""The harness itself: a failure must say what the process that failed was doing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.live import live_cluster, said

pytestmark = pytest.mark.etcd


async def test_a_coordinator_that_is_not_ready_tells_where_it_is(tmp_path: Path) -> None:
    async with live_cluster(tmp_path) as live:
        live.etcd.freeze()
        starting = asyncio.create_task(live.start_coordinator(role="api"))
        await live.until(lambda: "c1" in live.parts and said(live.parts["c1"], "replica revision=0 store="))
        starting.cancel()
        words = await live.last_words(live.parts["c1"])
        live.etcd.thaw()
        assert "in _list" in words or "in run" in words, "its tasks"
        assert "Fatal Python error: Aborted" in words, "its threads"
