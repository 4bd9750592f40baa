"""Mirrors `vua.cli.ui`: who is answered, what is told, and that nothing is changed."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import socket
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import TOKENS, CliTest, Served, run, served
from helpers import caches_of, contents, flip, read_only, until
from replay import Cache
from vua.capacity.limits import Limits, write_bounds
from vua.capacity.spaces import silent, spread
from vua.catalog import open_catalog
from vua.cli.ui import Files, overview
from vua.core import VUA, VUAConfig


def own_pid(_: int) -> int:
    return os.getpid()


class WordsTest(CliTest):
    """What the page says of a directory that was made by two models."""

    def seen(self) -> dict[str, Any]:
        catalog, files = open_catalog(str(self.root)), Files()
        files.read(catalog)
        return overview(catalog, files)

    def commands(self) -> list[list[str]]:
        """What it proposes, without those that need something to be filled in."""
        proposed = [shlex.split(text) for _, text in self.seen()["todo"]]
        return [words for words in proposed if not {"FILE", "MODEL"} & {*words}]

    def test_healthy(self) -> None:
        """One line, the models, and what to do; nothing is changed by that."""
        before = contents(self.root)
        with served(self.root) as page:
            seen = page.looked()
        self.assertRegex(seen["line"], r"^Healthy, [\d.]+ KiB of [\d.,]+ .iB usable$")
        self.assertEqual("ok", seen["level"])
        known = {one["model"]: one["chunks"] for one in seen["namespaces"]}
        self.assertEqual({"llama": 3, "qwen": 1}, known)
        levels = {one["name"]: one["level"] for one in seen["findings"]}
        self.assertEqual({"owner", "space", "witness", "native loop", "files"}, levels.keys())
        self.assertEqual("ok", levels["files"])
        self.assertEqual("4 chunks in 2 namespaces", seen["summary"])
        self.assertEqual(before, contents(self.root))

    def test_damaged(self) -> None:
        """A damaged file is named in the line, and what to do about it comes first."""
        damaged = self.entries()[0]
        flip(damaged, damaged.stat().st_size - 1)
        before = contents(self.root)
        seen = self.seen()
        self.assertTrue(seen["line"].startswith("Not healthy (damaged files), "), seen["line"])
        self.assertEqual(("bad", "damaged files"), (seen["level"], seen["findings"][0]["name"]))
        text = seen["findings"][0]["text"]
        self.assertIn(f"1 file: {damaged.parts[-4][:12]}/{damaged.parent.name[:12]}: ", text)
        self.assertIn("(4 files read at ", text)
        self.assertEqual(before, contents(self.root))
        self.assertEqual(0, run(*shlex.split(seen["todo"][0][1])[1:])[0])
        seen = self.seen()
        self.assertTrue(seen["line"].startswith("Healthy, "), seen["line"])

    def test_not_writable(self) -> None:
        """A directory that this user may only read is not healthy."""
        with read_only(self.root):
            seen = self.seen()
        self.assertRegex(seen["line"], r"^Not healthy \([^)]*write")
        self.assertIn(["test all that an engine needs here", f"vua doctor {self.root}"],
                      [list(one) for one in seen["todo"]])  # fmt: skip

    def test_full(self) -> None:
        """Limits that leave no room are said in the line; those that cannot be read, too."""
        write_bounds(self.root, Limits(min_free_bytes="100%"))
        self.assertTrue(self.seen()["line"].startswith("Not healthy (space), "))
        (self.root / "bounds.json").write_text("{")
        with served(self.root) as page:
            seen = until(lambda: (now := page.overview())["level"] == "bad" and now)
        self.assertIn("mend or delete it", seen["line"])

    def test_proposals(self) -> None:
        """The limit fits the disk, deletes nothing, and is not proposed where there is one."""
        disk = os.statvfs(self.root)
        for words in self.commands():
            if words[1:3] == ["gc", str(self.root)] and "--max-bytes" in words:
                self.assertEqual(0, run(*words[1:], "--dry-run")[0])
                self.assertEqual(0, run(*words[1:])[0])
        use = open_catalog(str(self.root)).use(silent)
        most = use.limits["max_bytes"]
        assert most is not None
        self.assertLess(use.nbytes, most)
        self.assertLess(most, use.nbytes + disk.f_bavail * disk.f_frsize)
        self.assertEqual(4, use.chunks)
        self.assertFalse([words for words in self.commands() if "--max-bytes" in words])

    def test_old_model(self) -> None:
        """What was not used for a day may be deleted; what was used today is not proposed."""
        self.assertFalse([words for words in self.commands() if words[1] == "rm"])
        (old,) = self.entries(1)
        os.utime(old.parent, (0, time.time() - 2 * 86400))
        proposed = [words[-2] for words in self.commands() if words[1] == "rm"]
        self.assertEqual([old.parents[2].name[:12]], proposed)

    def test_commands(self) -> None:
        """Each proposed command runs as it stands, whatever the directory is called."""
        odd = self.root / "a 'place'; $x"
        with VUA(VUAConfig(split_factor=4, model="odd"), odd) as vua:
            vua.put(TOKENS[:8], caches_of(layers=3, heads=2, tokens=8, dim=8))
        catalog = open_catalog(str(odd))
        proposed = [shlex.split(text) for _, text in overview(catalog, Files())["todo"]]
        self.assertTrue(all(str(odd) in words for words in proposed))
        for words in self.commands():
            first = words[: words.index("&&")] if "&&" in words else words
            with self.subTest(words):
                self.assertEqual(0, run(*first[1:])[0])

    def test_no_process_of_a_thread(self) -> None:
        """What the server's thread reads of a large namespace it reads itself."""
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(lambda: set(spread(own_pid, range(4), large=True))).result()
        self.assertEqual({os.getpid()}, found)
        self.assertNotIn(os.getpid(), set(spread(own_pid, range(4), large=True)))

    @pytest.mark.thorough
    def test_bucket(self) -> None:
        """Of a bucket namespaces and sizes are told; no file is read, as that costs money."""
        pytest.importorskip("obstore")
        url = f"file://{self.root}/bucket"
        with VUA(VUAConfig(split_factor=4, model="far"), url) as vua:
            vua.put(TOKENS[:8], caches_of(layers=3, heads=2, tokens=8, dim=8))
        with served(url) as page:
            seen = page.looked("Healthy")
        (one,) = seen["namespaces"]
        self.assertEqual(("far", 2), (one["model"], one["chunks"]))
        self.assertIn("none was read", seen["findings"][0]["text"])


class AccessTest(unittest.TestCase):
    """Who is answered; one server for all tests."""

    page: Served

    @classmethod
    def setUpClass(cls) -> None:
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        Cache(root).request(range(5))
        cls.page = stack.enter_context(served(root))

    def test_token(self) -> None:
        """Without the token, or with another one, nothing is told."""
        page = self.page
        for path in ("/api/overview", "/nothing"):
            for said in ("", "Bearer ", "Bearer wrong", page.token, "Bearer \xe9"):
                self.assertEqual(403, page.ask("GET", path, Authorization=said)[0], said)
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
        """Nothing but GET."""
        page = self.page
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "CONNECT"):
            self.assertEqual(501, page.ask(method, "/api/overview")[0], method)
        self.assertEqual(501, page.ask("POST", "/api/overview", {})[0])

    def test_nothing_from_elsewhere(self) -> None:
        """The page's policy forbids everything from outside, and its files name no other host."""
        page = self.page
        for path in ("/", "/ui.css", "/ui.js"):
            status, headers, content = page.ask("GET", path, Authorization="")
            self.assertEqual(200, status)
            self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
            self.assertNotIn("unsafe", headers["Content-Security-Policy"])
            self.assertEqual("nosniff", headers["X-Content-Type-Options"])
            self.assertNotIn(b"://", content)

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
        good = (b"GET", b"POST", b"HEAD", b"PUT"), (b"/", b"/api/overview", b"/ui.js")
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
        for sent in (
            b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
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
