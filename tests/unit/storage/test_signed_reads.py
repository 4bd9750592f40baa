"""Mirrors `vua.storage.signed_reads`: what goes that way, and what is asked for otherwise."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from unittest import mock

import pytest

from buckets import seaweedfs, speaking_to
from proxy import HARMS, REFUSALS, FaultyProxy
from vua.errors import StorageError
from vua.storage import signed_reads
from vua.storage.bucket import Bucket
from vua.storage.signed_reads import SignedReads

obstore = pytest.importorskip("obstore")

BODY = b"".join(hashlib.sha256(bytes([i % 256, i >> 8])).digest() for i in range(65_536))
SIGNED = "X-Amz-Signature="
PARTS = (None, (0, 10), (7, 1_000_000), (len(BODY) - 5, len(BODY) + 95))


class ServerTest(unittest.TestCase):
    """A real server behind a proxy that does harm."""

    def setUp(self) -> None:
        self.harms: Iterator[str] = iter(())
        self.asked: list[str] = []
        self.proxy = FaultyProxy(seaweedfs().endpoint, self.plan)
        self.addCleanup(self.proxy.close)
        self.enterContext(speaking_to(self.proxy.endpoint))
        self.bucket = Bucket.at(seaweedfs().place())
        self.bucket.put("a/b", BODY)

    def plan(self, _: int, method: str, path: str) -> str:
        """Note how an object was asked for."""
        if method == "GET":
            self.asked.append("signed" if SIGNED in path else "other")
            return next(self.harms, "")
        return ""

    def test_usual_answers(self) -> None:
        """By one request each, with the same description as the other way gives."""
        for part in PARTS:
            start, stop = part or (0, len(BODY))
            arguments = () if part is None else (start, stop - start)
            meta, data = self.bucket.get("a/b", *arguments)
            self.assertEqual(BODY[start:stop], bytes(data))
            self.assertEqual(self.bucket.head("a/b"), meta)
        with self.assertRaises(FileNotFoundError):
            self.bucket.get("a/c")
        self.assertEqual(["signed"] * (len(PARTS) + 1), self.asked)
        self.assertEqual(0, self.bucket.counts["failed"])

    @pytest.mark.thorough
    def test_harm(self) -> None:
        """Whatever comes of a request, it is asked again by the client that copes with it."""
        self.enterContext(mock.patch.object(signed_reads, "_READ_S", 0.5))
        self.enterContext(mock.patch.object(signed_reads, "_PAUSE_S", 0))
        for harm in {*HARMS, *REFUSALS} - {"slow", "flipped", "no bucket"}:
            for arguments in ((), (7, 1_000_000)):
                start, nbytes = arguments or (0, len(BODY))
                self.asked, self.harms = [], iter([harm])
                with self.subTest(harm):
                    data = self.bucket.get("a/b", *arguments)[1]
                    self.assertEqual(BODY[start : start + nbytes], bytes(data))
                    self.assertEqual(["signed", "other"], self.asked)

    @pytest.mark.thorough
    def test_pause_after_harm(self) -> None:
        """For a while nothing is tried that way: each try costs time where a server is unwell."""
        self.harms = iter(["503", "", "", "503"])
        with mock.patch.object(signed_reads, "_PAUSE_S", 0.2):
            self.bucket.get("a/b")
        time.sleep(0.3)
        with mock.patch.object(signed_reads, "_PAUSE_S", 60):
            for _ in range(3):
                self.bucket.get("a/b")
        self.assertEqual(["signed", "other", "signed", "signed", "other", "other"], self.asked)

    @pytest.mark.thorough
    def test_connections_are_used_again(self) -> None:
        """Some at a time, and the one that the server has ended is no miss."""
        with socket_count(self.proxy.endpoint) as opened:
            for _ in range(5):
                self.bucket.get("a/b")
            self.assertEqual(1, opened())
            self.assertEqual([BODY] * 40, [bytes(one) for one in self.get_beside_each_other(40)])
            self.assertLessEqual(opened(), 9)
            before = opened()
            with mock.patch.object(signed_reads, "_IDLE_S", 0):  # too old to be used again
                self.bucket.get("a/b")
            self.assertEqual(before + 1, opened())

    def get_beside_each_other(self, times: int) -> list[memoryview]:
        """Get the object by eight threads; each has bytes of its own."""
        found: list[memoryview] = []

        def get() -> None:
            for _ in range(times // 8):
                found.append(self.bucket.get("a/b")[1])  # noqa: PERF401 - appended by eight

        threads = [threading.Thread(target=get) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return found

    @pytest.mark.thorough
    def test_plain_http_is_not_used_unasked(self) -> None:
        """As by the other client: nothing is sent."""
        with speaking_to(self.proxy.endpoint, AWS_ALLOW_HTTP="false"):
            bucket = Bucket.at(seaweedfs().place())
            with self.assertRaises(StorageError):
                bucket.get("a/b")
        self.assertEqual([], self.asked)

    @pytest.mark.thorough
    def test_proxies_are_not_passed_by(self) -> None:
        """Where the environment names a proxy, requests go there or nowhere."""
        proxy = FaultyProxy(seaweedfs().endpoint, self.plan)
        self.addCleanup(proxy.close)
        names = dict.fromkeys(("no_proxy", "NO_PROXY"), "")
        dead = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
        with speaking_to(proxy.endpoint), mock.patch.dict(os.environ, {**names, **dead}):
            bucket = Bucket.at(seaweedfs().place())
            with self.assertRaises(StorageError):
                bucket.get("a/b")
        self.assertEqual([], self.asked)


HEAD = b"HTTP/1.1 200 OK\r\nLast-Modified: Mon, 23 Nov 2026 18:00:00 GMT\r\nETag: x\r\n"
SHORT = HEAD + b"Content-Length: 2\r\n"
MISSING = HEAD.replace(b"200 OK", b"404 No")
PART = HEAD.replace(b"200 OK", b"206 Partial Content")
ODD_ANSWERS = {
    "nothing": b"",
    "no HTTP": b"hello\r\n\r\n",
    "HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + b"Content-Length: 2\r\n\r\nok",
    "no length": HEAD + b"\r\nok",
    "chunked": HEAD
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "negative": HEAD + b"Content-Length: -2\r\n\r\nok",
    "more than any memory": HEAD + b"Content-Length: 1" + b"0" * 20 + b"\r\n\r\nok",
    "less than announced": HEAD + b"Content-Length: 3\r\n\r\nok",
    "more than announced": SHORT + b"\r\nok, too",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" + SHORT + b"\r\nok",
    "another status": HEAD.replace(b"200 OK", b"204 None") + b"Content-Length: 0\r\n\r\n",
    "no time": b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 2\r\n\r\nok",
    "a long head": SHORT + b"".join(b"x-%d: 1\r\n" % i for i in range(9000)) + b"\r\nok",
    "no end of the head": SHORT,
    "a long refusal": MISSING + b"Content-Length: 70000\r\n\r\n" + bytes(70_000),
}
ODD_PARTS = {
    "the whole instead": SHORT + b"\r\nok",
    "no range": PART + b"Content-Length: 2\r\n\r\nok",
    "another range": PART + b"Content-Length: 2\r\nContent-Range: bytes 0-1/9\r\n\r\nok",
    "another length": PART + b"Content-Length: 1\r\nContent-Range: bytes 3-4/9\r\n\r\no",
    "unknown total": PART + b"Content-Length: 2\r\nContent-Range: bytes 3-4/*\r\n\r\nok",
}


class OddTest(unittest.TestCase):
    """A server that says what it is told to."""

    def found(
        self,
        answer: bytes,
        part: tuple[int, int] | None = None,
        *,
        pause_s: float = 0,
        times: int = 1,
    ) -> bytes | None:
        """What is made of an answer, the last of so many."""
        found = None
        with saying(answer, pause_s, times) as address:
            reads = SignedReads(
                lambda key, _: f"{address}/{key}?{SIGNED}",
                lambda nbytes: memoryview(bytearray(nbytes)),
                None,
                allow_http=True,
            )
            for _ in range(times):
                found = reads.get("a", part)
        return None if found is None else bytes(found[1])

    def test_usual(self) -> None:
        """The odd ones differ from these by one thing."""
        self.assertEqual(b"ok", self.found(SHORT + b"\r\nok"))
        part = PART + b"Content-Length: 2\r\nContent-Range: bytes 3-4/9\r\n\r\nok"
        self.assertEqual(b"ok", self.found(part, (3, 5)))
        with self.assertRaises(FileNotFoundError):
            self.found(MISSING + b"Content-Length: 2\r\n\r\nok")

    def test_odd(self) -> None:
        """None, and no error."""
        for name, answer in ODD_ANSWERS.items():
            with self.subTest(name):
                self.assertIsNone(self.found(answer))
        for name, answer in ODD_PARTS.items():
            with self.subTest(name):
                self.assertIsNone(self.found(answer, (3, 5)))

    def test_last_answer_of_a_connection(self) -> None:
        """The next request goes over another one."""
        answer = SHORT + b"Connection: close\r\n\r\nok"
        self.assertEqual(b"ok", self.found(answer, times=2))

    @pytest.mark.thorough
    def test_drip(self) -> None:
        """An answer that goes on coming, and never ends, is given up."""
        long_head = HEAD + b"x: " + bytes(1000)
        long_body = HEAD + b"Content-Length: 1000\r\n\r\n" + bytes(900)
        for answer in (long_head, long_body):
            began_s = time.monotonic()
            with mock.patch.object(signed_reads, "_TOTAL_S", 0.3):
                self.assertIsNone(self.found(answer, pause_s=0.1))
            self.assertLess(time.monotonic() - began_s, 60)  # all of it takes 90 s

    def test_pieces(self) -> None:
        """A byte at a time is an answer like another."""
        answer = SHORT + b"\r\nok"
        with mock.patch.object(socket.socket, "recv_into", one_byte(socket.socket.recv_into)):
            self.assertEqual(b"ok", self.found(answer))


def one_byte(receive: Callable[..., int]) -> Callable[..., int]:
    """Receive a byte, whatever is asked for."""
    return lambda self, data, *more: receive(self, memoryview(data)[:1], *more)


@contextmanager
def saying(answer: bytes, pause_s: float, times: int) -> Iterator[str]:
    """Answer connections so, byte by byte from the body on if there is a pause between."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(10)
        head = len(answer) if not pause_s else len(HEAD)

        def serve() -> None:
            for _ in range(times):
                connection, _ = server.accept()
                with closing(connection), suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(answer[:head])
                    for at in range(head, len(answer)):
                        time.sleep(pause_s)
                        connection.sendall(answer[at : at + 1])

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@contextmanager
def socket_count(endpoint: str) -> Iterator[Callable[[], int]]:
    """Count connections to an endpoint that are opened from Python."""
    connect, opened = socket.create_connection, 0

    def counted(to: tuple[str, int], *arguments: Any) -> socket.socket:
        nonlocal opened
        opened += "http://{}:{}".format(*to) == endpoint
        return connect(to, *arguments)

    with mock.patch.object(socket, "create_connection", counted):
        yield lambda: opened
