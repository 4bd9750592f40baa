"""Mirrors `vua.cli.ui`: who is answered, what is told, and that nothing is changed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from commands import TOKENS, CliTest, run
from forest import plant
from helpers import caches_of, contents, flip, until
from ui import Served, served
from vua.capacity.lru import touch
from vua.core import VUA, VUAConfig


class UiTest(CliTest):
    """A directory that was made by two models, as the page sees it."""

    def test_what_it_tells(self) -> None:
        """Namespaces, health and an answer about a prompt; nothing is changed by that."""
        before = contents(self.root)
        with served(self.root) as page:
            known = {one["model"]: one for one in page.looked()["namespaces"]}
            levels = {one["name"]: one["level"] for one in page.json("health")}
            answer = page.json("explain", {"tokens": json.dumps(TOKENS.tolist())})
            status, _, content = page.ask("POST", "/api/explain", {"text": "a text"})
        self.assertEqual([3, 1], [known[one]["chunks"] for one in ("llama", "qwen")])
        self.assertEqual({"owner", "space", "witness", "native loop", "GDS"}, levels.keys())
        self.assertIn("a hit", answer["namespaces"][0]["verdict"])
        self.assertEqual(400, status)
        self.assertIn(b"--tokenizer", content)
        self.assertEqual(before, contents(self.root))

    def test_last_use_long_ago(self) -> None:
        """How long ago chunks were used counts from now, not from the newest of them."""
        for path in self.files():
            os.utime(path.parent, (0, time.time() - 40 * 86400))
        with served(self.root) as page:
            ages = [one["ages"] for one in page.looked()["namespaces"]]
        self.assertEqual([[0, 0, 0, 0, 1], [0, 0, 0, 0, 3]], sorted(ages))

    @pytest.mark.thorough
    def test_live(self) -> None:
        """What is stored, used and deleted while it runs is counted."""
        with served(self.root) as page:
            page.looked()
            entries = sorted(self.entries(), key=lambda path: -path.parent.stat().st_mtime_ns)
            fd = os.open(entries[0].parents[2], os.O_RDONLY)
            touch(fd, [entries[0].parent.name])
            os.close(fd)
            entries[2].unlink()
            entries[2].parent.rmdir()
            with VUA(VUAConfig(split_factor=4, model="new"), self.root) as vua:
                vua.put(TOKENS[:8], caches_of(layers=3, heads=2, tokens=8, dim=8))
            found = page.looked(new=2, used=1, gone=1)
        self.assertEqual(3, len(found["namespaces"]))

    @pytest.mark.thorough
    def test_verify(self) -> None:
        """A damaged file is found on demand, and stays where it is."""
        damaged = self.entries()[0]
        flip(damaged, damaged.stat().st_size - 1)
        before = contents(self.root)
        with served(self.root) as page:
            self.assertIsNone(page.json("overview")["verify"]["report"])
            page.json("verify", {})
            found = until(lambda: page.json("overview")["verify"]["report"])
        self.assertFalse(found["sound"])
        self.assertEqual([0, 1], sorted(one["damaged"] for one in found["namespaces"]))
        self.assertEqual(before, contents(self.root))

    @pytest.mark.thorough
    def test_bucket(self) -> None:
        """Of a bucket namespaces and sizes are told; explaining and verifying work."""
        pytest.importorskip("obstore")
        url = f"file://{self.root}/bucket"
        with VUA(VUAConfig(split_factor=4, model="far"), url) as vua:
            vua.put(TOKENS[:8], caches_of(layers=3, heads=2, tokens=8, dim=8))
        with served(url) as page:
            (one,) = page.looked()["namespaces"]
            answer = page.json("explain", {"tokens": json.dumps(TOKENS.tolist())})
            page.json("verify", {})
            found = until(lambda: page.json("overview")["verify"]["report"])
        self.assertEqual(("far", 2), (one["model"], one["chunks"]))
        self.assertIn("a hit", answer["namespaces"][0]["verdict"])
        self.assertTrue(found["sound"])

    @pytest.mark.thorough
    def test_hostile_names(self) -> None:
        """Names come as text in JSON, without control characters."""
        self.put("<img src=x onerror=alert(1)>\x1b[2J\u202e", 1)
        with served(self.root) as page:
            names = [one["model"] for one in page.looked()["namespaces"]]
            _, headers, content = page.ask("GET", "/api/overview")
        self.assertIn("<img src=x onerror=alert(1)>\\x1b[2J\\u202e", names)
        self.assertEqual("application/json", headers["Content-Type"])
        self.assertNotIn(b"\x1b", content)


class AccessTest(unittest.TestCase):
    """Who is answered; one server for all tests."""

    page: Served

    @classmethod
    def setUpClass(cls) -> None:
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plant(root, 5)
        cls.page = stack.enter_context(served(root))

    def test_token(self) -> None:
        """Without the token, or with another one, nothing is told."""
        page = self.page
        for path in ("/api/overview", "/api/health", "/nothing"):
            for said in ("", "Bearer ", "Bearer wrong", page.token, "Bearer \xe9"):
                self.assertEqual(403, page.ask("GET", path, Authorization=said)[0], said)
        self.assertEqual(403, page.ask("POST", "/api/verify", {}, Authorization="")[0])
        self.assertFalse(page.json("overview")["verify"]["running"])
        self.assertEqual(404, page.ask("GET", "/nothing")[0])
        self.assertEqual(404, page.ask("GET", "/../../etc/passwd")[0])

    def test_host(self) -> None:
        """Names that DNS may lead here are not served, whatever the path."""
        page = self.page
        for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1.evil.example", ""):
            for path in ("/", "/api/overview"):
                self.assertEqual(403, page.ask("GET", path, Host=host)[0], host)
        for host in ("localhost", "127.0.0.1:1", f"[::1]:{page.port}"):
            self.assertEqual(200, page.ask("GET", "/api/overview", Host=host)[0], host)

    def test_methods(self) -> None:
        """Nothing but GET, and POST for what takes a prompt or takes long."""
        page = self.page
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"):
            self.assertEqual(405, page.ask(method, "/api/overview")[0], method)
        self.assertEqual(405, page.ask("POST", "/api/overview", {})[0])
        self.assertEqual(405, page.ask("GET", "/api/verify")[0])

    def test_bodies(self) -> None:
        """What is no JSON object, or too long, is refused; the server goes on."""
        page = self.page
        for body in ([], "x", {"tokens": "a b"}, {"tokens": "[1, -1]"}):
            self.assertEqual(400, page.ask("POST", "/api/explain", body)[0], body)
        long = {"Content-Length": str(1 << 40)}
        self.assertEqual(400, page.ask("POST", "/api/explain", **long)[0])
        self.assertEqual(200, page.ask("GET", "/api/overview")[0])

    def test_nothing_from_elsewhere(self) -> None:
        """The page's policy forbids everything from outside, and its files name no other host."""
        page = self.page
        for path in ("/", "/ui.css", "/ui.js"):
            status, headers, content = page.ask("GET", path, Authorization="")
            self.assertEqual(200, status)
            self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
            self.assertNotIn("unsafe", headers["Content-Security-Policy"])
            self.assertEqual("nosniff", headers["X-Content-Type-Options"])
            outside = content.replace(b"http://www.w3.org/2000/svg", b"")
            self.assertNotIn(b"://", outside)

    def raw(self, sent: bytes) -> bytes:
        """Send bytes, and return what comes back until the server ends the connection."""
        with socket.create_connection(("127.0.0.1", self.page.port), timeout=120) as line:
            with contextlib.suppress(OSError):
                line.sendall(sent)
                line.shutdown(socket.SHUT_WR)
            return b"".join(iter(partial(line.recv, 1 << 16), b""))

    def fuzz(self, requests: int) -> None:
        """Send requests with wrong lines, headers, paths, hosts and bodies; none breaks it."""
        draw, token = random.Random(56), self.page.token.encode()
        good = (b"GET", b"POST", b"HEAD", b"PUT"), (b"/", b"/api/overview", b"/api/explain")
        odd = (b"", b"[", b"//[", b"\xff\x00", b"%5b%00", b"a]b", b"://", b"1" * 5000, b"\t")
        bodies = (b"[" * 100_000, b"{", b'{"tokens": "[' + b"9" * 5000 + b']"}', b"\xff")

        def word(*right: bytes) -> bytes:
            return draw.choice((*right, draw.choice(odd), draw.choice(right) + draw.choice(odd)))

        for _ in range(requests):
            body = draw.choice(bodies) if draw.random() < 0.3 else b""
            sent = b"\r\n".join((
                b" ".join((word(*good[0]), word(*good[1]), word(b"HTTP/1.1", b"HTTP/1.0"))),
                b"Host: " + word(b"localhost", b"127.0.0.1", b"[::1]"),
                b"Authorization: " + word(b"Bearer " + token),
                b"Content-Length: " + word(b"%d" % len(body), b"-1", b"1e3"),
                word(b"Connection: close", b"Expect: 100-continue"),
                b"",
                body,
            ))  # fmt: skip
            if draw.random() < 0.2:
                sent = draw.choice((sent[: draw.randrange(len(sent))], draw.randbytes(50)))
            self.raw(sent)

    def test_any_bytes(self) -> None:
        """Wrong requests are answered with an error, and other peers as before."""
        host, token = b"Host: localhost\r\n", b"Authorization: Bearer " + self.page.token.encode()
        deep = b"[" * 100_000
        for sent in (
            b"GET http://[ HTTP/1.1\r\n" + host + b"\r\n",
            b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
            b"POST /api/explain HTTP/1.1\r\n%s%s\r\nContent-Length: %d\r\n\r\n%s"
            % (host, token, len(deep), deep),
        ):
            self.assertIn(b" 400 ", self.raw(sent).split(b"\r\n")[0])
        self.fuzz(200)
        self.assertEqual(200, self.page.ask("GET", "/api/overview")[0])

    def test_half_open(self) -> None:
        """Connections that say nothing, or slowly, keep neither threads nor others' answers."""
        with contextlib.ExitStack() as stack:
            for number in range(300):
                line = socket.create_connection(("127.0.0.1", self.page.port), timeout=120)
                stack.enter_context(line)
                if number % 2:
                    with contextlib.suppress(OSError):
                        line.sendall(b"GET / HTTP/1.1\r\nHost: ")
            self.assertEqual(200, self.page.ask("GET", "/api/overview")[0])
            threads = Path(f"/proc/{self.page.process.pid}/task")
            until(lambda: len(list(threads.iterdir())) < 100)

    @pytest.mark.thorough
    def test_many_at_once(self) -> None:
        """Requests of several threads are answered, also while one says nothing."""
        page = self.page
        idle = http.client.HTTPConnection("127.0.0.1", page.port)
        idle.connect()
        paths = ["overview", "health"] * 12
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(page.json, paths))
        idle.close()
        self.assertTrue(all(answers))


class EndTest(CliTest):
    """How it begins and ends."""

    @pytest.mark.thorough
    def test_end(self) -> None:
        """Ctrl-C ends it and its processes; so does the end of the server."""
        for signal_, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
            with served(self.root) as page:
                pid = page.process.pid
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
                self.assertEqual(2, len(children))
                page.process.send_signal(signal_)
                self.assertEqual(status, page.process.wait(120))
                until(lambda: not any(map(is_running, children)))  # noqa: B023 - at once

    @pytest.mark.thorough
    def test_usage(self) -> None:
        """What cannot be served is said before anything is started."""
        code, _, err = run("ui", self.root / "none")
        self.assertEqual((2, True), (code, "none" in err))
        code, _, err = run("ui", self.root, "--tokenizer", self.root)
        self.assertEqual((2, True), (code, "tokenizer.json" in err))
        with served(self.root) as page:
            code, _, err = run("ui", self.root, "--port", str(page.port))
        self.assertEqual((2, True), (code, "leave out --port" in err))


def is_running(pid: str) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
