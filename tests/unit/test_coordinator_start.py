"""How a coordinator starts: what two processes of one that start at the same time could do to each other."""

from __future__ import annotations

import fcntl
import gc
import socket
from pathlib import Path

import pytest

from coordinator.__main__ import _hold_port, main
from coordinator.rehearsal import one_at_a_time


def test_a_port_that_was_picked_is_for_the_role_alone():
    listen, held = _hold_port("127.0.0.1:0")
    assert held is not None
    port = int(listen.rpartition(":")[2])
    with held, socket.socket() as stranger:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as role, socket.create_connection(("127.0.0.1", port)):
            assert role.accept()[0].close() is None


def test_a_port_that_was_asked_for_is_left_to_the_role():
    assert _hold_port("0.0.0.0:8765") == ("0.0.0.0:8765", None)


def test_one_process_compiles_at_a_time(tmp_path: Path):
    def another_may() -> bool:
        with (tmp_path / "serai.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with one_at_a_time(tmp_path):
        assert not another_may()
    assert another_may()
    with one_at_a_time(tmp_path / "nowhere"):
        pass  # what cannot be written to needs no guard


def test_what_an_installation_asks_for_ends_without_an_etcd():
    thresholds = gc.get_threshold()
    try:
        assert main(["--compile", "--etcd", "http://127.0.0.1:1"]) == 0
    finally:
        gc.set_threshold(*thresholds)
