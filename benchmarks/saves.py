"""How much of a long prompt is stored, and in how much memory: an engine's steps without an engine.

    python benchmarks/saves.py                         # Llama 8B, 32k tokens, default settings
    python benchmarks/saves.py --gb-per-s 1 --decode-steps 200

Both halves of the connector do all that they do beside vLLM, with shapes of Llama 3.1 8B (8 MiB per
chunk of 64 tokens), over a storage that takes time and keeps names alone. A step that computes
8,192 tokens takes 200 ms, one that generates 20 ms. As on a GPU, the engine's thread does not wait
for the copies out of the cache: none are made here. Needs vLLM (for the form of its pages) and some
3 GiB of memory. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import Rank
from vua.connector.metadata import ConnectorMetadata, ScheduledRequest, ScheduledStep
from vua.connector.scheduler import SchedulerSide
from vua.connector.worker import WorkerSide
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.storage.base import FAILED, PRESENT, WRITTEN, Batch, Capabilities, Entry, WriteResult

LLAMA_8B = KVLayout(32, 8, 128, 128, "BF16", 64)
_HELD = 8
"""Blocks that there are: a prompt's table names them again and again."""


class Sink:
    """A storage that keeps the names of chunks in order, and writes when ``pay`` lets it."""

    capabilities = Capabilities()
    gone = False

    def __init__(self, pay: Callable[[int], object]) -> None:
        self.names: list[str] = []
        self.fails: Callable[[str], bool] = lambda _: False
        self._pay, self._lock = pay, threading.Lock()

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> list[bool]:
        """Whether they were written."""
        del nbytes
        return [name in self.names for name in names]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Tell of no entry: none has another shard's name."""
        del prefix
        return iter(())

    def write(self, batch: Batch) -> WriteResult:
        """Take the time that it takes, and note the names."""
        statuses = []
        for name in batch.names:
            self._pay(batch.nbytes)
            with self._lock:
                known = name in self.names
                if self.fails(name):
                    return WriteResult([FAILED], OSError(5, "a test's"))
                self.names += [] if known else [name]
            statuses.append(PRESENT if known else WRITTEN)
        return WriteResult(statuses, None)


class Bandwidth:
    """Takes the time that so many bytes take, for all threads together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def __call__(self, nbytes: int, began_s: float = 0.0) -> None:
        """Wait for as long as so many bytes take, from ``began_s`` on (monotonic); 0: from now."""
        with self._lock:
            self._free_at = (
                max(began_s or time.monotonic(), self._free_at) + nbytes / self._bytes_per_s
            )
            end = self._free_at
        time.sleep(max(0.0, end - time.monotonic()))


class SavingEngine:
    """Both halves of a connector that only stores, and the steps of an engine around them."""

    def __init__(
        self, root: str, sink: Sink, layout: KVLayout, *, step_tokens: int, **settings: Any
    ) -> None:
        from vua.vllm import cache_spec

        self.block, self.step_tokens, self.sink = layout.chunk_tokens, step_tokens, sink
        self.payload = layout.full.payload_nbytes(layout)
        group = Group(layout, tuple(range(layout.layers)), ((layout.full,),), (0,))
        identity = Identity(model="m", chunk_tokens=self.block, kv_dtype=layout.dtype)
        model = Model(identity, (group,), (self.block,))
        if hasattr(model, "step_tokens"):
            object.__setattr__(model, "step_tokens", step_tokens)
        config = ConnectorConfig(
            shared_storage_path=root, chunk_tokens=self.block, witness_every=0, **settings
        )
        self.side = SchedulerSide(model, config, loads=False, saves=True)
        self.worker = WorkerSide(model, config, Rank(0, 0))
        shape = (_HELD, layout.kv_heads, self.block, layout.k_dim + layout.v_dim)
        dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[layout.dtype]
        caches = {f"layers.{at}": torch.zeros(shape, dtype=dtype) for at in range(layout.layers)}
        layer_of = {name: at for at, name in enumerate(caches)}
        self.worker.register(caches, layer_of, dict.fromkeys(caches, 0), cache_spec)
        self.group = self.worker.groups[0]
        self.group.store.storage = sink
        self.group.store.capacity = None
        self.most_pending, self.blocked_s = 0, 0.0

    def prepare(self) -> None:
        """Have the buffers as a GPU's worker has them after its start; copies take no time."""
        taken = []
        while (buffer := self.group.save_buffers.take()) is not None:
            taken.append(buffer)
        for buffer in taken:
            self.group.save_buffers.give_back(buffer)
        self.group.gather = lambda *_: None  # type: ignore[method-assign]

    def begin(self, name: str, tokens: int, first: int = 0) -> Any:
        """Take a request; its prompt is ``tokens`` numbers from ``first`` on."""
        request = SimpleNamespace(
            request_id=name, prompt_token_ids=list(range(first, first + tokens)),
            all_token_ids=[], num_tokens=tokens, num_computed_tokens=0, prompt_embeds=None,
            lora_request=None, cache_salt=None, mm_features=[], kv_transfer_params=None,
            kv_hints=None, skip_reading_prefix_cache=False,
        )  # fmt: skip
        while self.side.matched_tokens(request, 0)[0] is None:
            self.side.take_loads()
        return request

    def step(self, request: Any, computed: int, tokens: int, rest: Callable[[], object]) -> int:
        """Compute some of a prompt; ``rest`` is what else the step does. Chunks ordered."""
        blocks = -(-(computed + tokens) // self.block) - -(-computed // self.block)
        new = [[at % _HELD for at in range(blocks)]]
        one = ScheduledRequest(request.request_id, computed, tokens, new, begins=computed == 0)
        orders = ConnectorMetadata(identity=self.side.identity, epoch=self.side.epoch)
        self.side.add_saves(orders, ScheduledStep([one], lambda _: new))
        began = time.monotonic()
        self.worker.copy_out(orders)
        self.worker.saves.hand_over()
        self.blocked_s += time.monotonic() - began
        self.most_pending = max(self.most_pending, self.worker.saves.pending)
        rest()
        return sum(len(keys) for order in orders.saves for _, keys in order.parts)

    def update(self, request: Any = None) -> None:
        """End a step as the scheduler does: a request that has ended, notes, numbers."""
        if request is not None:
            self.side.finished(request)
        if (notes := self.worker.take_notes()) is not None:
            self.side.learn(notes)

    def leading(self, request: Any) -> int:
        """How many leading chunks of a request's prompt are stored."""
        from vua.format.keys import KeyChain, token_ids

        chain = KeyChain(token_ids(request.prompt_token_ids), self.block)
        names = {name.partition("/")[0] for name in self.sink.names}
        stored = [key.name in names for key in chain]
        return stored.index(False) if False in stored else len(stored)

    def close(self) -> None:
        """End both halves."""
        self.worker.shutdown()
        self.side.shutdown()


def main() -> None:
    """Store one prompt and say what became of it."""
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parse.add_argument("--tokens", type=int, default=32768)
    parse.add_argument("--step-tokens", type=int, default=8192)
    parse.add_argument("--step-s", type=float, default=0.2, help="of a step that computes")
    parse.add_argument("--decode-steps", type=int, default=50)
    parse.add_argument("--decode-s", type=float, default=0.02, help="of a step that generates")
    parse.add_argument("--gb-per-s", type=float, default=2.0, help="of the storage")
    asked = parse.parse_args()
    with tempfile.TemporaryDirectory(prefix="vua-saves-") as root:
        sink = Sink(Bandwidth(1e9 * asked.gb_per_s))
        engine = SavingEngine(root, sink, LLAMA_8B, step_tokens=asked.step_tokens)
        engine.prepare()
        request = engine.begin("r", asked.tokens)
        for at in range(0, asked.tokens, asked.step_tokens):
            count = min(asked.step_tokens, asked.tokens - at)
            engine.step(request, at, count, lambda: time.sleep(asked.step_s))
            engine.update()
        copied_s = engine.blocked_s
        for at in range(asked.decode_steps):
            request.num_tokens += 1
            engine.step(request, asked.tokens + at, 1, lambda: time.sleep(asked.decode_s))
            engine.update(request if at == asked.decode_steps - 1 else None)
        engine.close()
        steps = -(-asked.tokens // asked.step_tokens)
        answer = {
            "tokens": asked.tokens,
            "stored": engine.leading(request) * engine.block,
            "files": len(sink.names),
            "most_pending_mib": engine.most_pending * engine.payload >> 20,
            "memory_bound_mib": engine.group.save_limit * engine.payload >> 20,
            "copied_ms_per_full_step": round(1000 * copied_s / steps, 1),
            "storage_gb_per_s": asked.gb_per_s,
        }
        sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
