"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# No test asks a model hub: where a network answers with errors, transformers and huggingface_hub
# would try again for minutes. Set before they are imported.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

# A shell starts what runs in the background (`dev.py test &`) with Ctrl-C ignored, and what the
# tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A class's tests run in one process, and so do all quick ones that start vLLM's engines.

    A process that starts engines imports vLLM for them first, which takes half a minute of CPU.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        quick = item.get_closest_marker("thorough") is None
        engines = Path(__file__).parent / "e2e" in item.path.parents
        group = "engines" if quick and engines else item.nodeid.rpartition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
