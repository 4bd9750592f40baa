"""Bytes per second from an object store: VUA beside obstore alone, boto3 and LMCache's adapter.

``python benchmarks/object_store.py s3://bucket/prefix`` with the server's endpoint and credentials
in the environment; without a URL it starts a SeaweedFS. Arms take turns: each moves a prompt of
many chunks of one size, with so many requests under way at a time. VUA alone verifies. LMCache
takes part where it can be imported, with `awscrt`, from PYTHONPATH (`dev.py lmcache` installs it,
and `pip install --target` the other); else a line says why not.

The SeaweedFS keeps its data in memory and rarely collects garbage: it costs each client the same
time, which hides what they differ in.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import obstore
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from buckets import seaweedfs, speaking_to
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.io.pool import Pool
from vua.storage import bucket
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath
from vua.storage.names import entry_path
from vua.storage.object import ObjectStorage
from vua.store.store import Loader, Store
from vua.store.tensors import memory_map
from vua.store.writer import EntryWriter

ARMS = ("VUA", "obstore", "boto3", "LMCache", "LMCache in parts")
PART_MIB = 8
"""LMCache's client moves what is larger in parts of so many MiB."""
SIZES = {1: 4, 8: 32, 32: 128}  # MiB of a chunk: layers
TOKENS = 64
PROMPT_MIB = {"read": 256, "written": 128}
"""What one turn moves at least."""
ROUNDS = 3
"""Of one server: what they write fits into memory, 10 GiB at most."""


class LostError(Exception):
    """A client has not moved all."""


def measured(work: Callable[[], object], nbytes: int) -> tuple[float, float] | None:
    """Return GB/s and CPU seconds per GB; None, and a line, when not all was moved."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    try:
        work()
    except LostError as problem:
        print(f"{problem}: this turn is repeated", flush=True)
        return None
    gb = nbytes / 1e9
    return gb / (time.perf_counter() - began_s), (time.process_time() - cpu_s) / gb


class LMCache:
    """Stores and loads through LMCache's own S3 adapter, with ``at_once`` requests at a time.

    The adapter expects the bucket in the name of the host. Here it goes before the model's name.
    Its client moves objects of more than 8 MiB in parts, by as many requests as it likes. With
    ``parts`` it may; else one request moves an object, as in LMCache's older `s3_connector`.
    """

    def __init__(self, url: str, nbytes: int, count: int, at_once: int, *, parts: bool) -> None:
        """Store nothing yet. Raises ImportError."""
        from awscrt import s3
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
        whole = {} if parts else {"part_size": nbytes, "multipart_upload_threshold": 2 * nbytes}
        with mock.patch.object(s3, "S3Client", partial(s3.S3Client, **whole)):
            self._adapter: Any = S3L2Adapter(S3L2AdapterConfig.from_dict(settings))
        self._data, self._name = data, url.removeprefix("s3://")
        self._count, self._at_once, self._turns = count, at_once, itertools.count()
        memory = data.make_aligned_tensor(count * nbytes)
        self._objects = data.make_memory_objects(memory, count, nbytes, 0)
        self._keys: list[Any] = []
        self._tasks, self._lost = set[Any](), False
        self.close = self._adapter.close

    def store(self) -> None:
        """Store them by new names."""
        name = f"{self._name}/{next(self._turns)}"
        self._keys = self._data.make_object_keys(self._count, model_name=name)
        self._each(self._submit_store, self._wait_for_stores)

    def load(self) -> None:
        """Load what was stored last."""
        self._each(self._submit_load, self._wait_for_loads)

    def _each(self, submit: Callable[[int], object], wait: Callable[[], int]) -> None:
        left, under_way = list(range(self._count)), 0
        while left or under_way:
            while left and under_way < self._at_once:
                submit(left.pop())
                under_way += 1
            under_way -= wait()
        lost, self._lost = self._lost, False
        if lost:
            raise LostError("LMCache has not moved all")

    def _submit_store(self, place: int) -> None:
        self._adapter.submit_store_task([self._keys[place]], [self._objects[place]])

    def _wait_for_stores(self) -> int:
        self._data.wait_eventfd(self._adapter.get_store_event_fd())
        done = self._adapter.pop_completed_store_tasks()
        self._lost |= not all(one.is_successful() for one in done.values())
        return len(done)

    def _submit_load(self, place: int) -> None:
        task = self._adapter.submit_load_task([self._keys[place]], [self._objects[place]])
        self._tasks.add(task)

    def _wait_for_loads(self) -> int:
        self._data.wait_eventfd(self._adapter.get_load_event_fd())
        told = {task: self._adapter.query_load_result(task) for task in self._tasks}
        done = {task for task, found in told.items() if found is not None}
        self._lost |= any(told[task].popcount() != 1 for task in done)
        self._tasks -= done
        return len(done)


class Place:
    """Chunks of one size in a bucket, and every client's way to read and to write them."""

    def __init__(self, url: str, mib: int, at_once: int, prompt_mib: int) -> None:
        """Store a prompt; nothing is measured yet."""
        self._layout = KVLayout(SIZES[mib], 8, 128, 128, "BF16", TOKENS)
        self._url, self._chunks = f"{url}/{mib}-{at_once}", max(at_once, prompt_mib // mib)
        namespace, tokens = "b" * 64, TOKENS * self._chunks
        self._storage = ObjectStorage(BucketPath(Bucket.at(self._url)) / namespace)
        store = Store(self._storage, namespace, self._layout)
        shape = (8, tokens, 128)
        arrays = [[torch.randn(shape).bfloat16() for _ in range(SIZES[mib])] for _ in "KV"]
        into = [[torch.empty(shape, dtype=torch.bfloat16) for _ in part] for part in arrays]
        self._writer = EntryWriter(store, memory_map(arrays, TOKENS))
        self._loader = Loader(store, memory_map(into, TOKENS))
        self._keys, self._written = self._prompt(0), 0
        self._writer.save_all(self._keys)
        self._bucket = self._storage.directory.bucket
        stored = list(self._bucket.walk(namespace))
        self._objects = [one.key for one in stored]
        self.nbytes = sum(one.nbytes for one in stored)
        reads = self._bucket._reads
        self._bodies = [bytes(obstore.get(reads, key).bytes()) for key in self._objects]
        self._threads = Pool(at_once, "bench")
        bucket._runtime.threads = Pool(at_once, "vua-bucket")
        self._closing = contextlib.ExitStack()
        self.close = self._closing.close
        self.reads: dict[str, Callable[[], object]] = {"VUA": self._load, "obstore": self._get}
        self.writes: dict[str, Callable[[], object]] = {"VUA": self._save, "obstore": self._put}
        with contextlib.suppress(ImportError):
            self._add_boto3()
        with contextlib.suppress(ImportError):
            for parts in (False, True) if mib > PART_MIB else (False,):
                name, nbytes = "LMCache in parts" if parts else "LMCache", self.nbytes
                lmcache = LMCache(
                    f"{url}/l-{mib}-{at_once}-{int(parts)}",
                    nbytes // self._chunks,
                    self._chunks,
                    at_once,
                    parts=parts,
                )
                self.writes[name], self.reads[name] = lmcache.store, lmcache.load
                self._closing.callback(lmcache.close)
                lmcache.store()

    def _prompt(self, number: int) -> KeyChain:
        ids = range(number, number + TOKENS * self._chunks)
        return KeyChain(token_ids(ids), TOKENS)

    def _new_names(self) -> list[str]:
        """Names as deep as VUA's: servers that keep folders make as many for each."""
        self._written += 1
        paths = [entry_path(f"{key.name}/0") for key in self._prompt(self._written)]
        return [f"{'c' * 64}/{path}" for path in paths]

    def _load(self) -> None:
        if self._loader.load(self._keys.first(self._chunks)).chunks != self._chunks:
            raise RuntimeError("not all was loaded")

    def _save(self) -> None:
        self._written += 1
        self._writer.save_all(self._prompt(self._written))

    def _get(self) -> None:
        self._each(lambda key: len(obstore.get(self._bucket._reads, key).bytes()), self._objects)

    def _put(self) -> None:
        put = obstore.put
        items = list(zip(self._new_names(), self._bodies, strict=True))
        self._each(lambda item: put(self._bucket._writes, *item), items)

    def _each(self, work: Callable[[Any], object], items: Sequence[object]) -> None:
        self._threads.map(lambda job: work(job.what), items)

    def _add_boto3(self) -> None:
        import boto3

        client = boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"))
        name, _, prefix = self._url.removeprefix("s3://").partition("/")

        def get(key: str) -> int:
            got = client.get_object(Bucket=name, Key=f"{prefix}/{key}")
            return len(got["Body"].read())

        def put(item: tuple[str, bytes]) -> None:
            client.put_object(Bucket=name, Key=f"{prefix}/{item[0]}", Body=item[1])

        self.reads["boto3"] = lambda: self._each(get, self._objects)
        self.writes["boto3"] = lambda: self._each(
            put, list(zip(self._new_names(), self._bodies, strict=True))
        )


@contextlib.contextmanager
def somewhere(url: str | None) -> Iterator[str]:
    """A place to write to: the one that is given, or one of a server of its own, while it runs."""
    if url is not None:
        yield url
        return
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    settings = {"GOMEMLIMIT": "3GiB", "GOGC": "400"}
    with mock.patch.dict(os.environ, settings), mock.patch.object(tempfile, "tempdir", memory):
        started = seaweedfs.__wrapped__()
    with contextlib.closing(started) as server, speaking_to(server.endpoint):
        yield server.place()


_chance = random.Random(0)
Results = dict[str, list[tuple[float, float]]]


def compare(place: Place, arms: dict[str, Callable[[], object]], rounds: int) -> Results:
    """Return GB/s and CPU seconds per GB of each client and round, after one that is left out.

    In any order, by chance: whoever follows itself finds its memory as it has left it.
    """
    results: Results = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm, work in _chance.sample(sorted(arms.items()), len(arms)):
            found = measured(work, place.nbytes)
            while found is None:  # a client has lost some: LMCache, now and then
                found = measured(work, place.nbytes)
            if turn:
                results[arm].append(found)
    return results


def cells(results: Results) -> list[str]:
    """Return medians of each client, and of VUA's speed over that of each other."""
    texts = []
    for arm in ARMS:
        speeds = [median(values) for values in zip(*results.get(arm, []), strict=True)]
        texts.append("{:.2f} ({:.2f})".format(*speeds) if speeds else "-")
    for other in ARMS[1:]:
        pairs = zip(results["VUA"], results.get(other, []), strict=False)  # or it takes no part
        ratios = [ours[0] / theirs[0] for ours, theirs in pairs]
        texts.append(f"{median(ratios):.2f}" if ratios else "-")
    return texts


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", choices=PROMPT_MIB, action="append")
    parser.add_argument("--only", metavar="8x4,1x16", help="MiB of a chunk, and how many at once")
    options = parser.parse_args()
    if find_spec("lmcache") is None or find_spec("awscrt") is None:
        print("LMCache takes no part: lmcache or awscrt cannot be imported")
    for what in options.what or PROMPT_MIB:
        columns = [f"MiB {what}", "at once", *ARMS, *(f"VUA / {other}" for other in ARMS[1:])]
        print(f"| {' | '.join(columns)} |\n|{'--:|' * len(columns)}")
        for mib, at_once in product(SIZES, (1, 4, 16)):
            if options.only and f"{mib}x{at_once}" not in options.only.split(","):
                continue
            results: Results = {}
            for first in range(0, options.rounds, ROUNDS):
                with somewhere(options.url) as url:
                    place = Place(f"{url}/{what}", mib, at_once, PROMPT_MIB[what])
                    arms = place.reads if what == "read" else place.writes
                    found = compare(place, arms, min(ROUNDS, options.rounds - first))
                    place.close()
                del place, arms  # its arms point to it; the next one needs the memory
                gc.collect()
                for arm, some in found.items():
                    results.setdefault(arm, []).extend(some)
            print("|", " | ".join([str(mib), str(at_once), *cells(results)]), "|", flush=True)


if __name__ == "__main__":
    main()
