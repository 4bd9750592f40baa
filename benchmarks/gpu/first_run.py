"""The first minutes on a GPU machine: what is to be known, in the order of its weight.

    python benchmarks/gpu/first_run.py --out FILE.tar [--dir DIRECTORY] [--only | --done NAME,...]
    python benchmarks/gpu/first_run.py --out FILE.tar --cpu     # small, where there is no GPU

==========  ========================================================================================
plain       time to the first token in a real vLLM without a connector (`first_token.py`)
cold        the same with an empty store: what a miss costs, and a save
warm        a restart on the files of `cold`
sweep       loads and saves beside raw reads and writes, by threads; turned bits (`sweep.py`)
tests       the tests that need a GPU
cufile      whether GPUDirect Storage works here (`cufile.py`)
transfers   copies, kernels and files against their limits (`transfers.py`)
cases       whether the connector works in a vLLM, in several set-ups (`vllm_cases.py`)
library     transformers, and the library with tensors on the GPU (`library.py`)
machine     what machine this is (`machine.py`)
==========  ========================================================================================

Each part is a process with a limit of its own; at its limit it is aborted and shows where each
thread was. One that fails does not stop those that follow. The limits add up to nine minutes. After
each part FILE.tar is replaced: it holds `summary.json` (command, status, seconds), and of each part
the output, `NAME.log`, and the results, `NAME.json`. A further call adds to the file: ``--done``
leaves out parts that were done already, ``--only`` all but some. ``--dir``: a directory on the file
system to measure, with 30 GB free. Needs no network; vLLM and what the tests need may come by
PYTHONPATH. The exit status is 1 where a part failed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MOST_BYTES = 1 << 20
"""Of a part's output, its end."""
GRACE_S = 5.0
"""For an aborted process to write where its threads are."""
CPU_LIMIT_S = 600.0
"""Of each part on the CPU, where there is nothing to learn from times."""
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Part:
    """One process."""

    name: str
    limit_s: float
    gpu: Sequence[str]
    """What follows the word `python`; {dir} and {json} are filled in."""
    cpu: Sequence[str] = ()
    """The same without a GPU; nothing: it needs one, or an earlier part does it there."""


def program(name: str, *arguments: str) -> tuple[str, ...]:
    """A program of this folder, its place for files, and its results."""
    return (f"{HERE}/{name}.py", *arguments, "--dir", "{dir}")


RESULTS, CPU = ("--json", "{json}"), ("--device", "cpu")
PYTEST = (
    *("-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"),
    "--continue-on-collection-errors",
)
TESTS = (
    "tests/unit/device/test_device.py",
    "tests/unit/device/test_device_staging.py",
    "tests/unit/connector/test_device_transfer.py",
    "tests/unit/device/test_device_gds.py",
    "tests/unit/lmcache/test_lmcache_gpu_connector.py",
    "tests/unit/transformers/test_changed_models.py",
)
"""Each file with a test that needs a GPU: others may need packages that are not there."""
SMALL_TESTS = ("-m", "not gpu and not thorough", "tests/unit/device/test_device_staging.py")


def both(name: str, rounds: int | None = None) -> tuple[Sequence[str], Sequence[str]]:
    """A program on a GPU, and on the CPU, there with one round."""
    many, one = ((), ()) if rounds is None else (("--rounds", f"{rounds}"), ("--rounds", "1"))
    return program(name, *RESULTS, *many), program(name, *RESULTS, *CPU, *one)


FIRST_TOKEN = (*RESULTS, "--hooks")

PARTS: Sequence[Part] = (
    Part("plain", 110, program("first_token", "plain", *FIRST_TOKEN),
         program("first_token", *FIRST_TOKEN, "--tiny")),
    Part("cold", 80, program("first_token", "cold", *FIRST_TOKEN)),
    Part("warm", 65, program("first_token", "warm", *FIRST_TOKEN)),
    Part("sweep", 40, *both("sweep", 2)),
    Part("tests", 40, (*PYTEST, "-m", "gpu", *TESTS), (*PYTEST, *SMALL_TESTS)),
    Part("cufile", 10, *both("cufile")),
    Part("transfers", 30, *both("transfers", 3)),
    Part("cases", 115, program("vllm_cases", *RESULTS),
         program("vllm_cases", "eager", *RESULTS, "--tiny")),
    Part("library", 40, *both("library")),
    Part("machine", 10, program("machine"), program("machine", *CPU)),
)  # fmt: skip
"""Limits are twice what a part took on an H200 where there is room, and for the first start of vLLM
from a cold disk a minute more."""
NAMES = [part.name for part in PARTS]
Files = dict[str, bytes]
"""What the tar holds, by name."""


def run(part: Part, directory: str, *, cpu: bool) -> tuple[dict[str, Any], Files]:
    """Run one part to its end or its limit; return what came of it, and its files."""
    if cpu and not part.cpu:
        return {"part": part.name, "status": "not on the CPU"}, {}
    with tempfile.TemporaryDirectory(prefix="vua-first-") as room:
        results, output = Path(room, "results.json"), Path(room, "output")
        places = {"dir": directory, "json": results}
        command = [sys.executable]
        command += [word.format(**places) for word in (part.cpu if cpu else part.gpu)]
        found: dict[str, Any] = {"part": part.name, "command": " ".join(command)}
        began = time.monotonic()
        found |= wait_for(command, output, CPU_LIMIT_S if cpu else part.limit_s)
        found["seconds"] = round(time.monotonic() - began, 1)
        files = {f"{part.name}.log": output.read_bytes()[-MOST_BYTES:]}
        with suppress(OSError):  # it has written none
            files[f"{part.name}.json"] = results.read_bytes()
        return found, files


def wait_for(command: Sequence[str], output: Path, limit_s: float) -> dict[str, Any]:
    """Run a command up to a limit."""
    status = "ended"
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=stream,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = f"ended at its limit of {limit_s:g} s"
            os.killpg(process.pid, signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:  # what it has started ends with it, whatever happens here
            end_session(process)
    return {"status": status, "exit": process.returncode}


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, engines too."""
    with suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read(path: Path) -> Files:
    """What earlier calls have found."""
    if not path.exists():
        return {}
    with tarfile.open(path) as tar:
        opened = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name: file.read() for name, file in opened.items() if file is not None}


def write(path: Path, files: Files) -> None:
    """Replace the file as a whole: the machine may be taken away at any moment."""
    fresh = path.with_name(f"{path.name}.new")
    with tarfile.open(fresh, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), int(time.time())
            tar.addfile(member, io.BytesIO(content))
    fresh.replace(path)


def go_through(parts: Sequence[Part], out: Path, place: str | None, *, cpu: bool) -> bool:
    """Run parts one after the other, keep what is known after each; return whether all was well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # an aborted engine's would take minutes
    files = read(out)
    summary: dict[str, dict[str, Any]] = json.loads(files.get(SUMMARY, b"{}"))
    try:
        with tempfile.TemporaryDirectory(prefix="vua-first-", dir=place) as directory:
            for part in parts:
                one, own = run(part, directory, cpu=cpu)
                files = {name: files[name] for name in files if name.partition(".")[0] != part.name}
                summary[part.name] = one
                files |= own | {SUMMARY: json.dumps(summary, indent=1).encode()}
                write(out, files)
                print(line(one), flush=True)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    print(f"\n{out}:", *map(line, summary.values()), sep="\n")
    return all(summary[part.name].get("exit", 0) == 0 for part in parts)


def line(one: dict[str, Any]) -> str:
    """A part in a line."""
    if "exit" not in one:
        return f"{one['part']:10} {one['status']}"
    good = "well" if one["exit"] == 0 else f"FAILED, exit {one['exit']}"
    return f"{one['part']:10} {good}, {one['status']}, {one['seconds']} s"


def chosen(only: Sequence[str], done: Sequence[str]) -> list[Part]:
    """The parts to be run, in their order.

    Raises ValueError for an unknown name, and for `warm` without `cold`, whose files it loads.
    """
    unknown = sorted({*only, *done} - set(NAMES))
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; the parts are {', '.join(NAMES)}")
    parts = [part for part in PARTS if part.name in (only or NAMES) and part.name not in done]
    names = {part.name for part in parts}
    if "warm" in names and "cold" not in names:
        raise ValueError("warm loads what cold has stored: run both, or neither")
    return parts


def names(text: str) -> list[str]:
    """A list with commas."""
    return [name for name in text.split(",") if name]


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the tar of results")
    parser.add_argument("--dir", help="a directory on the file system to measure")
    parser.add_argument("--only", type=names, default=[], help="NAME,...: these parts alone")
    parser.add_argument("--done", type=names, default=[], help="NAME,...: not these parts")
    parser.add_argument("--cpu", action="store_true", help="only see whether it works")
    arguments = parser.parse_args()
    try:
        parts = chosen(arguments.only, arguments.done)
    except ValueError as problem:
        parser.error(str(problem))
    well = go_through(parts, arguments.out, arguments.dir, cpu=arguments.cpu)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
