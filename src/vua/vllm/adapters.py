"""LoRA adapters by what the engine has loaded, not by what lies at their path now.

vLLM loads an adapter when a worker first needs it or is told to (``add_lora``), keeps it under a
number, replaces it (``load_inplace``), and may drop it and read its files again. A worker takes an
adapter's digest when vLLM has read it: of every tensor as loaded, with rank and scaling. The
scheduler's half learns it from the workers; until all of them have said the same, a request with
that adapter is neither loaded nor stored. What it then orders names the adapter that it means, and
a worker that holds another one refuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from vua.connector.adapters import Adapter, AdapterNote, content_digest
from vua.connector.cache_spec import UncachedError
from vua.connector.log import logger

__all__ = ["Adapters", "adapter_digest"]

log = logger("worker")

_VERSION: Final = b"vua.lora.v1"
_NAMES: Final = frozenset({"id"})
"""Attributes of a loaded adapter that do not tell what it does."""


class Adapters:
    """What one worker's LoRA manager holds. For the worker's thread, except :meth:`holds`."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401
        """Watch the manager of a model runner from now on.

        Args:
            runner: vLLM's, with LoRA enabled; no adapter is loaded yet.

        Raises:
            UncachedError: the manager is built in a way that is not known.
        """
        manager = getattr(runner, "lora_manager", None)
        load = getattr(manager, "_load_adapter", None)
        kept: Any = getattr(manager, "_adapter_manager", None)
        if not (callable(load) and callable(getattr(kept, "list_adapters", None))):
            msg = "this vLLM keeps its LoRA adapters in a way that is not known"
            raise UncachedError(msg)
        self._runner, self._kept = runner, kept
        self._load: Callable[[Any], Any] = load
        manager._load_adapter = self._take_digest  # type: ignore[union-attr]  # noqa: SLF001
        self._digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._latest: dict[int, Adapter] = {}
        """The latest known content of each number."""
        self._held: dict[int, Adapter] = {}
        self._told: dict[int, Adapter] = {}

    def _take_digest(self, lora_request: Any) -> Any:  # noqa: ANN401
        """Load an adapter as vLLM does; its errors are its own."""
        adapter = self._load(lora_request)
        try:
            self._digests[adapter] = adapter_digest(adapter)
        except (UncachedError, TypeError) as problem:
            name = getattr(lora_request, "lora_name", "")
            log.warning("VUA: requests with the adapter %.80r are not cached: %s", name, problem)
        return adapter

    def look(self) -> None:
        """See what the manager holds now: what the step that ends has computed with."""
        held = {}
        for number, adapter in self._kept.list_adapters().items():
            digest = self._digests.get(adapter)
            if digest is None:  # not loaded from files: a dummy, or put there by somebody
                continue
            latest = self._latest.get(number)
            if latest is None or latest.digest != digest:
                generation = 0 if latest is None else latest.generation + 1
                latest = self._latest[number] = Adapter(number, digest, generation)
            held[number] = latest
        self._held = held

    def holds(self, adapter: Adapter | None) -> bool:
        """Whether an adapter was there at the latest :meth:`look`. Any thread. None: none."""
        return adapter is None or self._held.get(adapter.number) == adapter

    def news(self, wanted: Iterable[Any]) -> dict[int, AdapterNote]:
        """Return what has changed since the last time, and the answer for each that is wanted.

        Behind a step's forward pass: what is wanted (vLLM's ``LoRARequest``) and not there is
        loaded, as vLLM would in the next step.
        """
        asked = []
        for request in wanted:
            number = request.lora_int_id
            asked.append(number)
            if number not in self._held:
                try:
                    self._runner.add_lora(request)
                except Exception as problem:  # noqa: BLE001 - the request will say it, too
                    log.debug("adapter %r is not loaded: %s", request.lora_name, problem)
                self.look()
        changed = [n for n, adapter in self._held.items() if self._told.get(n) != adapter]
        gone = self._told.keys() - self._held.keys()
        self._told = dict(self._held)
        return {n: AdapterNote(self._held.get(n), 1) for n in {*changed, *gone, *asked}}


def adapter_digest(adapter: Any) -> str:  # noqa: ANN401
    """Return 64 hex digits that stand for a loaded adapter (vLLM's ``LoRAModel``).

    Covers every attribute but its number, and all bytes of all tensors; so nothing that a
    release adds is forgotten. The engine's settings for adapters count beside it, see
    `engine_identity`. Must be called before vLLM packs the adapter, which scales tensors in
    place.

    Raises:
        UncachedError: it has an attribute of a kind that has no lasting bytes.
    """
    return content_digest(adapter, _VERSION, _attributes)


def _attributes(value: Any) -> Mapping[str, Any] | None:  # noqa: ANN401
    """Return what vLLM's own objects hold; None for others."""
    if not type(value).__module__.startswith("vllm.lora."):
        return None
    return {name: item for name, item in vars(value).items() if name not in _NAMES}
