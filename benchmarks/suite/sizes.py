"""C12: bytes on disk for a chunk of known models, against the bytes of K and V."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from speed import MODELS, layout_of, token_nbytes
from suite.context import Bench
from suite.measure import Row
from suite.prompts import keys_of
from vua.device.buffers import StagingBuffer
from vua.format.identity import Identity
from vua.format.layout import KVLayout, Shard
from vua.store.namespace import Namespace
from vua.store.writer import EntryWriter

_HYBRID = {
    # full layers, window layers, window, heads, dim
    "gpt-oss-120b": (18, 18, 128, 8, 64),
    "Gemma-3-27B": (10, 52, 1024, 16, 128),
}
_CHUNK = 64


def on_disk(bench: Bench) -> Iterator[Row]:
    """C12: one file per chunk, eight (TP 8), MLA under TP 8, and hybrid models' groups."""
    names = ["Llama-3.2-1B", "DeepSeek-V3"] if bench.tiny else list(MODELS)
    for name in names:
        layout = layout_of(name, _CHUNK)
        for ranks in (1, 2, 8):
            if ranks > 1 and layout.kv_heads % ranks and layout.kv_heads > 1:
                continue
            yield _row(bench, f"{name}, TP {ranks}", [layout], ranks)
    for name, (full, sliding, window, heads, dim) in ({} if bench.tiny else _HYBRID).items():
        groups = [
            KVLayout(full, heads, dim, dim, "BF16", _CHUNK),
            KVLayout(sliding, heads, dim, dim, "BF16", _CHUNK, f"w{window}"),
        ]
        yield _row(bench, f"{name}, a chunk that both groups keep", groups, 1)
        both = sum(token_nbytes(layout) for layout in groups)
        ratio = _stored(bench, groups[:1], 1) / (_CHUNK * both)
        case = f"{name}, a chunk behind the window"
        yield Row("C12", case, "bytes on disk", "all layers' K and V", ratio, ratio, ratio)


def _row(bench: Bench, case: str, layouts: list[KVLayout], ranks: int) -> Row:
    payload = _CHUNK * sum(token_nbytes(layout) for layout in layouts)
    ratio = _stored(bench, layouts, ranks) / payload
    return Row(
        "C12", case, "bytes on disk", "K and V", ratio, ratio, ratio, target=1.01, better="lower"
    )


def _stored(bench: Bench, layouts: list[KVLayout], ranks: int) -> int:
    """Save one chunk as ``ranks`` ranks do; return the bytes of its files."""
    root = bench.place("sizes")
    stores = Namespace.create(root, Identity(model="sizes"), layouts).stores
    for store, layout in zip(stores, layouts, strict=True):
        for shard in _shards(layout, ranks):
            buffer = StagingBuffer(layout, shard, 1)
            EntryWriter(store, buffer.memory, shard=shard).save([keys_of(layout, 1)[0]])
    files = [path for path in Path(root).rglob("*.safetensors") if path.is_file()]
    nbytes = sum(path.stat().st_size for path in files)
    bench.drop(root)
    return nbytes


def _shards(layout: KVLayout, ranks: int) -> list[Shard]:
    """Return the rectangles that tensor parallel ranks hold; one where they all hold the same."""
    if layout.kv_heads == 1:
        return [layout.full]
    step = layout.kv_heads // ranks
    return [Shard(0, layout.layers, n * step, (n + 1) * step, layout.group) for n in range(ranks)]
