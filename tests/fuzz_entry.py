"""Fuzzes the parser of headers: `python dev.py fuzz [SECONDS]`.

With `atheris` (libFuzzer for Python) where it is installed, which follows the parser's branches;
else with random mutations. Both start from the golden files and from the corpus of named attacks.
Stops at the first input that raises anything but CorruptEntryError, takes longer than a second, or
is accepted although it begins like no golden file; that input is written to `crash-vua`.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
import time
from pathlib import Path
from types import FunctionType, ModuleType

from scorecard.attacks import hostile_bytes, mutated
from vua.errors import CorruptEntryError
from vua.format import entry, layout, parse
from vua.format.parse import parse_entry

HERE = Path(__file__).parent
SLOW_S = 1.0
PARSERS = (entry, parse, layout)
"""Modules whose branches are followed, all of them."""


class Parser:
    """One input after the other, judged."""

    def __init__(self) -> None:
        self.runs, self.slowest_s = 0, 0.0
        self.headers = []
        for folder in ("golden", "golden_sealed_v2"):
            for path in sorted((HERE / folder).rglob("*.safetensors")):
                data = path.read_bytes()
                self.headers.append(data[: parse_entry(data).header_nbytes])

    def __call__(self, data: bytes) -> None:
        began_s, accepted = time.perf_counter(), False
        try:
            parse_entry(data)
            accepted = True
        except CorruptEntryError:
            pass
        elapsed_s = time.perf_counter() - began_s
        self.runs, self.slowest_s = self.runs + 1, max(self.slowest_s, elapsed_s)
        if accepted and not any(data.startswith(header) for header in self.headers):
            raise AssertionError("accepted")
        if elapsed_s > SLOW_S:
            raise AssertionError(f"took {elapsed_s:.1f} s")


def functions(*modules: ModuleType) -> list[FunctionType]:
    """All functions and methods that are written in the modules, each once."""
    found: dict[FunctionType, None] = {}
    for module in modules:
        classes = [one for one in vars(module).values() if isinstance(one, type)]
        for owner in (module, *classes):
            for value in vars(owner).values():
                function = inspect.unwrap(getattr(value, "__func__", value))
                if not isinstance(function, FunctionType):
                    continue
                if function.__code__.co_filename == module.__file__:
                    found[function] = None
    return list(found)


def fuzz_with_atheris(parser: Parser, seconds: float) -> None:
    """Let libFuzzer look for inputs that reach new code."""
    import atheris

    corpus = HERE.parent / ".fuzz-corpus"
    corpus.mkdir(exist_ok=True)
    seeds = [
        *parser.headers,
        *hostile_bytes(parser.headers[0]).values(),
    ]
    for number, data in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(data)
    for function in functions(*PARSERS):  # all others would only be slower
        atheris.instrument_func(function)
    words = [sys.argv[0], f"-max_total_time={int(seconds)}", "-max_len=16384", str(corpus)]
    atheris.Setup(words, parser)
    atheris.Fuzz()


def fuzz_at_random(parser: Parser, seconds: float, seed: int) -> None:
    """Mutate what there is, and what came of that."""
    source, stop_s = random.Random(seed), time.monotonic() + seconds
    kept = parser.headers
    pool = [*kept, *hostile_bytes(parser.headers[0]).values()]
    for data in pool:
        parser(data)
    while time.monotonic() < stop_s:
        data = mutated(source.choice(pool) or b"0", source)[: 1 << 18]
        try:
            parser(data)
        except BaseException:
            Path("crash-vua").write_bytes(data)
            raise
        if source.random() < 0.01:
            pool[source.randrange(len(kept), len(pool))] = data


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("seconds", type=float, nargs="?", default=60.0)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    parser = Parser()
    try:
        fuzz_with_atheris(parser, given.seconds)
    except ImportError:
        print(f"atheris is not installed: random mutations, seed {given.seed}")
        fuzz_at_random(parser, given.seconds, given.seed)
    print(f"{parser.runs} inputs, the slowest took {parser.slowest_s * 1000:.1f} ms; no fault")


if __name__ == "__main__":
    main()
