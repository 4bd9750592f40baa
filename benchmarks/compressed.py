"""Compressed entries in a bucket behind a slow link, beside plain ones: load time, first token.

``python benchmarks/compressed.py [--mb-s 100] [--first-token]`` starts a SeaweedFS and, in a
process of its own, a proxy whose so many MB per second all bytes share. The K and V are those of
SmolLM2-135M (see tests/real_model.py) for this repository's documentation. Arms take turns.
With ``--first-token`` a vLLM engine loads prompts of which every other one is stored plain: seconds
to the first token, and how many times sooner it comes. On NFS: ``benchmarks/nfs/run.py --parts
first-token``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from buckets import seaweedfs, speaking_to
from proxy import FaultyProxy
from real_model import real_model
from vua import VUA, VUAConfig
from vua.format.compressed import compress, decompressed
from vua.format.entry import CODEC
from vua.storage.bucket import Bucket
from vua.storage.names import is_compressed, plain_path

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 64
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}


def text() -> str:
    """Text of some length: the documentation."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def token_ids(count: int) -> list[int]:
    """Its first tokens."""
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(real_model())(text())["input_ids"][:count])


def real_caches(ids: list[int]) -> list[list[torch.Tensor]]:
    """K and V of each layer, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_model(), dtype=torch.float32)
    with torch.inference_mode():
        cache = model.model(torch.tensor([ids]), use_cache=True).past_key_values
    return [[layer.keys.clone(), layer.values.clone()] for layer in cache.layers]


def serve(endpoint: str, bytes_per_s: float, out: Connection) -> None:
    """Be the proxy, until the parent ends this process."""
    out.send(FaultyProxy(endpoint, bytes_per_s=bytes_per_s).endpoint)
    time.sleep(3600)


@contextlib.contextmanager
def slow_link(bytes_per_s: float) -> Iterator[None]:
    """Speak to a server behind such a link."""
    here, there = get_context("spawn").Pipe()
    arguments = (seaweedfs().endpoint, bytes_per_s, there)
    process = get_context("spawn").Process(target=serve, args=arguments, daemon=True)
    process.start()
    try:
        with speaking_to(here.recv()):
            yield
    finally:
        process.kill()


def speeds(url: str) -> tuple[float, float, float]:
    """Return the share of the plain bytes, and MB/s of one thread: compressing, decompressing."""
    bucket, plain_nbytes, stored_nbytes, took_s = Bucket.at(url), 0, 0, [0.0, 0.0]
    for one in [one for one in bucket.walk() if is_compressed(one.key)][:16]:
        began_s = time.perf_counter()
        stored = bucket.get(one.key)[1]
        began_s = time.perf_counter()
        plain = decompressed(stored)
        middle_s = time.perf_counter()
        compress(plain)
        took_s[1] += middle_s - began_s
        took_s[0] += time.perf_counter() - middle_s
        plain_nbytes, stored_nbytes = plain_nbytes + len(plain), stored_nbytes + len(stored)
    if not plain_nbytes:
        return 1.0, 0.0, 0.0
    return (
        stored_nbytes / plain_nbytes,
        plain_nbytes / 1e6 / took_s[0],
        plain_nbytes / 1e6 / took_s[1],
    )


def loads(mb_s: float, rounds: int, length: int) -> None:
    """Print a table of the library's loads."""
    ids = token_ids(length)
    caches, tokens = real_caches(ids), torch.tensor(ids)
    print(
        "| dtype | MB | stored | compress MB/s | decompress MB/s | plain s | compressed s | gain |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for name, dtype in DTYPES.items():
        kv = [[part.to(dtype) for part in pair] for pair in caches]
        urls = {codec: seaweedfs().place() for codec in ("off", CODEC)}
        with contextlib.ExitStack() as stack:
            with speaking_to(seaweedfs().endpoint):
                for codec, url in urls.items():
                    with VUA(VUAConfig(split_factor=CHUNK, model=name, codec=codec), url) as vua:
                        vua.put(tokens, kv)
                share, fast, faster = speeds(urls[CODEC])
            Bucket._open.clear()  # what is open speaks to the server itself
            stack.enter_context(slow_link(mb_s * 1e6))
            arms = {
                codec: stack.enter_context(
                    VUA(VUAConfig(split_factor=CHUNK, model=name, codec=codec), url)
                )
                for codec, url in urls.items()
            }
            times: dict[str, list[float]] = {codec: [] for codec in arms}
            for turn in range(rounds + 1):
                for codec in list(arms)[:: 1 if turn % 2 else -1]:
                    began_s = time.perf_counter()
                    found = arms[codec].get_closest(tokens)
                    if turn:
                        times[codec].append(time.perf_counter() - began_s)
                    if found.num_tokens != len(ids):
                        raise RuntimeError(f"{found.num_tokens} tokens were found")
        plain_s, small_s = (median(each) for each in times.values())
        nbytes = sum(part.nbytes for pair in kv for part in pair)
        print(
            f"| {name} | {nbytes / 1e6:.0f} | {share:.2f} | {fast:.0f} | {faster:.0f} | "
            f"{plain_s:.2f} | {small_s:.2f} | {plain_s / small_s:.2f} |",
            flush=True,
        )
        Bucket._open.clear()


@contextlib.contextmanager
def behind_a_link(mb_s: float) -> Iterator[str]:
    """A place in a bucket behind a link that is so slow."""
    url = seaweedfs().place()
    with slow_link(mb_s * 1e6):
        yield url


def leave_page_cache(url: str) -> None:
    """Take the files of a ``file://`` URL out of this host's page cache; buckets have none."""
    if url.startswith("file://"):
        for path in Path(url.removeprefix("file://")).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_tokens(
    place: contextlib.AbstractContextManager[str], rounds: int, length: int
) -> dict[str, float]:
    """Return medians of seconds to the first token; the same engine loads both forms in turns."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    from vllm import LLM, SamplingParams

    ids = token_ids(2 * (length + 8))
    prompts = [ids[: length + 8], ids[length + 8 :]]
    with place as url:
        extra = {
            "shared_storage_path": url,
            "load_policy": "always",
            "worker": {"codec": CODEC},
            "timeouts": {"io_s": 60},
        }
        engine = LLM(
            str(real_model()),
            max_model_len=length + 64,
            max_num_batched_tokens=length + 64,
            max_num_seqs=1,
            enforce_eager=True,
            disable_log_stats=True,
            kv_transfer_config={
                "kv_connector": "VUAStorageConnector_V1",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        )

        def seconds(prompt: list[int]) -> float:
            engine.reset_prefix_cache()
            leave_page_cache(url)
            began_s = time.perf_counter()
            engine.generate(
                {"prompt_token_ids": prompt},
                SamplingParams(max_tokens=1, temperature=0),
                use_tqdm=False,
            )
            return time.perf_counter() - began_s

        computed = [seconds(prompt) for prompt in prompts]
        bucket = Bucket.at(url)
        chunks = 2 * (length // CHUNK)
        stop_s = time.monotonic() + 120
        while sum(is_compressed(one.key) for one in bucket.walk()) < chunks:
            if time.monotonic() > stop_s:
                raise RuntimeError("not all was stored")
            time.sleep(0.5)
        expand(bucket, prompts[0])
        times: dict[str, list[float]] = {"plain": [], "compressed": []}
        for turn in range(rounds + 1):
            arms = list(zip(times, prompts, strict=True))
            for name, prompt in arms[:: 1 if turn % 2 else -1]:
                before = bucket.counts["read_nbytes"]
                took_s = seconds(prompt)
                read_mb = (bucket.counts["read_nbytes"] - before) / 1e6
                if turn:
                    times[name].append(took_s)
                print(f"{name}: {took_s:.2f} s, {read_mb:.1f} MB", flush=True)
        found = {"computed": median(computed)} | {arm: median(each) for arm, each in times.items()}
        return found | {"gain": found["plain"] / found["compressed"]}


def expand(bucket: Bucket, prompt: list[int]) -> None:
    """Replace the compressed objects of one of the two prompts by plain ones."""
    from vua.format.parse import parse_entry

    found: dict[str, Any] = {}
    for one in bucket.walk():
        if is_compressed(one.key):
            found[one.key] = bytes(decompressed(bucket.get(one.key)[1]))
    infos = {key: parse_entry(data) for key, data in found.items()}
    first = {info.prefix_hash: key for key, info in infos.items()}
    from vua.format.keys import KeyChain
    from vua.format.keys import token_ids as encoded

    for key in KeyChain(encoded(prompt), CHUNK):
        name = first[key.name]
        bucket.put(plain_path(name), found[name])
        bucket.delete([name])


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mb-s", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-token", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    if not options.first_token:
        loads(options.mb_s, options.rounds, options.tokens)
        return
    found = first_tokens(behind_a_link(options.mb_s), options.rounds, options.tokens)
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
