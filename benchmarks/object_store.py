"""Bytes per second from an object store: VUA beside obstore alone, boto3 and LMCache's adapter.

``python benchmarks/object_store.py s3://bucket/prefix`` with the server's endpoint and credentials
in the environment; without a URL it starts a SeaweedFS. Arms take turns, with objects of one size.
VUA alone verifies. LMCache takes part where it can be imported, with `awscrt`, from PYTHONPATH
(`dev.py lmcache` installs it, and `pip install --target` the other); else a line says why not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
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
from vua.storage.local import entry_path
from vua.storage.object import ObjectStorage
from vua.store.store import Store
from vua.store.tensors import memory_map

ARMS = ("VUA", "obstore", "boto3", "LMCache")
SIZES = {1: 4, 8: 32, 32: 128}  # MiB of a chunk: layers
TOKENS = 64
READ_NBYTES, WRITTEN_NBYTES = 96 << 20, 16 << 20
"""What one turn moves at least: single small objects tell more of the noise."""
MOST_NBYTES = 256 << 20
"""More at once is left out: what the server holds of them, and they themselves, fill the memory."""


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


class Place:
    """Chunks of one size in a bucket, and every client's way to read and to write them."""

    def __init__(self, url: str, mib: int, at_once: int) -> None:
        """Store so many chunks; nothing is measured yet."""
        self._layout = KVLayout(SIZES[mib], 8, 128, 128, "BF16", TOKENS)
        self._url, self._at_once = f"{url}/{mib}-{at_once}", at_once
        namespace, tokens = "b" * 64, TOKENS * at_once
        self._storage = ObjectStorage(BucketPath(Bucket.at(self._url)) / namespace)
        store = Store(self._storage, namespace, self._layout)
        shape = (8, tokens, 128)
        arrays = [[torch.randn(shape).bfloat16() for _ in range(SIZES[mib])] for _ in "KV"]
        into = [[torch.empty(shape, dtype=torch.bfloat16) for _ in part] for part in arrays]
        self._writer = store.writer(memory_map(arrays, TOKENS))
        self._loader = store.loader(memory_map(into, TOKENS))
        self._keys, self._written = self._prompt(0), 0
        self._writer.save_all(self._keys)
        self._bucket = self._storage.directory.bucket
        stored = list(self._bucket.walk(namespace))
        self._objects = [one.key for one in stored]
        self.nbytes = sum(one.nbytes for one in stored)
        self._body = bytes(obstore.get(self._bucket._reads, self._objects[0]).bytes())
        self._threads = Threads(16, "bench")
        self.close: Callable[[], None] = lambda: None
        self.reads: dict[str, Callable[[], object]] = {"VUA": self._load, "obstore": self._get}
        self.writes: dict[str, Callable[[], object]] = {"VUA": self._save, "obstore": self._put}
        with contextlib.suppress(ImportError):
            self._add_boto3()
        with contextlib.suppress(ImportError):
            self.writes["LMCache"], self.reads["LMCache"], self.close = lmcache_adapter(
                f"{url}/l-{mib}-{at_once}", self.nbytes // at_once, at_once
            )
            self.writes["LMCache"]()

    def _prompt(self, number: int) -> KeyChain:
        ids = range(number, number + TOKENS * self._at_once)
        return KeyChain(token_ids(ids), TOKENS)

    def _new_names(self) -> list[str]:
        """Names as deep as VUA's: servers that keep folders make as many for each."""
        self._written += 1
        paths = [entry_path(f"{key.name}/0") for key in self._prompt(self._written)]
        return [f"{'c' * 64}/{path}" for path in paths]

    def _load(self) -> None:
        if self._loader.load(self._keys.first(self._at_once)).chunks != self._at_once:
            raise RuntimeError("not all was loaded")

    def _save(self) -> None:
        self._written += 1
        self._writer.save_all(self._prompt(self._written))

    def _get(self) -> None:
        self._each(lambda key: len(obstore.get(self._bucket._reads, key).bytes()), self._objects)

    def _put(self) -> None:
        put = obstore.put
        self._each(lambda key: put(self._bucket._writes, key, self._body), self._new_names())

    def _each(self, work: Callable[[str], object], names: list[str]) -> None:
        if len(names) == 1:
            work(names[0])
        else:
            self._threads.map(lambda _, name: work(name), names)

    def _add_boto3(self) -> None:
        import boto3

        client = boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"))
        name, _, prefix = self._url.removeprefix("s3://").partition("/")

        def get(key: str) -> int:
            got = client.get_object(Bucket=name, Key=f"{prefix}/{key}")
            return len(got["Body"].read())

        def put(key: str) -> None:
            client.put_object(Bucket=name, Key=f"{prefix}/{key}", Body=self._body)

        self.reads["boto3"] = lambda: self._each(get, self._objects)
        self.writes["boto3"] = lambda: self._each(put, self._new_names())


def compare(place: Place, arms: dict[str, Callable[[], object]], rounds: int, times: int) -> str:
    """Return cells: GB/s and CPU seconds per GB of each client, and VUA's speed over obstore's."""

    def some(work: Callable[[], object]) -> None:
        for _ in range(times):
            work()

    results: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm, work in sorted(arms.items(), reverse=turn % 2 == 1):
            found = measured(functools.partial(some, work), place.nbytes * times)
            if turn:
                results[arm].append(found)
    cells = []
    for arm in ARMS:
        found = results.get(arm, [])
        both = [median(values) for values in zip(*found, strict=True)]
        cells.append(f"{both[0]:.2f} ({both[1]:.2f})" if both else "-")
    pairs = zip(results["VUA"], results["obstore"], strict=True)
    cells.append(f"{median(ours[0] / theirs[0] for ours, theirs in pairs):.2f}")
    return " | ".join(cells)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = options.url
        if url is None:
            stack.enter_context(speaking_to(seaweedfs().endpoint))
            url = seaweedfs().place()
        if find_spec("lmcache") is None or find_spec("awscrt") is None:
            print("LMCache takes no part: lmcache or awscrt cannot be imported")
        for what in ("read", "written"):
            print(f"| MiB {what} | at once | {' | '.join(ARMS)} | VUA / obstore |")
            print("|--:|--:|--:|--:|--:|--:|--:|")
            for mib, at_once in product(SIZES, (1, 4, 16)):
                place = Place(f"{url}/{what}", mib, at_once)
                arms = place.reads if what == "read" else place.writes
                total = READ_NBYTES if what == "read" else WRITTEN_NBYTES
                times = max(1, total // place.nbytes)
                if place.nbytes <= MOST_NBYTES:
                    cells = compare(place, arms, options.rounds, times)
                    print(f"| {mib} | {at_once} | {cells} |", flush=True)
                place.close()


if __name__ == "__main__":
    main()
