"""How long an engine's loads take, over the time that their bytes take to arrive.

    python benchmarks/loads.py [--gb-per-s 2] [--tokens 8192] [--loads 9]

The worker's half of the connector loads one prompt after the other beside steps of 200 ms, with the
shapes of Llama 3.1 8B (8 MiB per chunk of 64 tokens) and default settings. The files are real and
in the page cache, and all that is read is verified; the storage hands them out at so many GB/s. As
on a GPU, the engine's thread does not wait for the copies into its cache: none are made here.
*load* is from the order to the last chunk, *seen* to the end of the step after which the engine
goes on. Needs vLLM (for the form of its pages). Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from saves import LLAMA_8B, Bandwidth
from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import Rank
from vua.connector.metadata import ConnectorMetadata, GroupLoad, LoadOrder
from vua.connector.worker import WorkerSide
from vua.device.buffers import StagingBuffer
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.storage.base import Batch, ReadResult, Storage
from vua.store.writer import EntryWriter
from vua.testing import FaultyStorage
from vua.vllm import cache_spec

BLOCKS = 8
"""Blocks that there are: a prompt's table names them again and again."""


class SlowStorage(FaultyStorage):
    """A storage whose reads share a bandwidth, which includes its own time."""

    def __init__(self, storage: Storage, bytes_per_s: float) -> None:
        super().__init__(storage, {})
        self._bandwidth = Bandwidth(bytes_per_s)

    def read(self, batch: Batch) -> ReadResult:
        """Read entries at the limited speed."""
        began_s = time.monotonic()
        filled = self.inner.read(batch)
        self._bandwidth(filled.count * batch.nbytes, began_s)
        return filled


def worker(root: str) -> WorkerSide:
    """The worker's half, with a cache of a few blocks."""
    layers, tokens = LLAMA_8B.layers, LLAMA_8B.chunk_tokens
    group = Group(LLAMA_8B, tuple(range(layers)), ((LLAMA_8B.full,),), (0,))
    identity = Identity(model="m", chunk_tokens=tokens, kv_dtype=LLAMA_8B.dtype)
    model = Model(identity, (group,), (tokens,))
    config = ConnectorConfig(shared_storage_path=root, chunk_tokens=tokens, witness_every=0)
    side = WorkerSide(model, config, Rank(0, 0))
    shape = (BLOCKS, LLAMA_8B.kv_heads, tokens, LLAMA_8B.k_dim + LLAMA_8B.v_dim)
    caches = {f"layers.{at}": torch.zeros(shape, dtype=torch.bfloat16) for at in range(layers)}
    layer_of = {name: at for at, name in enumerate(caches)}
    side.register(caches, layer_of, dict.fromkeys(caches, 0), cache_spec)
    return side


def measure(side: WorkerSide, order: LoadOrder, step_s: float) -> tuple[float, float]:
    """Seconds until the last chunk is there, and until the engine goes on."""
    began_s = time.monotonic()
    side.start_loads(ConnectorMetadata(loads=[order]))
    while order.request_id not in side.take_received(idle=False):
        time.sleep(step_s)
    seen_s, notes = time.monotonic() - began_s, side.take_notes()
    if side.take_failed_blocks() or notes is None or order.request_id not in notes.load_s:
        sys.exit("not all was loaded")
    return notes.load_s[order.request_id], seen_s


def main() -> None:
    """Store one prompt, load it again and again."""
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parse.add_argument("--tokens", type=int, default=8192)
    parse.add_argument("--loads", type=int, default=9)
    parse.add_argument("--gb-per-s", type=float, default=2.0, help="of the storage")
    parse.add_argument("--step-s", type=float, default=0.2)
    parse.add_argument("--copies", action="store_true", help="copy into the engine's cache, too")
    asked = parse.parse_args()
    with tempfile.TemporaryDirectory(prefix="vua-loads-") as root:
        side = worker(root)
        group = side.groups[0]
        chain = KeyChain(token_ids(range(asked.tokens)), LLAMA_8B.chunk_tokens)
        keys = list(chain)
        buffer = StagingBuffer(LLAMA_8B, LLAMA_8B.full, 1)
        buffer.bytes[:] = np.random.default_rng(1).integers(0, 256, buffer.bytes.size, np.uint8)
        for key in keys:
            EntryWriter(group.store, buffer.memory).save([key])
        group.store.storage = SlowStorage(group.store.storage, 1e9 * asked.gb_per_s)
        if not asked.copies:
            group._scatter = lambda _, some, *__: some[-1].stop  # type: ignore[method-assign]
        table = [at % BLOCKS for at in range(len(keys))]
        part = GroupLoad(0, 0, asked.tokens, keys)
        found = [
            measure(side, LoadOrder(f"r{at}", [table], [part]), asked.step_s)
            for at in range(asked.loads + 1)
        ]
        side.shutdown()
    arrives_s = len(keys) * LLAMA_8B.full.payload_nbytes(LLAMA_8B) / (1e9 * asked.gb_per_s)
    load_s, seen_s = (median(times) for times in zip(*found[1:], strict=True))
    answer = {
        "tokens": asked.tokens,
        "storage_gb_per_s": asked.gb_per_s,
        "arrives_s": round(arrives_s, 3),
        "load_s": round(load_s, 3),
        "seen_s": round(seen_s, 3),
        "load / arrives": round(load_s / arrives_s, 2),
        "seen / arrives": round(seen_s / arrives_s, 2),
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
