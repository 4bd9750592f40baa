"""Bytes per second from an object store: VUA beside obstore alone, boto3 and LMCache's adapter.

``python benchmarks/object_store.py s3://bucket/prefix`` with the server's endpoint and credentials
in the environment; without a URL it starts a SeaweedFS. Arms take turns, with objects of one size.
VUA alone verifies. LMCache takes part where it can be imported, with `awscrt`, from PYTHONPATH
(`dev.py lmcache` installs it, and `pip install --target` the other); else a line says why not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

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

ARMS = ("VUA", "obstore", "boto3", "LMCache")
SIZES = {1: 4, 8: 32, 32: 128}  # MiB of a chunk: layers


def measured(work: Callable[[], None], nbytes: int) -> tuple[float, float]:
    """Return GB/s and CPU seconds per GB."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    gb = nbytes / 1e9
    return gb / (time.perf_counter() - began_s), (time.process_time() - cpu_s) / gb


def lmcache_adapter(url: str, nbytes: int, count: int) -> tuple[Callable[[], None], ...]:
    """What stores, and what loads, so many objects through LMCache's own S3 adapter.

    It knows buckets as names of hosts alone: here its model's name begins with the bucket's.
    """
    from lmcache.cli.commands.bench.l2_adapter_bench import data
    from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2Adapter, S3L2AdapterConfig

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    settings = {
        "s3_endpoint": endpoint.partition("://")[2],
        "s3_region": os.environ["AWS_REGION"],
        "disable_tls": endpoint.startswith("http:"),
        "s3_prefer_http2": False,
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    adapter: Any = S3L2Adapter(S3L2AdapterConfig.from_dict(settings))
    keys = data.make_object_keys(count, model_name=url.removeprefix("s3://"))
    memory = data.make_aligned_tensor(count * nbytes)
    objects = data.make_memory_objects(memory, count, nbytes, 0)

    def store() -> None:
        adapter.submit_store_task(keys, objects)
        while not (done := adapter.pop_completed_store_tasks()):
            data.wait_eventfd(adapter.get_store_event_fd())
        if not all(one.is_successful() for one in done.values()):
            raise RuntimeError("LMCache has not stored all")

    def load() -> None:
        task = adapter.submit_load_task(keys, objects)
        while (told := adapter.query_load_result(task)) is None:
            data.wait_eventfd(adapter.get_load_event_fd())
        if told.popcount() != count:
            raise RuntimeError("LMCache has not loaded all")

    return store, load, adapter.close


def compare(url: str, mib: int, at_once: int, rounds: int) -> None:
    """Print one row."""
    layout = KVLayout(SIZES[mib], 8, 128, 128, "BF16", 64)
    namespace, tokens = "b" * 64, 64 * at_once
    storage = ObjectStorage(BucketPath(Bucket.at(f"{url}/{mib}")) / namespace)
    store = Store(storage, namespace, layout)
    shape = (8, tokens, 128)
    arrays = [[torch.randn(shape).bfloat16() for _ in range(layout.layers)] for _ in "KV"]
    keys = KeyChain(token_ids(range(tokens)), 64)
    writer = store.writer(memory_map(arrays, 64))
    puts = {"VUA": measured(lambda: writer.save_all(keys), at_once * (mib << 20))}
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
    close: Callable[[], None] = lambda: None  # noqa: E731
    with contextlib.suppress(ImportError):
        put, arms["LMCache"], close = lmcache_adapter(f"{url}/{mib}-{at_once}", mib << 20, at_once)
        puts["LMCache"] = measured(put, nbytes)
    results: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm, work in arms.items():
            found = measured(work, nbytes)
            if turn:
                results[arm].append(found)
    close()
    shown = [
        (median(gb for gb, _ in results[arm]), median(cpu for _, cpu in results[arm]))
        if arm in results
        else None
        for arm in ARMS
    ]
    cells = [f"{one[0]:.2f} ({one[1]:.2f})" if one else "-" for one in shown]
    cells += [
        f"{puts[arm][0]:.2f} ({puts[arm][1]:.2f})" if arm in puts else "-"
        for arm in ("VUA", "LMCache")
    ]
    print(f"| {mib} | {at_once} | {' | '.join(cells)} |", flush=True)


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
        if find_spec("lmcache") is None or find_spec("awscrt") is None:
            print("LMCache takes no part: lmcache or awscrt cannot be imported")
        print(f"| MiB | at once | {' | '.join(ARMS)} | VUA writes | LMCache writes |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|")
        for mib in SIZES:
            for at_once in (1, 4, 16):
                compare(url, mib, at_once, options.rounds)


if __name__ == "__main__":
    main()
