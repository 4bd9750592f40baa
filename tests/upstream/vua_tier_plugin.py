"""A pytest plugin that puts VUA's tier in the place of vLLM's file system tier, and says so.

vLLM's tests of that tier make it by themselves, with keys that have no place in a prompt, without a
connector that knows a model, and look at files by their key. :class:`InPlace` gives them that.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from vua.format.keys import extras_parent
from vua.vllm.tier import ENGINES, Engine, Terms, VUATier
from vua.weights import Weights

TOKENS = 16
MADE: list[Any] = []


class InPlace(VUATier):
    """VUA's tier, made and asked as the other one."""

    def __init__(self, offloading_spec: Any, root_dir: str, **given: Any) -> None:
        """Make it for a model with full attention in one cache group."""
        MADE.append(self)
        groups = (OffloadingGroupConfig(TOKENS, ("layer",), 0),)
        config = offloading_spec.config
        named = {name: getattr(config, name) for name in config.__dataclass_fields__}
        spec = SimpleNamespace(config=SimpleNamespace(**named | {"groups": groups}))
        spec.blocks_per_chunk = 1
        self.engine = Engine(
            {"model_type": "llama"}, "m", lambda _: Weights("w", (), 0, 0, 0.0, 0.0)
        )
        self.engine.whole, self.engine.setup = frozenset((0,)), "ab" * 32
        ENGINES[config.engine_id] = self.engine
        self.root = Path(root_dir) / "kv"
        names = ("primary_kv_view", "tier_type", "locality", "enable_kv_events")
        kept = {name: given[name] for name in names if name in given}
        super().__init__(offloading_spec=spec, path=str(self.root), **kept)
        self.asked: list[tuple[Any, Any]] = []
        self._store_job_keys: dict[int, Any] = {}
        self.file_mapper = SimpleNamespace(get_file_name=self.file_of)
        pending = SimpleNamespace(empty=self.is_waiting)
        self._lookup_manager = SimpleNamespace(_pending_results=pending, _lookup_batch=[])
        self.contexts: dict[str, Any] = {}

    def meet(self, context: Any, keys: Sequence[Any]) -> None:
        """Tell what vLLM's scheduler and the connector tell of a request."""
        for at in range(max((place_of(key) for key in keys), default=0)):
            before = make_offload_key(at.to_bytes(8, "big"), 0)
            context.set_offload_key_position(before, (at + 1) * TOKENS)
        if context.get_state(Terms) is None:
            context.set_state(Terms())
        if self.contexts.get(context.req_id) is not context:
            self.contexts[context.req_id] = context
            self.on_new_request(context)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """As the tier's."""
        self.meet(req_context, [key])
        self.asked.append((key, req_context))
        return super().lookup(key, req_context)

    def is_waiting(self) -> bool:
        """Whether an answer is still being looked up."""
        return any(super(InPlace, self).lookup(*one) is LookupResult.RETRY for one in self.asked)

    def submit_load(self, job_metadata: Any) -> None:
        """As the tier's."""
        self.meet(job_metadata.req_context, job_metadata.keys)
        super().submit_load(job_metadata)

    def submit_store(self, job_metadata: Any) -> None:
        """As the tier's."""
        self.meet(job_metadata.req_context, job_metadata.keys)
        super().submit_store(job_metadata)

    def file_of(self, key: Any) -> str:
        """Return the file of a row."""
        name = extras_parent(bytes(key), [("vllm", b"tier.v1")]).hex()
        found = [path for path in self.root.rglob("*") if name in str(path) and path.is_file()]
        return str(found[0] if found else self.root / name)


def place_of(key: Any) -> int:
    """The number of a key's row, from 1 on, by how vLLM's tests make keys."""
    return 1 + int.from_bytes(key[:-4], "big")


@pytest.fixture(autouse=True)
def vua_in_place_of_the_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the tests make VUA's tier; fail where one made none."""
    tests = importlib.import_module("tests.v1.kv_offload.tiering.test_fs_tier")
    MADE.clear()
    monkeypatch.setattr(tests, "FileSystemTierManager", InPlace)
    yield
    assert MADE, "the test made no tier: vLLM's test has changed"
