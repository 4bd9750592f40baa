"""No hook waits for the storage: vLLM's scheduler, both halves of the connector, a dead storage.

The storage is a directory in which no call returns before it is told to. The engine's own thread
must not make such a call within a hook at all, so nothing here depends on how fast anything is.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import threading
import traceback
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import vua
from helpers import until

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

if find_spec("vllm"):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from sim.engine import Engine, Settings
    from sim.truth import VOCABULARY, Chain, make_shape
    from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1

CALLS = [
    "access",
    "chmod",
    "listdir",
    "link",
    "lstat",
    "mkdir",
    "open",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "scandir",
    "stat",
    "statvfs",
    "symlink",
    "truncate",
    "unlink",
    "utime",
]
"""Functions of `os` that ask a file system."""
CODE = (sys.prefix, sys.base_prefix, str(Path(vua.__file__).parents[2]), "/proc/", "/sys/", "/dev/")
"""Modules are imported when they are needed, and packages' versions are read."""

BASE = frozenset(
    "bind_gpu_block_pool bind_kv_cache_manager clear_connector_metadata finish_forward "  # noqa: SIM905
    "get_external_cache_hit_sources get_finished_count "
    "get_kv_connector_kv_cache_events get_loaded_kv_cache_group_ids get_mem_pool_context "
    "handle_preemptions has_connector_metadata has_pending_block_frees has_pending_push_work "
    "on_new_request register_cross_layers_kv_cache register_finished_partial_tail "
    "reset_capture_state role set_host_xfer_buffer_ops "
    "supports_divergent_local_hybrid_hits".split()
)
"""Hooks that are vLLM's own: the connector leaves them as they are. A new one is to be looked at,
and added to the connector or here."""
AT_START = frozenset(
    "build_kv_connector_stats build_prom_metrics get_required_kvcache_layout "  # noqa: SIM905
    "requires_piecewise_for_cudagraph".split()
)
"""Asked of the class, before there is an engine."""
ELSEWHERE = frozenset({"get_finished", "requires_kv_delivery"})
"""Called by the hooks around them, or by other releases."""
LAST = frozenset({"shutdown"})
"""May wait for the storage, within `timeouts.drain_s`."""


class Dead:
    """A storage in which no call returns before :attr:`go` is set."""

    def __init__(self, root: Path) -> None:
        self.root, self.go = str(root), threading.Event()
        self.engine, self.hook = threading.get_ident(), ""
        self.waiting = 0
        self.called: Counter[str] = Counter()
        self.faults: list[str] = []

    def call(self, name: str, where: object) -> None:
        path = where if isinstance(where, str) else getattr(where, "__fspath__", str)()
        if threading.get_ident() == self.engine:
            if self.hook and not path.startswith(CODE) and path not in sys.path:
                hook, self.hook = self.hook, ""
                stack = "".join(traceback.format_stack(limit=12)[:-2])
                self.hook = hook
                self.faults.append(f"{hook}: {name} {path!r}\n{stack}")
        elif path.startswith(self.root) or not path:
            self.waiting += 1
            self.go.wait()

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `os` that notes its calls."""

        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.call(name, args[0] if args and kwargs.get("dir_fd") is None else "")
            return real(*args, **kwargs)

        return call

    def watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A hook during which nothing is to be asked of a file system."""

        @wraps(real)
        def hook(*args: Any, **kwargs: Any) -> Any:
            before, self.hook = self.hook, name
            self.called[name] += 1
            try:
                return real(*args, **kwargs)
            finally:
                self.hook = before

        return hook


def hooks() -> set[str]:
    """All that vLLM may call of a connector."""
    bases = (KVConnectorBase_V1, *VUAStorageConnector_V1.__mro__[1:])
    return {
        name
        for base in bases
        if base.__module__.startswith("vllm.")
        for name, value in vars(base).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, classmethod | staticmethod | property))
    }


def own(name: str) -> bool:
    """Whether the connector has a hook of its own."""
    return any(
        name in vars(base)
        for base in VUAStorageConnector_V1.__mro__
        if base.__module__.startswith("vua.")
    )


@contextmanager
def dead(root: Path) -> Iterator[Dead]:
    """From now on no call in a directory returns; every hook is watched."""
    storage = Dead(root)
    with ExitStack() as patches:
        for name in CALLS:
            patched = storage.wrapped(name, getattr(os, name))
            patches.enter_context(mock.patch.object(os, name, patched))
        for name in sorted(hooks()):
            real = inspect.getattr_static(VUAStorageConnector_V1, name)
            if own(name) and inspect.isfunction(real) and name not in LAST:
                watched = storage.watched(name, real)
                patches.enter_context(mock.patch.object(VUAStorageConnector_V1, name, watched))
        try:
            yield storage
        finally:
            storage.go.set()


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class StallTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        home = {"XDG_CACHE_HOME": f"{folder}/kv/cache"}  # as slow as the rest
        self.enterContext(mock.patch.dict(os.environ, home))
        self.root = Path(folder) / "kv"

    def settings(self, model: str, **extra: Any) -> Settings:
        extra = {"chunk_tokens": 64, "timeouts": {"lookup_s": 0.2, "io_s": 0.5}} | extra
        shape = make_shape(model, 80)
        return Settings(self.root, shape, blocks=80, extra=extra)

    def answered(self, engine: Engine, name: str, seed: int = 1) -> int:
        """Let an engine answer a request; return how many tokens it loaded."""
        ids = [seed * 7 % VOCABULARY + 5 + at % 50 for at in range(400)]
        engine.add(name, Chain(ids, None), 4)
        while engine.busy:
            engine.step()
        engine.check_answers()
        return engine.loaded.get(name, 0)

    def loaded(self, engine: Engine) -> bool:
        """Ask once more, without vLLM's own prefix cache; whether something was loaded."""
        engine.scheduler.reset_prefix_cache()
        return self.answered(engine, f"{len(engine.wanted)}") > 0

    def test_every_hook_is_known(self) -> None:
        """A hook that vLLM has added is driven below, or known to be of no concern."""
        others = hooks() - BASE - AT_START
        self.assertEqual({True}, {own(name) for name in others}, others)
        self.assertEqual(set(), {name for name in BASE if own(name)})

    def test_no_hook_waits(self) -> None:
        """Requests are computed; no hook asks the storage; then all is loaded and stored.

        The storage dies before the namespace is open, or when the scheduler's half has opened it.
        """
        driven = set[str]()
        for number, model in enumerate(("full", "hybrid")):
            for opened in (False, True):
                with self.subTest(model, opened=opened):
                    self.root = self.root.with_name(f"kv-{model}-{opened}")
                    self.root.mkdir()
                    every = 2 if opened else 0
                    settings = self.settings(
                        model, witness_every=every, save_generated=bool(number)
                    )
                    driven |= self.driven(settings, opened=opened)
        expected = {name for name in hooks() if own(name)} - AT_START - LAST
        self.assertEqual(
            set(),
            {
                name
                for name in expected
                if inspect.isfunction(inspect.getattr_static(VUAStorageConnector_V1, name))
            }
            - driven,
        )

    def driven(self, settings: Settings, *, opened: bool) -> set[str]:
        """Let a storage die under an engine and live again; return the hooks that were called."""
        writer = Engine(settings)
        try:
            self.answered(writer, "stored")
        finally:
            writer.close()
        with dead(self.root) as storage:
            if opened:
                storage.go.set()
            with mock.patch("vua.connector.opening._START_WAIT_S", 60.0 if opened else 0.0):
                engine = Engine(settings)
            storage.go.clear()
            try:
                for at in range(3):
                    self.assertEqual(0, self.answered(engine, f"dead {at}"))
                    self.answered(engine, f"new {at}", seed=2 + at)
                    engine.scheduler.reset_prefix_cache(reset_connector=at == 1)
                self.assertGreater(storage.waiting, 0)
                storage.go.set()
                until(lambda: self.loaded(engine))
            finally:
                engine.close()
        self.assertEqual([], storage.faults[:3])
        return set(storage.called)
