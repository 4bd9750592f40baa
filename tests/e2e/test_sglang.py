"""A real SGLang server: what it stores comes back after a restart, and from other engines."""

from __future__ import annotations

import json
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

import pytest

from e2e.by_transformers import generate
from e2e.damage import CHUNK, chunk_files, flip, stored, vanish
from e2e.harness import Batch, Phase, Served, llama, run, tokens
from e2e.sglang_server import Answer, Server, extra_config, needs_sglang, wait_until

pytestmark = [pytest.mark.vllm]

OURS = "VUAHiCacheStorage"
NEW = 6
CHUNKS = 5


def prompt(seed: int) -> list[int]:
    """Five chunks, and a few tokens of a sixth."""
    return tokens(CHUNKS * CHUNK + 15, seed)


def by_transformers(root: Path, ids: list[int], new: int) -> tuple[int, list[int]]:
    """Generate with transformers: (tokens loaded, tokens generated); the prompt is stored."""
    return generate(llama(), root, ids, new=new)


def by_vllm(root: Path, prompts: list[list[int]], new: int) -> Served:
    """Generate with vLLM, which loads what is stored and stores the prompts."""
    (served,) = run(Phase([Batch(prompts, max_tokens=new)], root=root))
    return served


@needs_sglang
class SGLangTest(unittest.TestCase):
    server: ClassVar[Server]
    root: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """One server for all tests, each with prompts of its own."""
        cls.root = Path(tempfile.mkdtemp(prefix="vua-test-"))
        cls.addClassCleanup(shutil.rmtree, cls.root, ignore_errors=True)
        cls._start()
        cls.addClassCleanup(cls._close)

    @classmethod
    def _close(cls) -> None:
        cls.server.close()  # the latest one

    @classmethod
    def _start(cls) -> None:
        words, extra = ("--dtype", "float32", "--enable-metrics"), extra_config(cls.root)
        cls.server = Server(llama(), *words, backend="dynamic", extra=extra)

    def _restart(self) -> None:
        self.server.close()
        self._start()

    def setUp(self) -> None:
        """Nothing of other tests is in the server's memory."""
        self.server.forget()

    def fill(self, ids: list[int], root: Path | None = None, **more: Any) -> Answer:
        """Have a prompt computed and stored; its tokens are what every other way has to give."""
        root = root or self.root
        before = len(stored(root))
        answer = self.server.ask(ids, new=NEW, **more)
        self.assertEqual(0, answer.cached)
        wait_until("the prompt's chunks", lambda: len(stored(root)) >= before + CHUNKS)
        self.server.forget()
        return answer

    def assert_loaded(self, answer: Answer, tokens: list[int], chunks: int = CHUNKS) -> None:
        """Assert that so many chunks came from VUA and the tokens are these."""
        self.assertEqual((chunks * CHUNK, tokens), (answer.stored, answer.tokens))
        if chunks:
            self.assertEqual(OURS, answer.backend)

    def test_restart(self) -> None:
        """What one server stored another one loads; each says how much came from the storage."""
        self.fill(prompt(12))
        self.server.attach("dynamic", extra_config(self.root))  # no other setup than at its start
        ids = prompt(1)
        cold = self.fill(ids)
        again = self.server.ask(ids, new=NEW)
        self.assert_loaded(again, cold.tokens)
        own = self.server.ask(ids, new=NEW)  # in its own memory now
        self.assertEqual((CHUNKS * CHUNK, 0), (own.cached, own.stored))

        self._restart()

        self.assert_loaded(self.server.ask(ids, new=NEW), cold.tokens)

    def test_salt(self) -> None:
        """A prompt with a salt is stored for that salt alone."""
        ids = prompt(2)
        cold = self.fill(ids, cache_salt="one")
        for salt, chunks in (("one", CHUNKS), ("other", 0)):
            answer = self.server.ask(ids, new=NEW, cache_salt=salt)
            self.assert_loaded(answer, cold.tokens, chunks)
        self.server.forget()
        self.assert_loaded(self.server.ask(ids, new=NEW), cold.tokens, 0)

    def test_transformers(self) -> None:
        """Transformers loads what SGLang stored."""
        ids = prompt(4)
        cold = self.fill(ids)
        loaded, found = by_transformers(self.root, ids, NEW)
        self.assertEqual((CHUNKS * CHUNK, cold.tokens), (loaded, found))

    def test_vllm(self) -> None:
        """SGLang loads what vLLM stored after one comparison; vLLM nothing of SGLang's."""
        one, other = prompt(5), prompt(15)
        served = by_vllm(self.root, [one, other], NEW)
        for ids, said, chunks in zip((one, other), served.tokens, (0, CHUNKS), strict=True):
            self.assert_loaded(self.server.ask(ids, new=NEW), said, chunks)
            self.server.forget()
        ids = prompt(6)
        cold = self.fill(ids)
        served = by_vllm(self.root, [ids], NEW)
        loaded = served.counts.get("tokens_loaded", 0)
        self.assertEqual((0, cold.tokens), (loaded, served.tokens[0]))

    def test_damage(self) -> None:
        """Damaged and deleted chunks are computed again, with the same tokens, and healed."""
        ids = prompt(7)
        cold = self.fill(ids)
        for harm in (flip, vanish):
            with self.subTest(harm.__name__):
                for at in (2, 4):
                    (file,) = chunk_files(self.root, ids, at)
                    harm(file)
                self.assert_loaded(self.server.ask(ids, new=NEW), cold.tokens, 2)
                wait_until("healing", lambda: self._sound(ids))
                self.server.forget()
                self.assert_loaded(self.server.ask(ids, new=NEW), cold.tokens)
                self.server.forget()

    def _sound(self, ids: list[int]) -> bool:
        return all(chunk_files(self.root, ids, at) for at in range(CHUNKS))

    def test_trouble(self) -> None:
        """With a full disk and with storage that hangs requests are served, and it goes on."""
        root = self.root.with_name(f"{self.root.name}-trouble")
        self.addCleanup(shutil.rmtree, root, ignore_errors=True)
        extra = extra_config(
            root,
            module_path="e2e.sglang_trouble",
            class_name="TroubledStorage",
            timeouts={"io_s": 2.0, "lookup_s": 60.0},
        )
        self.server.attach("dynamic", extra)
        self.addCleanup(self.server.attach, "dynamic", extra_config(self.root))
        ids = prompt(8)
        cold = self.fill(ids, root)
        for trouble in ("full", "hang"):
            with self.subTest(trouble):
                (root / trouble).touch()
                other = prompt(80 + len(trouble))
                first = self.server.ask(other, new=NEW)
                self.server.forget()
                self.assertEqual(first.tokens, self.server.ask(other, new=NEW).tokens)
                answer = self.server.ask(ids, new=NEW)
                self.assertEqual(cold.tokens, answer.tokens)
                self.assertEqual(0 if trouble == "hang" else CHUNKS * CHUNK, answer.stored)
                self.server.forget()
                (root / trouble).unlink()
                wait_until("the storage's use", lambda: self._uses_storage(ids))

    def _uses_storage(self, ids: list[int]) -> bool:
        found = self.server.ask(ids, new=1).stored
        self.server.forget()
        return found == CHUNKS * CHUNK

    def test_control(self) -> None:
        """SGLang's own ``file`` backend gives the same tokens; it says by its name that it did."""
        folder = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        ids = prompt(9)
        cold = self.fill(ids)
        extra = {"prefetch_threshold": CHUNK, "file_storage_path": str(folder)}
        self.server.attach("file", json.dumps(extra))
        self.addCleanup(self.server.attach, "dynamic", extra_config(self.root))
        self.assertEqual(cold.tokens, self.server.ask(ids, new=NEW).tokens)
        self.server.forget()
        answer = self.server.ask(ids, new=NEW)
        self.assertEqual(
            (CHUNKS * CHUNK, "HiCacheFile", cold.tokens),
            (answer.stored, answer.backend, answer.tokens),
        )

    def test_metrics(self) -> None:
        """The server's metrics count what came from the storage, SGLang's own and VUA's."""
        ids = prompt(11)
        self.fill(ids)
        self.server.ask(ids, new=NEW)
        for name in ("sglang:prefetched_tokens_total", "vua_loaded_tokens_total"):
            wait_until(name, lambda name=name: self._metric(name) >= CHUNKS * CHUNK)

    def _metric(self, name: str) -> float:
        lines = self.server.call("GET", "/metrics").splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in found)
