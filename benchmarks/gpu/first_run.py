"""The first hour on a GPU machine: everything that is to be known, in the order of its weight.

    python benchmarks/gpu/first_run.py OUT.json --dir DIRECTORY [--steps 1 2 ...]
    python benchmarks/gpu/first_run.py OUT.json --cpu           # all of it, small, without a GPU

=  ===========  ==================================================================================
1  machine      what is there; what page-locking takes; the tests of kernels and of the order of
                transfers. If one of the order fails, nothing that follows counts: stay with it
2  transfers    the parts against their limits (`transfers.py`)
3  loads        how loads scale with threads and buffers: alone, on four cores, beside Python
                (`sweep.py`)
4  vllm         whether the connector works in a real vLLM, in both layouts (`vllm_cases.py`)
5  engine       time to the first token, and what misses cost (`engine.py`)
6  sanitizer    NVIDIA's compute-sanitizer over the tests of step 1
=  ===========  ==================================================================================

Each part is a process with a limit of its own; one that fails or hangs ends alone, and the next one
begins. After each of them OUT.json holds all that was found so far: status, seconds, the end of its
output, its own results. A further call adds to the file, so that the steps can be done one at a
time. Needs no network; `vllm` and the tests' packages may come by PYTHONPATH. The limits add up to
an hour. The exit status does not tell what failed; the file does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TAIL_CHARACTERS = 6000
PYTEST = ("-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Part:
    """One process of a step."""

    step: int
    name: str
    limit_s: float
    gpu: Sequence[str]
    """What follows the word `python`; {dir} and {json} are filled in."""
    cpu: Sequence[str] = ()
    """The same without a GPU; nothing: it makes no sense there."""
    before: Sequence[str] = ()
    """What precedes `python`."""
    layout: str | None = None
    """VLLM_KV_CACHE_LAYOUT, where it is not vLLM's own choice."""


def program(name: str, *arguments: str) -> tuple[str, ...]:
    """A program of this folder, its place for files, and its results."""
    return (f"{HERE}/{name}.py", "--dir", "{dir}", *arguments)


RESULTS, CPU = ("--json", "{json}"), ("--device", "cpu")
DEVICE_TESTS = f"{ROOT}/tests/unit/device"
SWEEP = program("sweep", *RESULTS)
SMALL_SWEEP = program("sweep", *RESULTS, *CPU, "--rounds", "1")
CASES = program("vllm_cases", *RESULTS)
SMALL_CASES = program("vllm_cases", *RESULTS, "--tiny", "eager")
GPU_TESTS = (*PYTEST, "-m", "gpu", f"{ROOT}/tests/unit")
SANITIZED = (*PYTEST, "-m", "gpu", f"{DEVICE_TESTS}/test_device_staging.py")
SMALL_TESTS = (*PYTEST, "-m", "not gpu and not thorough", f"{DEVICE_TESTS}/test_device_staging.py")

PARTS: Sequence[Part] = (
    Part(1, "machine", 120, program("machine"), program("machine", *CPU)),
    Part(1, "tests", 300, GPU_TESTS, SMALL_TESTS),
    Part(2, "transfers", 540, program("transfers", *RESULTS, "--rounds", "10"),
         program("transfers", *RESULTS, *CPU, "--rounds", "1")),
    Part(3, "loads", 180, SWEEP, SMALL_SWEEP),
    Part(3, "loads, four cores", 180, SWEEP, SMALL_SWEEP, ("taskset", "-c", "0-3")),
    Part(3, "loads, beside Python", 180, (*SWEEP, "--busy"), (*SMALL_SWEEP, "--busy")),
    Part(4, "vllm", 300, CASES, SMALL_CASES),
    Part(4, "vllm, HND", 240, (*CASES, "eager", "graphs"), layout="HND"),
    Part(5, "engine", 590, program("engine", *RESULTS, "--rounds", "3"),
         program("engine", *RESULTS, "--tiny")),
    Part(6, "memcheck", 480, SANITIZED, before=("compute-sanitizer",)),
    Part(6, "racecheck", 480, SANITIZED, before=("compute-sanitizer", "--tool", "racecheck")),
)  # fmt: skip


def run(part: Part, directory: str, *, cpu: bool) -> dict[str, Any]:
    """Run one part to its end or its limit, and return what came of it."""
    if cpu and not part.cpu:
        return {"part": part.name, "status": "not without a GPU"}
    with tempfile.TemporaryDirectory(prefix="vua-first-") as room:
        results, output = Path(room, "results.json"), Path(room, "output")
        places = {"dir": directory, "json": results}
        command = [*part.before, sys.executable]
        command += [word.format(**places) for word in (part.cpu if cpu else part.gpu)]
        found: dict[str, Any] = {"part": part.name, "command": " ".join(command)}
        began = time.monotonic()
        try:
            found |= wait_for(part, command, output)
        except OSError as problem:
            return found | {"status": f"cannot be started: {problem}"}
        found["seconds"] = round(time.monotonic() - began, 1)
        text = output.read_text(encoding="utf-8", errors="replace")
        found["output"] = text[-TAIL_CHARACTERS:]
        with suppress(OSError, ValueError):  # it has written none, or was ended while it wrote
            found["results"] = json.loads(results.read_text(encoding="utf-8"))
        return found


def wait_for(part: Part, command: Sequence[str], output: Path) -> dict[str, Any]:
    """Run a command up to the part's limit. Raises OSError."""
    environment, status = os.environ | {"PYTHONUNBUFFERED": "1"}, "ended"
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if part.layout is not None:
        environment["VLLM_KV_CACHE_LAYOUT"] = part.layout
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=stream,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            status = f"ended at its limit of {part.limit_s:g} s"
        finally:  # what it has started ends with it, whatever happens here
            end_session(process)
    return {"status": status, "exit": process.returncode}


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, engines too."""
    with suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write(path: Path, found: dict[str, Any]) -> None:
    """Replace the file as a whole: the machine may be taken away at any moment."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def go_through(parts: Sequence[Part], out: Path, place: str | None, *, cpu: bool) -> None:
    """Run parts one after the other, and write what is known after each."""
    found: dict[str, Any] = {}
    if out.exists():
        found = json.loads(out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="vua-first-", dir=place) as directory:
        for part in parts:
            one = run(part, directory, cpu=cpu)
            found[f"{part.step} {part.name}"] = one
            write(out, found)
            print(f"{part.step} {part.name}: {one['status']}, exit {one.get('exit')}", flush=True)


def main() -> None:
    """Do the steps asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--dir", help="a directory on the file system to measure")
    parser.add_argument("--steps", type=int, nargs="+", choices=range(1, 7), default=range(1, 7))
    parser.add_argument("--cpu", action="store_true", help="only see whether it works")
    arguments = parser.parse_args()
    steps = [part for part in PARTS if part.step in arguments.steps]
    go_through(steps, arguments.out, arguments.dir, cpu=arguments.cpu)


if __name__ == "__main__":
    main()
