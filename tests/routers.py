"""What a router does that reads `vua events` over ZeroMQ."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import CliTest, run

PATIENCE_MS = 300_000


class SocketTest(CliTest):
    """A directory with two namespaces, and subscribers to its events."""

    def setUp(self) -> None:
        """Have a place for sockets beside the directory."""
        super().setUp()
        self.zmq = pytest.importorskip("zmq")
        self.msgpack = pytest.importorskip("msgspec").msgpack
        self.context = self.zmq.Context()
        self.addCleanup(self.context.destroy, linger=0)
        self.folder = self.root.with_name(f"{self.root.name}-s")
        self.folder.mkdir()
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.out = f"ipc://{self.folder}/out"

    def socket(self, kind: int, endpoint: str, *, bind: bool = False) -> Any:
        """A socket that waits for long, and then fails."""
        socket = self.context.socket(kind)
        self.addCleanup(socket.close, linger=0)
        socket.setsockopt(self.zmq.RCVTIMEO, PATIENCE_MS)
        (socket.bind if bind else socket.connect)(endpoint)
        return socket

    @contextlib.contextmanager
    def running(self, *words: str | Path) -> Iterator[list[int]]:
        """Run the command beside what is done within; gives its exit code when it has ended."""
        codes: list[int] = []
        arguments = ("events", self.root, "--zmq", self.out, *words)
        thread = threading.Thread(target=lambda: codes.append(run(*arguments)[0]))
        thread.start()
        try:
            yield codes
        except BaseException:
            shutil.rmtree(self.root, ignore_errors=True)  # ends it
            raise
        finally:
            thread.join(PATIENCE_MS / 1000)
            self.assertFalse(thread.is_alive())

    def received(self, socket: Any, number: int, topic: bytes = b"") -> list[dict[str, Any]]:
        got = socket.recv_multipart()
        self.assertEqual([topic, number.to_bytes(8, "big")], got[:2])
        _, events, rank = self.msgpack.decode(got[2])
        self.assertEqual(0, rank)
        return list(events)
