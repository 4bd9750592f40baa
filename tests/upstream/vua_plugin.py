"""A pytest plugin that puts VUA in the place of vLLM's ExampleConnector, and says so.

vLLM's tests wrap the ExampleConnector to record its calls. The wrapper takes the class from its own
module when it is made, so that is where VUA goes. It also hands its own name to the connector as a
setting, which VUA, unlike the example, would refuse.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1


@pytest.fixture(autouse=True)
def vua_in_place_of_the_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the recording wrapper wrap VUA; fail where it never did."""
    utils = importlib.import_module("tests.v1.kv_connector.unit.utils")
    made: list[Any] = []

    def make(config: Any, role: Any, kv_cache_config: Any) -> VUAStorageConnector_V1:
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra.pop("name")
        extra.setdefault("shared_storage_path", folder)
        extra.setdefault("load_policy", "always")
        extra.setdefault("witness_every", 0)
        made.append(VUAStorageConnector_V1(config, role, kv_cache_config))
        connector: VUAStorageConnector_V1 = made[-1]
        return connector

    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(utils, "ExampleConnector", make)
        yield
    assert made, "the test made no connector: vLLM's wrapper has changed"
