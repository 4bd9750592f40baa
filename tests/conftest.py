"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
from importlib.util import find_spec
from typing import Any

import pytest

gc.disable()  # until all is imported: to look for garbage would be a fifth of that time
# No test asks a model hub: where a network answers with errors, transformers and huggingface_hub
# would try again for minutes. Set before they are imported.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
# Several processes share the cores: their threads would wait for each other at each operator.
os.environ.setdefault("OMP_NUM_THREADS", "1")

collect_ignore_glob = [] if find_spec("vllm") else ["unit/vllm/test_[!s]*"]
"""Tests of what subclasses vLLM's classes, which they import."""

# A shell starts what runs in the background (`dev.py test &`) with Ctrl-C ignored, and what the
# tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from now on, but never look at what was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run a class's tests in one process, and so all quick ones that start vLLM's engines.

    A process that starts engines imports vLLM for them first, which takes half a minute of CPU.
    """
    from xdist.scheduler import LoadScopeScheduling

    is_quick = "not thorough" in config.option.markexpr

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if is_quick and nodeid.startswith("tests/e2e/"):
                return "engines"
            scope: str = super()._split_scope(nodeid)
            return scope

    return Scheduler(config, log)
