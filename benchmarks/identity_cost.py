"""What it costs to identify weights: beside reading them, by their size, and at an engine's start.

    python benchmarks/identity_cost.py --gb 16 --warm-gb 2 --engine-gb 4 --model-gb 2

Makes random checkpoints in ``--dir`` and deletes them. Reading alone (the same pieces, by as many
threads) is the denominator; "from disk" means that the files were dropped from the page cache
before. ``--model-gb`` loads a model in transformers: what its first block pays until it is known
which model it is, what a later one pays, and which share of `generate` looks at the model take.
Prints JSON; ratios are what to quote, seconds belong to one machine and its load.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from small_models import ENGINE_ENVIRONMENT, make_model
from vua.weights import checkpoint_files, identify_weights

_TENSOR_NBYTES: Final = 256 << 20
_FILE_TENSORS: Final = 8
_PIECE_NBYTES: Final = 4 << 20


def make_checkpoint(folder: Path, nbytes: int) -> None:
    """Write random bytes as safetensors files of 2 GiB; they do not stay in the page cache."""
    folder.mkdir()
    random, number = np.random.default_rng(0), 0
    for left in range(nbytes, 0, -_FILE_TENSORS * _TENSOR_NBYTES):
        count = -(-min(left, _FILE_TENSORS * _TENSOR_NBYTES) // _TENSOR_NBYTES)
        header = {
            f"layer.{number + n}": {
                "dtype": "U8",
                "shape": [_TENSOR_NBYTES],
                "data_offsets": [n * _TENSOR_NBYTES, (n + 1) * _TENSOR_NBYTES],
            }
            for n in range(count)
        }
        text = json.dumps(header).encode()
        with (folder / f"model-{number:05}.safetensors").open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for _ in range(count * _TENSOR_NBYTES // _PIECE_NBYTES):
                stream.write(random.bytes(_PIECE_NBYTES))
        number += count
        drop(folder)


def drop(folder: Path) -> None:
    """Drop a directory's files from the page cache."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fdatasync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_alone(folder: Path) -> None:
    """Read what is digested, in pieces of 4 MiB, by as many threads."""
    pieces = iter(
        [
            (file, at)
            for file in checkpoint_files(folder)
            for at in range(0, file.stat().st_size, _PIECE_NBYTES)
        ]
    )
    lock = threading.Lock()

    def run() -> None:
        buffer, opened = bytearray(_PIECE_NBYTES), dict[Path, int]()
        while True:
            with lock:
                if (piece := next(pieces, None)) is None:
                    break
            file, at = piece
            if file not in opened:
                opened[file] = os.open(file, os.O_RDONLY)
            os.preadv(opened[file], [buffer], at)
        for fd in opened.values():
            os.close(fd)

    threads = [threading.Thread(target=run) for _ in range(min(8, len(os.sched_getaffinity(0))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def digest(folder: Path) -> None:
    """Digest everything; believe nothing that is remembered."""
    identify_weights(checkpoint_files(folder), cache=False)


def seconds(work: Callable[[Path], None], folder: Path) -> tuple[float, float]:
    """How long it takes, and how much of that processors compute for it, all threads together."""
    began, computed = time.monotonic(), time.process_time()
    work(folder)
    return round(time.monotonic() - began, 3), round(time.process_time() - computed, 3)


def measure_reading(folder: Path, *, cold: bool, rounds: int) -> list[dict[str, float]]:
    """Digest and read alone by turns."""
    found = []
    for number in range(rounds):
        row = {}
        arms = [("read", read_alone), ("digest", digest)]
        for name, work in arms if number % 2 else arms[::-1]:
            if cold:
                drop(folder)
            else:
                read_alone(folder)
            row[name + "_s"], row[name + "_cpu_s"] = seconds(work, folder)
        found.append(
            row
            | {
                "ratio": round(row["digest_s"] / row["read_s"], 2),
                "cpu_ratio": round(row["digest_cpu_s"] / row["read_cpu_s"], 2),
            }
        )
    return found


def remembered(folder: Path) -> dict[str, float]:
    """Digest with an empty private cache, and again."""
    time.sleep(2.5)  # what was just written is not remembered
    files = checkpoint_files(folder)
    first, again = identify_weights(files), identify_weights(files)
    return {
        "first_s": round(first.seconds, 3),
        "again_s": round(again.seconds, 4),
        "again_read_bytes": again.read_nbytes,
    }


# -- engines ----------------------------------------------------------------------------------


def make_engine_model(folder: Path, nbytes: int) -> Path:
    """Make a Llama with layers of Llama 3 8B's shape, as many as ``nbytes`` have room for.

    One layer is made and written again and again: no memory would hold them all beside an engine's.
    The head is small: vLLM keeps a second copy of it on CPUs.
    """
    from safetensors.torch import load_file

    small = make_model(
        folder, hidden_size=4096, intermediate_size=14336, heads=32, kv_heads=8, head_dim=128,
        dtype="bfloat16", tie=True, layers=1, initializer_range=0.02,
    )  # fmt: skip
    file = small / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    layer = {name: one for name, one in tensors.items() if ".layers.0." in name}
    rest = {name: one for name, one in tensors.items() if name not in layer}
    layers = max(1, nbytes // sum(one.nbytes for one in layer.values()))
    places: dict[str, str] = {}
    for number in range(layers):
        named = {name.replace(".0.", f".{number}."): one for name, one in layer.items()}
        part = named | (rest if not number else {})
        write_tensors(small / f"model-{number:05}.safetensors", part)
        places |= dict.fromkeys(part, f"model-{number:05}.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (small / "model.safetensors.index.json").write_text(json.dumps(index))
    said = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(said | {"num_hidden_layers": layers}))
    drop(small)
    return small


def write_tensors(file: Path, tensors: dict[str, Any]) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save_file

    save_file({name: one.contiguous() for name, one in tensors.items()}, file)


def start_engine(model: str, root: str) -> None:
    """Start an engine and print when it was ready, and when its weights were identified."""
    began = time.monotonic()
    from vllm import LLM
    from vllm.config import KVTransferConfig

    imported_s = time.monotonic() - began
    settings: dict[str, Any] = {}
    if root:
        settings["kv_transfer_config"] = KVTransferConfig(
            kv_connector="VUAStorageConnector_V1",
            kv_connector_module_path="vua.vllm.kv_connector_v1",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"shared_storage_path": root},
        )
    engine = LLM(
        model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
        kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=64, max_num_seqs=1, **settings,
    )  # fmt: skip
    answer = {"start_s": time.monotonic() - began - imported_s}
    if root:
        began = time.monotonic()
        while not list(Path(root).glob("*/namespace.json")):  # made once the weights are known
            time.sleep(0.01)
        answer["identified_after_ready_s"] = time.monotonic() - began
    del engine
    print("ANSWER", json.dumps({name: round(value, 2) for name, value in answer.items()}))
    sys.stdout.flush()
    os._exit(0)


def measure_engines(folder: Path, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Start engines without VUA, with a cold and with a warm cache of digests, by turns."""
    model = make_engine_model(folder / "model", nbytes)
    time.sleep(2.5)
    environment = os.environ | ENGINE_ENVIRONMENT | {"XDG_CACHE_HOME": str(folder / "cache")}
    found = []
    for number in range(rounds):
        row: dict[str, Any] = {}
        roots = {"cold": folder / f"kv-{number}-cold", "warm": folder / f"kv-{number}-warm"}
        for name in ("without", "cold", "warm") if number % 2 == 0 else ("cold", "warm", "without"):
            if name == "cold":
                shutil.rmtree(folder / "cache" / "vua" / "weights", ignore_errors=True)
            root = str(roots.get(name, ""))
            drop(model)
            ran = subprocess.run(
                [sys.executable, __file__, "--start", str(model), root],
                env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            answers = [line[7:] for line in ran.stdout.splitlines() if line.startswith("ANSWER ")]
            row[name] = json.loads(answers[0]) if answers else ran.stderr[-500:]
        found.append(row)
    return found


# -- transformers -----------------------------------------------------------------------------


class Stopwatch:
    """What a model's watch takes, and what it lets be read."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._running = False

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed unless one that is timed calls it."""

        def timed(*arguments: Any, **more: Any) -> Any:
            if self._running:
                return work(*arguments, **more)
            self._running, began = True, time.monotonic()
            try:
                return work(*arguments, **more)
            finally:
                self._running = False
                self.spent_s += time.monotonic() - began

        return timed


def measure_model(folder: Path, nbytes: int, rounds: int) -> dict[str, Any]:
    """Open blocks that know nothing and blocks that remember, and generate in them."""
    import torch
    from transformers import AutoModelForCausalLM

    from vua.transformers import PrefixCache

    path = make_engine_model(folder / "model", nbytes)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    model.generation_config.eos_token_id = None
    size_gb = sum(file.stat().st_size for file in checkpoint_files(path)) / 1e9
    time.sleep(2.5)  # what was just written is not remembered

    def opened(_: Path) -> None:
        with PrefixCache(model, folder / "kv") as prefixes:
            prefixes.ready()

    def forgotten(_: Path) -> None:
        shutil.rmtree(folder / "cache" / "vua" / "weights", ignore_errors=True)
        opened(path)

    ways: list[tuple[str, Callable[[Path], None], bool]] = [
        ("read, from disk", read_alone, True),
        ("first block, from disk", forgotten, True),
        ("read, page cache", read_alone, False),
        ("first block, page cache", forgotten, False),
        ("later block, page cache", opened, False),
    ]
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        row = {}
        for name, work, cold in ways:
            drop(path) if cold else read_alone(path)
            row[name] = round(seconds(work, path)[0] / size_gb, 3)
        rows.append(row)
    ids = torch.randint(5, 250, (1, 200), generator=torch.Generator().manual_seed(1))
    return {
        "GB": round(size_gb, 2),
        "seconds per GB": rows,
        "looks": [measure_looks(model, folder / "kv", ids + n) for n in range(rounds)],
    }


def measure_looks(model: Any, root: Path, ids: Any) -> list[dict[str, float]]:
    """Generate some tokens with nothing stored, and again: of each, the share of looks at it."""
    from unittest import mock

    import torch

    from vua.transformers import cache, reuse_prefixes

    found = []
    with reuse_prefixes(model, root) as prefixes:
        prefixes.ready()
        for new_tokens in (16, 16, 64, 64):
            watch = Stopwatch()
            names = ("mark_of", "light_mark", "tensor_mark", "first_keys")
            timed = {name: watch.around(getattr(cache, name)) for name in names}
            looks = watch.around(cache.State.change)
            with (
                mock.patch.multiple(cache, **timed),
                mock.patch.object(cache.State, "change", looks),
            ):
                began = time.monotonic()
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), pad_token_id=3, do_sample=False,
                    max_new_tokens=new_tokens,
                )  # fmt: skip
                whole_s = time.monotonic() - began
            found.append({
                "new_tokens": new_tokens,
                "generate_s": round(whole_s, 3),
                "looks_s": round(watch.spent_s, 4),
                "share": round(watch.spent_s / whole_s, 4),
            })  # fmt: skip
    return found


def main() -> None:
    """Measure what was asked for."""
    if sys.argv[1:2] == ["--start"]:
        start_engine(sys.argv[2], sys.argv[3])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--gb", type=float, default=0, help="read from disk")
    parser.add_argument("--warm-gb", type=float, default=0, help="read from the page cache")
    parser.add_argument("--engine-gb", type=float, default=0, help="size of the engine's model")
    parser.add_argument("--model-gb", type=float, default=0, help="of a model in transformers")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    report: dict[str, Any] = {"processors": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory(prefix="vua-identity-", dir=given.dir) as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        for name, size_gb, cold in (("page cache", given.warm_gb, False), ("disk", given.gb, True)):
            if size_gb:
                model = Path(folder, "checkpoint")
                make_checkpoint(model, int(size_gb * 1e9))
                report[f"{size_gb} GB from {name}"] = measure_reading(
                    model, cold=cold, rounds=given.rounds
                )
                report[f"{size_gb} GB from {name}, remembered"] = remembered(model)
                shutil.rmtree(model)
        if given.engine_gb:
            report[f"engine of {given.engine_gb} GB"] = measure_engines(
                Path(folder), int(given.engine_gb * 1e9), given.rounds
            )
        if given.model_gb:
            report[f"model of {given.model_gb} GB"] = measure_model(
                Path(folder), int(given.model_gb * 1e9), given.rounds
            )
    report["load"] = os.getloadavg()
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
