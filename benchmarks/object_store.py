"""Bytes per second from an object store: VUA, which verifies, beside obstore alone and boto3.

``python benchmarks/object_store.py s3://bucket/prefix`` with the server's endpoint and credentials
in the environment; without a URL it starts a SeaweedFS. Arms take turns, against the same objects.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import obstore
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from buckets import seaweedfs, speaking_to
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.io.threads import Threads
from vua.storage.bucket import Bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.object import ObjectStorage
from vua.store.store import Store
from vua.store.tensors import memory_map

SIZES = {1: 4, 8: 32, 32: 128}  # MiB of a chunk: layers


def measured(work: Callable[[], None], nbytes: int) -> tuple[float, float]:
    """Return GB/s and CPU seconds per GB."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    gb = nbytes / 1e9
    return gb / (time.perf_counter() - began_s), (time.process_time() - cpu_s) / gb


def compare(url: str, mib: int, at_once: int, rounds: int) -> None:
    """Print one row."""
    layout = KVLayout(SIZES[mib], 8, 128, 128, "BF16", 64)
    namespace, tokens = "b" * 64, 64 * at_once
    storage = ObjectStorage(BucketPath(Bucket.at(f"{url}/{mib}")) / namespace)
    store = Store(storage, namespace, layout)
    shape = (8, tokens, 128)
    arrays = [[torch.randn(shape).bfloat16() for _ in range(layout.layers)] for _ in "KV"]
    keys = KeyChain(token_ids(range(tokens)), 64)
    began_s = time.perf_counter()
    written = store.writer(memory_map(arrays, 64)).save_all(keys)
    put = written * (mib << 20) / 1e9 / (time.perf_counter() - began_s) if written else 0.0
    into = [[torch.empty(shape, dtype=torch.bfloat16) for _ in part] for part in arrays]
    loader = store.loader(memory_map(into, 64))
    bucket = storage.directory.bucket
    objects = [one.key for one in bucket.walk(namespace)][:at_once]
    nbytes = at_once * (mib << 20)
    threads = Threads(16, "bench")

    def alone() -> None:
        threads.map(lambda _, key: len(obstore.get(bucket._reads, key).bytes()), objects)

    def verified() -> None:
        if loader.load(keys.first(at_once)).chunks != at_once:
            raise RuntimeError("not all was loaded")

    arms = {"VUA": verified, "obstore": alone}
    with contextlib.suppress(ImportError):
        import boto3

        client = boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"))
        name, _, prefix = bucket.url.removeprefix("s3://").partition("/")
        pool = ThreadPoolExecutor(16)

        def one(key: str) -> int:
            got = client.get_object(Bucket=name, Key=f"{prefix}/{key}")
            return len(got["Body"].read())

        arms["boto3"] = lambda: sum(pool.map(one, objects))
    results: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm, work in arms.items():
            found = measured(work, nbytes)
            if turn:
                results[arm].append(found)
    shown = {
        arm: (median(gb for gb, _ in each), median(cpu for _, cpu in each))
        for arm, each in results.items()
    }
    ratio = shown["VUA"][0] / shown["obstore"][0]
    cells = " | ".join(f"{gb:.2f} ({cpu:.2f})" for gb, cpu in shown.values())
    print(f"| {mib} | {at_once} | {cells} | {ratio:.2f} | {put:.2f} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = options.url
        if url is None:
            stack.enter_context(speaking_to(seaweedfs().endpoint))
            url = seaweedfs().place()
        print("| MiB | at once | VUA | obstore | boto3 | VUA / obstore | VUA writes, GB/s |")
        print("|--:|--:|--:|--:|--:|--:|--:|")
        for mib in SIZES:
            for at_once in (1, 4, 16):
                compare(url, mib, at_once, options.rounds)


if __name__ == "__main__":
    main()
