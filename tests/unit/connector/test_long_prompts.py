"""Prompts that are computed faster than the storage writes, from both halves of the connector."""

from __future__ import annotations

import threading
import unittest
import unittest.mock
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

from helpers import DirectoryTest, until
from vua.connector.write_queue import WriterCount
from vua.format.layout import KVLayout

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from saves import SavingEngine, Sink

SMALL = KVLayout(2, 1, 8, 4, "F32", 64)
TOKENS, STEP_TOKENS = 32768, 8192
PER_STEP, PER_DECODE = 60, 6
"""Files that the storage writes while a step computes, and while one generates."""


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class LongPromptTest(DirectoryTest):
    def setUp(self) -> None:
        """A storage that writes as many files as it is allowed to."""
        super().setUp()
        for_small = "vua.connector.group_transfer._LEAST_NBYTES"  # which all of them fit into
        self.enterContext(unittest.mock.patch(for_small, 0))
        each_alone = (
            "vua.connector.write_queue._WRITE_NBYTES"  # its buffer is free when it is written
        )
        self.enterContext(unittest.mock.patch(each_alone, 0))
        self.allowed = threading.Semaphore(0)
        self.sink = Sink(lambda _: self.allowed.acquire())

    def start(self, **settings: Any) -> SavingEngine:
        """An engine with Llama 8B's steps; its chunks are small."""
        one = partial(WriterCount, most=1)  # so that files appear in order
        with unittest.mock.patch("vua.connector.write_queue.WriterCount", one):
            self.engine = SavingEngine(
                str(self.root), self.sink, SMALL, step_tokens=STEP_TOKENS, **settings
            )
        self.addCleanup(self.engine.close)
        self.addCleanup(self.allowed.release, 10_000)
        return self.engine

    def let_write(self, files: int) -> None:
        """Let the storage write so many files, if so many wait; return when it has."""
        worker = self.engine.worker
        for _ in range(min(files, worker.saves.pending)):
            if not (before := worker.saves.pending):
                return
            self.allowed.release()
            until(lambda before=before: worker.saves.pending < before)

    def compute(self, request: Any) -> None:
        """Compute a prompt in steps, beside which files are written."""
        for at in range(0, request.num_tokens, STEP_TOKENS):
            count = min(STEP_TOKENS, request.num_tokens - at)
            self.engine.step(request, at, count, lambda: self.let_write(PER_STEP))
            self.engine.update()
            self.check_no_hole(request)

    def generate(self, request: Any, steps: int) -> int:
        """Generate tokens; how many chunks were ordered meanwhile."""
        ordered, computed = 0, request.num_tokens
        for at in range(steps):
            request.num_tokens += 1
            ordered += self.engine.step(
                request, computed + at, 1, lambda: self.let_write(PER_DECODE)
            )
            self.engine.update()
            self.check_no_hole(request)
        return ordered

    def check_no_hole(self, *requests: Any) -> None:
        """What is stored of these requests is the beginning of each."""
        leading = [self.engine.leading(request) for request in requests]
        self.assertEqual(sum(leading), len(self.sink.names))

    def shares(self) -> dict[str, int]:
        """Tokens of prompts that ended, stored and not."""
        stats = self.engine.side.take_stats() or {}
        found: dict[str, int] = stats.get("vua_prompt_chunk_tokens_total", {})
        return found

    @pytest.mark.thorough
    def test_default_settings(self) -> None:
        """A prompt of four full steps is stored completely, within the memory of two of them."""
        engine = self.start()
        request = engine.begin("r", TOKENS)
        self.compute(request)
        self.assertEqual(256, engine.most_pending, "the buffers did not fill up: nothing is shown")
        ordered = self.generate(request, 60)

        self.assertEqual(512, engine.leading(request))
        self.assertEqual(256, engine.group.save_limit)
        self.assertLessEqual(ordered, 2 * 512, "ordered again and again")
        engine.update(request)
        self.assertEqual({"yes": TOKENS, "no": 0}, self.shares())

    def test_a_chunk_that_cannot_be_written(self) -> None:
        """None behind it is written, and it is not ordered again."""
        engine = self.start()
        request = engine.begin("r", TOKENS)
        names: list[str] = []

        def fails(name: str) -> bool:
            if name not in names:
                names.append(name)
            return names.index(name) == 10

        self.sink.fails = fails
        self.allowed.release(10_000)
        for at in range(0, TOKENS, STEP_TOKENS):
            engine.step(request, at, STEP_TOKENS, lambda: self.let_write(10_000))
            engine.update()
        request.num_tokens += 1
        self.assertEqual(0, engine.step(request, TOKENS, 1, lambda: None))
        self.assertEqual((10, 10), (engine.leading(request), len(self.sink.names)))
        engine.update(request)
        self.assertEqual({"yes": 640, "no": TOKENS - 640}, self.shares())
