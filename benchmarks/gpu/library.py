"""VUA without an engine on a GPU: transformers, and the library with tensors in GPU memory.

    python benchmarks/gpu/library.py [--dir DIRECTORY] [--json FILE] [--device cpu]

transformers: the first token of a prompt of 8,192 tokens with a model of the shape of Llama 3.2 1B
and random weights, in float32 and bfloat16: alone, stored, and with its prefix loaded. In float32
the tokens have to be those of the model alone; in bfloat16 they may differ, because a prompt is cut
at another place. Library: `put` of 4,096 tokens of Llama 3.1 8B's shape and `get_closest` back to
the GPU, beside one copy of as many bytes out of pinned memory. The exit status is 1 where bytes,
tokens or the number of loaded tokens are wrong. On the CPU sizes are tiny and times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Bench, expect, once

from vua.core import VUA, VUAConfig
from vua.transformers import reuse_prefixes

Row = dict[str, object]


def milliseconds(bench: Bench, work: Callable[[], object]) -> float:
    """The median of some calls."""
    return round(1e3 * statistics.median(once(bench, work) for _ in range(bench.rounds)), 1)


def make_checkpoint(bench: Bench) -> Path:
    """Random weights, made where they are made fast."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tiny = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25,
        "vocab_size": 1024,
    }  # fmt: skip
    big = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "initializer_range": 0.05,
        "vocab_size": 32000,
    }  # fmt: skip
    sizes: dict[str, Any] = big if bench.big else tiny
    torch.manual_seed(3)
    with bench.device:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**sizes, max_position_embeddings=16384), dtype=torch.bfloat16
        )
    model.save_pretrained(bench.directory / "model")
    return bench.directory / "model"


def with_transformers(bench: Bench, path: Path, dtype: torch.dtype) -> Row:
    """First tokens with one model, and whether its tokens are the same with VUA."""
    from transformers import AutoModelForCausalLM

    name = str(dtype).removeprefix("torch.")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(bench.device).eval()
    length = 8192 if bench.big else 192
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 1000, (1, length), generator=generator).to(bench.device)

    def generate(count: int) -> list[int]:
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        return output[0, length:].tolist()

    def first() -> list[int]:
        return generate(1)

    first()
    row: Row = {"case": "transformers", "dtype": name, "tokens": length}
    row["alone ms"], alone = milliseconds(bench, first), generate(8)
    store = bench.directory / f"kv-{name}"
    with reuse_prefixes(model, store) as prefixes:
        prefixes.ready()
        row["stored ms"] = round(1e3 * once(bench, first), 1)
    with reuse_prefixes(model, store) as prefixes:
        prefixes.ready()
        row["load ms"] = milliseconds(bench, lambda: prefixes.load(ids))
        row["loaded ms"] = milliseconds(bench, first)
        prefix = prefixes.load(ids)
        row["loaded tokens"], again = prefix.num_tokens, generate(8)
        keys = prefix.cache.layers[0].keys
    expect("a prefix's device and type", holds=(keys.device, keys.dtype) == (ids.device, dtype))
    row["tokens equal"] = again == alone
    expect("tokens loaded by transformers", holds=length - 64 <= prefix.num_tokens < length)
    expect("transformers' tokens", holds=again == alone or dtype != torch.float32)
    return row


def with_library(bench: Bench) -> Row:
    """`put` and `get_closest` of tensors on the device."""
    layers, heads, tokens, width = (32, 8, 4096, 128) if bench.big else (2, 2, 128, 16)
    store = VUA(VUAConfig(model="bench"), str(bench.directory / "library"))
    ids = torch.arange(tokens).unsqueeze(0)
    caches = [
        [bench.random(1, heads, tokens, width) for _ in range(2)] for _ in range(layers)
    ]  # fmt: skip
    nbytes = layers * 2 * caches[0][0].nbytes
    put = once(bench, lambda: store.put(ids, caches))
    get = statistics.median(
        once(bench, lambda: store.get_closest(ids, device=bench.device))
        for _ in range(bench.rounds)
    )
    found = store.get_closest(ids, device=bench.device)
    expect("get_closest", holds=found is not None and found.data[0][0].device == bench.device)
    for layer, pair in enumerate(caches):
        for wanted, came in zip(pair, found.data[layer], strict=True):
            bits = came.reshape(wanted.shape).view(torch.int16)
            expect("get_closest", holds=torch.equal(bits, wanted.view(torch.int16)))
    host = bench.host(nbytes)
    there = torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    copy = statistics.median(
        once(bench, lambda: there.copy_(host, non_blocking=True)) for _ in range(bench.rounds)
    )
    seconds = {"put": put, "get_closest": get, "pinned copy": copy}
    rates = {f"{name} GB/s": round(nbytes / took / 1e9, 2) for name, took in seconds.items()}
    return {"case": "library", "MiB": nbytes >> 20, **rates}


def main() -> None:
    """Measure, print, and write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dir", help="where the files lie for a while")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    warnings.filterwarnings("ignore", module="transformers")
    rows: list[Row] = []
    failed = False
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        bench = Bench(device, Path(directory), 5, device.type == "cuda")
        path = make_checkpoint(bench)
        for case in (
            lambda: with_library(bench),
            lambda: with_transformers(bench, path, torch.float32),
            lambda: with_transformers(bench, path, torch.bfloat16),
        ):
            began = time.monotonic()
            try:
                rows.append(case())
            except SystemExit as problem:  # of `expect`: the next case may be right
                failed = True
                rows.append({"wrong": str(problem)})
            rows[-1]["took s"] = round(time.monotonic() - began, 1)
            print(*(f"{name}: {value}" for name, value in rows[-1].items()), sep=", ", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
