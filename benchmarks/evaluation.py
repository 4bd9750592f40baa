"""What a paper would ask for, on this machine: sweeps, ablations, accuracy, with intervals.

    python benchmarks/evaluation.py sweep ablations accuracy [--quick] --json FILE
    python benchmarks/evaluation.py page --json docs/measurements/evaluation.json

vLLM on the CPU. Times are ratios within a round: the same engine serves the same prompts with its
connector taken away. Shown are medians with intervals of 95 % by bootstrap over the rounds.

sweep: hits of 0 to 100 % of a prompt, with 1 to 16 users at once; and what a miss costs: lookups
    alone, and with storing.
ablations: chunks of other sizes, the load policy that chooses, and checksums taken away by a patch
    of this program, after which a flipped bit is served: the control.
accuracy: SmolLM2 answers questions about documents whose K and V are computed, or loaded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import mlperf
from engines import CHUNK, Engine, expect, expect_tokens
from small_models import ENGINE_ENVIRONMENT, make_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "evaluation.md"
REGION = re.compile(r"<!-- evaluation: (\w+) -->\n.*?<!-- /evaluation -->", re.DOTALL)
NOT_RUN = "Not run yet: times need a machine that does nothing else."
SOURCES = ("own", "vua", "computed")
"""Of a prompt's tokens, in figures by `benchmarks/agentx.py`."""
SHARES, USERS = (0.0, 0.25, 0.5, 0.75, 1.0), (1, 4, 16)
VOCABULARY = 4096
TAIL = 16
"""Tokens after the last whole chunk."""
RESAMPLES, SEED = 2000, 11
SMALL = {"hidden_size": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 64}
NAMES = "Ada Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Marta Nils Olga Paul"
PLACES = "Lisbon Oslo Vienna Cairo Lima Tokyo Dublin Prague Athens Rome Madrid Paris Berlin Delhi"


def interval(values: Sequence[float], of: Callable[[Any], Any] = np.median) -> dict[str, float]:
    """A figure of the values, and where 95 % of resamples have it."""
    chance = np.random.default_rng(SEED)
    drawn = chance.choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.percentile([of(one) for one in drawn], [2.5, 97.5])
    return {"value": float(of(np.asarray(values))), "low": float(low), "high": float(high),
            "n": len(values)}  # fmt: skip


@contextmanager
def engine_of(place: Path, *, users: int, tokens: int, **extra: Any) -> Iterator[Engine]:
    """An engine with a small model and an empty cache."""
    model = make_model(place / "model", vocab_size=VOCABULARY, initializer_range=0.06, **SMALL)
    root = Path(tempfile.mkdtemp(dir=place))
    cache_mib = 64 + (users + 1) * (tokens + 256) * 32 // 1024  # 32 KiB a token
    limit = max(2048, tokens + 256)
    with closing(Engine("VUA", model, root, max_model_len=limit, cache_mib=cache_mib, **extra)) as (
        engine
    ):
        engine.wait_until_ready()
        yield engine


def compared(
    engine: Engine, chance: random.Random, users: int, tokens: int, share: float, mode: str = "all",
    chunk: int = CHUNK,
) -> dict[str, float]:  # fmt: skip
    """One round: prompts of which a share is stored, served with VUA and without."""
    kept = int(tokens * share) // chunk * chunk
    prompts = [chance.choices(range(10, VOCABULARY), k=tokens + TAIL) for _ in range(users)]
    if kept:
        stored = engine.stored()
        engine.ask([prompt[: kept + 1] for prompt in prompts], forget=True)
        engine.wait_until_stored(stored + users * kept // chunk)
    found = {}
    for way in chance.sample(["alone", mode], 2):
        found[way] = engine.ask(prompts, way, forget=True)
    expect_tokens(f"{users} users, {share:.0%} stored", found["alone"], found[mode])
    return {
        "ratio": found[mode]["seconds"] / found["alone"]["seconds"],
        "alone_s": found["alone"]["seconds"],
        "cached": sum(found[mode]["cached"]) / users,
    }


def row(rounds: list[dict[str, float]], **what: Any) -> dict[str, Any]:
    """A row of a table."""
    return {
        **what,
        "ratio": interval([one["ratio"] for one in rounds]),
        "alone_s": float(np.median([one["alone_s"] for one in rounds])),
        "cached": rounds[-1]["cached"],
    }


def sweep(place: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Hits of 0 to 100 %, by users; and what a miss costs."""
    chance, rows = random.Random(SEED), []
    users = USERS if not given.quick else (1, 4)
    with engine_of(place, users=max(users), tokens=given.tokens) as engine:
        for many in users:
            for share in SHARES if not given.quick else (0.0, 0.5, 1.0):
                for mode in ("lookups", "all") if not share else ("all",):
                    rounds = [compared(engine, chance, many, given.tokens, share, mode)
                              for _ in range(given.rounds)]  # fmt: skip
                    what = {"users": many, "stored": share, "does": mode}
                    rows.append(row(rounds, **what))
                    print(rows[-1], flush=True)
    return rows


class NoHash:
    """Stands for xxhash where VUA verifies: every checksum is the same number."""

    NUMBER = os.sysconf("SC_PAGESIZE")

    def xxh3_64(self, *_: Any) -> NoHash:
        """A hash that hashes nothing."""
        return self

    def update(self, _: Any) -> None:
        """Ignore what is to be hashed."""

    def digest(self) -> bytes:
        """The number."""
        return self.NUMBER.to_bytes(8, "big")

    def hexdigest(self) -> str:
        """The number."""
        return self.digest().hex()

    def intdigest(self) -> int:
        """The number."""
        return self.NUMBER

    def xxh3_64_hexdigest(self, _: Any) -> str:
        """The number."""
        return self.hexdigest()

    def xxh3_64_digest(self, _: Any) -> bytes:
        """The number."""
        return self.digest()

    def xxh3_64_intdigest(self, _: Any) -> int:
        """The number."""
        return self.NUMBER


@contextmanager
def unverified() -> Iterator[None]:
    """Takes checksums away from engines that start here: writing and reading, in C and Python.

    The C code calls a function of libc that returns one number in the place of XXH3's.
    """
    constant = ctypes.cast(ctypes.CDLL(None).getpagesize, ctypes.c_void_p).value
    with ExitStack() as stack:
        for name, value in (("vua.native.transfer.xxh3", (constant,) * 3),
                            ("vua.format.entry.xxhash", NoHash()),
                            ("vua.native.fallback.xxhash", NoHash())):  # fmt: skip
            stack.enter_context(mock.patch(name, value))
        yield


def flipped_is_loaded(engine: Engine, chance: random.Random, tokens: int) -> int:
    """How many tokens are loaded from files in each of which a bit of K or V was flipped."""
    prompt = chance.choices(range(10, VOCABULARY), k=tokens + TAIL)
    before = engine.stored()
    known = set(engine.files())
    engine.ask([prompt], forget=True)
    engine.wait_until_stored(before + tokens // CHUNK)
    for path in set(engine.files()) - known:
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    return int(engine.ask([prompt], forget=True)["cached"][0])


def ablations(place: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One part taken away or changed; all of a prompt is stored, four users."""
    arms: dict[str, dict[str, Any]] = {
        "as it is": {},
        "no verification": {},
        "chunks of 32": {"chunk_tokens": 32},
        "chunks of 256": {"chunk_tokens": 256},
        "load_policy faster": {"load_policy": "faster"},
    }
    rows, users = [], 4
    for name, extra in arms.items():
        chance = random.Random(SEED)
        with ExitStack() as stack:
            if name == "no verification":
                stack.enter_context(unverified())
            engine = stack.enter_context(
                engine_of(place, users=users, tokens=given.tokens, **extra)
            )
            chunk = extra.get("chunk_tokens", CHUNK)
            rounds = [compared(engine, chance, users, given.tokens, 1.0, chunk=chunk)
                      for _ in range(given.rounds)]  # fmt: skip
            rows.append(row(rounds, arm=name))
            if chunk == CHUNK:
                rows[-1]["loaded_though_flipped"] = flipped_is_loaded(engine, chance, given.tokens)
            print(rows[-1], flush=True)
    expect("a flipped bit is loaded, as it is", 0, rows[0]["loaded_though_flipped"])
    return rows


def documents(chance: random.Random, count: int, facts: int) -> list[tuple[str, str, str]]:
    """Documents of facts, each with a question about one, and its answer."""
    found = []
    for _ in range(count):
        names, lines = NAMES.split(), []
        homes = {name: chance.choice(PLACES.split()) for name in names}
        for at in range(facts):
            name = names[at % len(names)]
            lines.append(f"{name} lives in {homes[name]}.")
        text = "Read these notes.\n" + "\n".join(lines) + "\n\n"
        found += [
            (text, f"Question: Where does {name} live?\nAnswer: {name} lives in", homes[name])
            for name in chance.sample(names, 5)
        ]
    return found


def accuracy(place: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The share of right answers with K and V computed, and loaded."""
    from transformers import AutoTokenizer

    from real_model import NAME, real_model

    model = real_model()
    words = AutoTokenizer.from_pretrained(model)
    items = documents(random.Random(SEED), 3 if given.quick else 20, 64)
    prompts = [words(text + question)["input_ids"] for text, question, _ in items]
    texts = [words(text)["input_ids"] for text in dict.fromkeys(one for one, _, _ in items)]
    root = Path(tempfile.mkdtemp(dir=place))
    engine = Engine(NAME, model, root, max_model_len=2048, cache_mib=512, dtype="bfloat16")
    with closing(engine):
        engine.wait_until_ready()
        engine.ask(texts, forget=True)
        engine.wait_until_stored(sum(len(text) // CHUNK for text in texts))
        said = {way: engine.ask(prompts, way, forget=True) for way in ("alone", "all")}
    right = {
        way: [float(words.decode(tokens).strip().startswith(answer))
              for tokens, (_, _, answer) in zip(one["tokens"], items, strict=True)]
        for way, one in said.items()
    }  # fmt: skip
    differ = [one != two for one, two in zip(said["alone"]["tokens"], said["all"]["tokens"],
                                             strict=True)]  # fmt: skip
    change = [two - one for one, two in zip(right["alone"], right["all"], strict=True)]
    found = {
        "model": NAME, "dtype": "bfloat16", "questions": len(items),
        "prompt_tokens": int(np.median([len(one) for one in prompts])),
        "loaded_tokens": int(np.median(said["all"]["cached"])),
        "computed": interval(right["alone"], np.mean), "loaded": interval(right["all"], np.mean),
        "change": interval(change, np.mean), "answers_that_differ": sum(differ),
    }  # fmt: skip
    print(found, flush=True)
    expect("questions that load nothing", 0, said["all"]["cached"].count(0))
    return found


PARTS: dict[str, Callable[[Path, argparse.Namespace], Any]] = {
    "sweep": sweep,
    "ablations": ablations,
    "accuracy": accuracy,
}


def shown(one: dict[str, float], form: str = ".2f") -> str:
    """A figure with its interval."""
    return f"{one['value']:{form}} ({one['low']:{form}} to {one['high']:{form}})"


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The page's tables, by name, from the figures in a file."""
    lines = ["| users | stored | with VUA over vLLM alone | vLLM alone, s |", "|--:|--:|--:|--:|"]
    for one in found.get("sweep", {}).get("rows", []):
        if one["stored"] not in {0, 0.5, 1}:  # the file has the others
            continue
        share = "0%, lookups alone" if one["does"] == "lookups" else f"{one['stored']:.0%}"
        lines.append(f"| {one['users']} | {share} | {shown(one['ratio'])} | {one['alone_s']:.2f} |")
    made = {"sweep": "\n".join(lines)}
    lines = ["| changed | over vLLM alone | tokens loaded of flipped files |", "|---|--:|--:|"]
    for one in found.get("ablations", {}).get("rows", []):
        flipped = one.get("loaded_though_flipped", "")
        lines.append(f"| {one['arm']} | {shown(one['ratio'])} | {flipped} |")
    made["ablations"] = "\n".join(lines)
    if one := found.get("accuracy", {}).get("rows"):
        made["accuracy"] = (
            f"| {one['model']}, {one['questions']} questions | |\n|---|--:|\n"
            f"| right, computed | {shown(one['computed'])} |\n"
            f"| right, loaded | {shown(one['loaded'])} |\n"
            f"| difference, paired | {shown(one['change'])} |\n"
            f"| answers whose tokens differ | {one['answers_that_differ']} |\n"
            f"| tokens of a prompt, of these loaded (medians) | {one['prompt_tokens']}, "
            f"{one['loaded_tokens']} |"
        )
    if rows := found.get("audit"):
        lines = ["| cache | fault | hits, audited | wrong | hits wrong, at most (95 %) |",
                 "|---|---|--:|--:|--:|"]  # fmt: skip
        lines += [f"| {one['cache']} | {one['fault']} | {one['hits']}, {one['audited']} | "
                  f"{one['hits_wrong']} | "
                  + (f"{one['hits_wrong_at_most']:.2f} |" if one["audited"] else "|")
                  for one in rows]  # fmt: skip
        made["audit"] = "\n".join(lines)
    if "mlperf" in found:
        ran = found["mlperf"]
        made["mlperf"] = (
            f"{mlperf.table(ran['rounds'])}\n\n{ran['date']}, {ran['cpus']} CPUs "
            f"({ran['machine']}), {len(ran['rounds'])} rounds of `{ran['arguments']}`."
        )
    made["agentx"] = agentx(found["agentx"]) if "agentx" in found else NOT_RUN
    for name in PARTS:
        ran = found.get(name)
        made[name] = (
            f"{made[name]}\n\n{ran['date']}, {ran['cpus']} CPUs ({ran['machine']}), load average "
            f"{ran['load']}, vLLM {ran['vllm']}"
            + (
                f", {ran['rounds']} rounds of {ran['tokens']} tokens."
                if name != "accuracy"
                else "."
            )
            if ran
            else NOT_RUN
        )
    return made


def agentx(ran: dict[str, Any]) -> str:
    """The table of what `benchmarks/agentx.py` found."""
    heads = ("run", "requests, failed", "tokens of prompts", "vLLM's own cache", "VUA", "computed",
             "saved, s", "MB written", "MB per s, so far", "first token, over alone")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    written = saved = 0.0
    for one in ran["rows"]:
        tokens = " | ".join(f"{one[name]:,}" for name in ("prompt_tokens", *SOURCES))
        written, saved = written + one["written_nbytes"] / 1e6, saved + (one["saved_s"] or 0.0)
        lines.append(
            f"| {one['run']} | {one['requests']}, {one['failed']} | {tokens} | "
            + ("" if one["saved_s"] is None else f"{one['saved_s']:.1f}")
            + f" | {one['written_nbytes'] / 1e6:.0f} | "
            + (f"{written / saved:.1f} | " if saved > 0 else "| ")
            + f"{one['ttft_ms'] / ran['rows'][0]['ttft_ms']:.2f} |"
        )
    return "\n".join(lines) + (
        f"\n\n{ran['date']}, {ran['cpus']} CPUs ({ran['machine']}), load average {ran['load']}, "
        f"vLLM {ran['vllm']}, aiperf {ran['aiperf']}, {ran['model']}; {', '.join(ran['traces'])}, "
        f"divided by {ran['divide']}; vLLM itself keeps {ran['cache_tokens']:,} tokens."
    )


def page(found: dict[str, Any]) -> str:
    """The page, with the tables that figures give."""
    made = tables(found)
    return REGION.sub(
        lambda one: f"<!-- evaluation: {one[1]} -->\n{made[one[1]]}\n<!-- /evaluation -->",
        PAGE.read_text(encoding="utf-8"),
    )


def main() -> int:
    """Run parts, and keep what they found in a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "page"])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dir", type=Path, help="work there: on the file system to measure")
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tokens", type=int)
    given = parser.parse_args()
    os.environ.update(ENGINE_ENVIRONMENT)
    given.rounds = given.rounds or (2 if given.quick else 15)
    given.tokens = given.tokens or (256 if given.quick else 2048)
    found = json.loads(given.json.read_text("utf-8")) if given.json.exists() else {}
    for part in given.parts:
        if part == "page":
            PAGE.write_text(page(found), encoding="utf-8")
            continue
        load = round(os.getloadavg()[0], 1)
        with tempfile.TemporaryDirectory(prefix="vua-evaluation-", dir=given.dir) as place:
            rows = PARTS[part](Path(place), given)
        found[part] = {
            "date": datetime.now(timezone.utc).date().isoformat(), "rounds": given.rounds,
            "tokens": given.tokens, "load": load, "cpus": os.cpu_count(),
            "machine": platform.machine(), "vllm": version("vllm"), "vua": version("vua"),
            "rows": rows,
        }  # fmt: skip
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
