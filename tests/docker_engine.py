"""A Docker Engine for tests: the one of this machine, or one that the test run starts for itself and stops again.

The test image is made here from busybox-static; nothing is ever pulled. Debian: apt-get install docker.io busybox-static.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import docker.errors
import pytest
from attrs import define, field

from tests.conftest import missing_service
from tests.quick_disk import quick_folder

IMAGE = "serai-test:1"
DEFAULT_SOCKET = Path("/var/run/docker.sock")
START_SECONDS = 30
APPLETS = "sh cat cp dd echo env false grep head id kill ls mkdir mknod od printf sleep stat tail test touch true wc yes"


@define
class DockerEngine:
    """`socket` is what an agent's --docker-socket takes. `restart` only where the test run started the daemon. `options`
    are further flags of dockerd from its next start on."""

    socket: Path
    folder: Path | None = None
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def is_own(self) -> bool:
        return self.folder is not None

    def client(self) -> docker.DockerClient:
        return docker.DockerClient(base_url=self.url, timeout=30)

    def start(self) -> None:
        """Raises RuntimeError with the end of the daemon's log when it does not come up."""
        assert self.folder is not None
        log = self.folder / "log"
        with log.open("ab") as output:
            # No network is set up: the tests need none, and a sandbox often allows none.
            self.process = subprocess.Popen(
                [
                    "dockerd",
                    *("-H", self.url, "--data-root", str(self.folder / "data")),
                    *("--exec-root", str(self.folder / "exec"), "--pidfile", str(self.folder / "pid")),
                    *("--iptables=false", "--ip6tables=false", "--bridge=none"),
                    *("--ip-forward=false", "--ip-masq=false"),
                    *self.options,
                ],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self.socket):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"dockerd did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Containers end with the daemon, as with any daemon without live-restore."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None

    def restart(self) -> None:
        self.stop()
        self.start()


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[DockerEngine]:
    """With IMAGE in it. Skips where there is none; fails instead when CI=true."""
    if _answers(DEFAULT_SOCKET):
        engine = DockerEngine(DEFAULT_SOCKET)
        _make_image(engine)
        yield engine
        return
    with own_engine() as engine:
        yield engine


@contextmanager
def own_engine(*options: str) -> Iterator[DockerEngine]:
    """A daemon beside any other, with IMAGE in it. Skips where none can be started; fails instead when CI=true."""
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        missing_service("a Docker Engine (a running one, or dockerd and root to start one)")
    folder = quick_folder("serai-docker-")
    engine = DockerEngine(folder / "d.sock", folder, options)
    try:
        try:
            engine.start()
        except RuntimeError as error:
            missing_service(f"a Docker Engine ({error})")
        _make_image(engine)
        yield engine
    finally:
        engine.stop()
        # The daemon mounts its data on itself where their file system is not shared, and leaves that behind.
        subprocess.run(["umount", "--quiet", str(folder / "data")], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(socket: Path) -> bool:
    if not socket.exists():
        return False
    try:
        client = docker.APIClient(base_url=f"unix://{socket}", timeout=5)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


def _make_image(engine: DockerEngine) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        missing_service("busybox-static, which the test image is made of")
    assert busybox is not None
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for folder in ("bin", "dev", "proc", "sys", "tmp", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.add(busybox, "bin/busybox")
        for applet in APPLETS.split():
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    client = docker.APIClient(base_url=engine.url, timeout=60)
    try:
        repository, tag = IMAGE.split(":")
        client.import_image_from_data(archive.getvalue(), repository=repository, tag=tag)
    finally:
        client.close()
