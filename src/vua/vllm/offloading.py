"""vLLM's own offloading with a cache of VUA's below it: ``VUAOffloadingConnector``.

vLLM's OffloadingConnector does the work. This subclass tells the tier (:mod:`vua.vllm.tier`) what
vLLM's names of blocks leave out: the weights, the engine's configuration, the content of adapters
and images, the cache salt. vLLM's hash has an adapter's path, and for an image an identifier that a
client may choose. Weights and adapters are watched in the workers, as by the other connector.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import ReqContext

from vua.connector.adapters import AdapterBook, AdapterNote, together
from vua.connector.cache_spec import UncachedError
from vua.connector.log import WarnOnce, logger
from vua.connector.media import Media
from vua.connector.refusals import refused
from vua.errors import ConfigError, VUAError
from vua.vllm.cache_spec import _folder, _name, _specs_of
from vua.vllm.engine_identity import engine_identity, find_weights, pages_identity
from vua.vllm.engine_worker import memory_of
from vua.vllm.support import DRAFTS, WITHOUT_LAYERS, adapters_spill, check_starts
from vua.vllm.tier import ENGINES, Engine, Terms

log = logger("tier")

_PATIENCE_S: Final = 30.0
"""How long a request waits for what the workers say of its adapter."""


@dataclass
class Notes(OffloadingWorkerMetadata):
    """A worker's report of one step, with what it saw of weights and adapters."""

    changed: str = ""
    """What shows that the weights have changed."""
    adapters: dict[int, AdapterNote] = field(default_factory=dict)

    def aggregate(self, other: Any) -> Notes:
        """Return both together."""
        both: Any = super().aggregate(other)
        changed, adapters = self.changed or other.changed, together(self.adapters, other.adapters)
        return Notes(both.completed_jobs, both.transfer_stats, changed, adapters)


class VUAOffloadingConnector(OffloadingConnector):
    """vLLM's own connector, which tells VUA's tiers whose pages these are."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Identify the engine, and make vLLM's connector.

        Raises ConfigError for a vLLM without this interface, a model that it starts with no
        connector, or wrong settings of a tier. What cannot be identified is served without tiers.
        """
        if not hasattr(ReqContext, "get_offload_key_position"):
            raise ConfigError(
                f"vLLM {vllm.__version__} does not tell a tier where blocks stand in a prompt: "
                "VUAOffloadingConnector needs vLLM 0.32 or later; use VUAStorageConnector_V1"
            )
        check_starts(vllm_config)
        self._warn_once = WarnOnce(log)
        self._terms: dict[str, tuple[Any, Terms]] = {}
        """Of the requests that have not ended."""
        self._decided: set[str] = set()
        self._media, self._adapter_settings = Media("", str(refused("no_images")), 0), ""
        self._memory = memory_of(vllm_config) if role is KVConnectorRole.WORKER else None
        if self._memory is None:
            transfer = vllm_config.kv_transfer_config
            counted, left = self._identify(vllm_config, kv_cache_config)
            self._engine = ENGINES[transfer.engine_id] = Engine(
                counted,
                _name(str(vllm_config.model_config.model)),
                partial(find_weights, vllm_config),
                *(transfer.is_kv_consumer, transfer.is_kv_producer),
                left=left,
            )
            self._book = AdapterBook(vllm_config.parallel_config.world_size, _PATIENCE_S)
            self._spills = adapters_spill(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        if self._memory is None:
            groups = self.scheduler.config.kv_group_configs
            whole = [one.group_idx for one in groups if one.sliding_window_size_in_chunks is None]
            self._engine.whole = frozenset(whole)

    def _identify(self, vllm_config: Any, cache: Any) -> tuple[Mapping[str, object], str]:
        """Return what the pages depend on, or why that is not known."""
        try:
            _check(vllm_config)
            tables = cache.kv_cache_groups
            specs = {name: spec for one in tables for name, spec in _specs_of(one).items()}
            dtypes = [spec.dtype for spec in specs.values() if hasattr(spec, "dtype")]
            dtype = (dtypes or [vllm_config.model_config.dtype])[0]
            known = engine_identity(vllm_config, dtype, partial(_folder, vllm_config))
        except (VUAError, OSError) as problem:
            log.warning("VUA: this engine is served without VUA's tier: %s", problem)
            return {}, str(problem)
        self._media = Media(known.media, known.media_refused, getattr(cache, "num_blocks", 0))
        self._adapter_settings = known.adapters
        rows = build_offloading_config(vllm_config, cache)
        ranks, names = rows.parallel, [one.layer_names for one in tables]
        groups: Any = [
            SimpleNamespace(layout=SimpleNamespace(group=str(at)), page_nbytes=0, names=of_one)
            for at, of_one in enumerate(names)
        ]
        return {
            **known.config,
            "vua.pages": pages_identity(vllm_config, cache, groups, specs),
            "vua.rows": [
                [[one.group_id, one.tokens_per_block] for one in rows.groups],
                [rows.cache.blocks_per_chunk, rows.cache.tokens_per_hash],
                [ranks.world_size, ranks.tp_size, ranks.pp_size, ranks.pcp_size, ranks.dcp_size],
                [rows.replicated_layout, rows.canonical_layout, rows.kv_cache_layout],
            ],
            # vLLM hashes what Python pickles
            "vua.hash": [_hash_of(vllm_config), *platform.python_version_tuple()[:2]],
        }, ""

    def shutdown(self) -> None:
        """Finish what is under way."""
        super().shutdown()
        if self._memory is not None:
            self._memory.close()

    # -- scheduler's process ------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Begin with a request; what its rows depend on is decided before its first lookup."""
        super().on_new_request(request)
        terms = Terms(out=True, salt=(request.cache_salt or "").encode())
        self.scheduler._req_status[request.request_id].req_context.set_state(terms)  # noqa: SLF001
        self._terms[request.request_id] = (request, terms)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As vLLM's, once the content of the request's adapter and images is known."""
        if request.request_id not in self._decided:
            try:
                if not self._decide(request, self._terms[request.request_id][1]):
                    return None, False
            except Exception as problem:  # noqa: BLE001 - whatever breaks, requests are served
                self._leave_out(repr(problem))
            self._decided.add(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _decide(self, request: Any, terms: Terms) -> bool:
        """Set a request's terms; False: ask again in the next step."""
        extras, lora = list[tuple[int, str, bytes]](), request.lora_request
        if lora is not None:
            adapter, is_final = self._book.find(lora)
            if adapter is None:
                return is_final and self._leave_out(str(refused("adapter")))
            extras.append((0, "lora", f"{adapter.digest}:{self._adapter_settings}".encode()))
        elif self._spills:
            return self._leave_out("vLLM's CPU backend applies adapters to requests without one")
        if request.mm_features:
            if not self._media.ready(request.request_id, request.mm_features):
                return False
            names = self._media.look_at(request.mm_features)
            if isinstance(names, UncachedError):
                return self._leave_out(str(names))
            for feature, name in zip(request.mm_features, names, strict=True):
                extras.append((feature.mm_position.offset, "media", name))
        terms.extras, terms.out = tuple(extras), False
        return True

    def _leave_out(self, why: str) -> bool:
        self._warn_once(why, f"requests are neither loaded nor stored: {why}")
        return True

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request."""
        self._terms.pop(request.request_id, None)
        self._decided.discard(request.request_id)
        self._media.gone(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM's, with the adapters that the workers are asked about."""
        meta: Any = super().build_connector_meta(scheduler_output)
        meta.vua_adapters = self._book.take_wanted()
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """Heed what the workers saw, before rows of this step are passed to tiers."""
        notes = connector_output.kv_connector_worker_meta
        if isinstance(notes, Notes):
            if notes.changed and not self._engine.left:
                self._engine.left = notes.changed
                text = "VUA: the weights have changed (%s): until a restart the tier does nothing"
                log.warning(text, notes.changed)
            changed = self._book.learn(notes.adapters)
            for request, terms in self._terms.values() if changed else ():
                if request.lora_request and request.lora_request.lora_int_id in changed:
                    terms.out = True
        super().update_connector_output(connector_output)

    # -- workers ------------------------------------------------------------------------------

    def build_connector_worker_meta(self) -> Any:
        """As vLLM's, with what has changed in this worker's memory."""
        meta = super().build_connector_worker_meta()
        if self._memory is None:
            return meta
        try:
            wanted = getattr(self._connector_metadata, "vua_adapters", ())
            changed = self._memory.weights_changed() or ""
            adapters = self._memory.adapter_news(wanted)
        except Exception as problem:  # noqa: BLE001 - whatever breaks, requests are served
            changed, adapters = f"they could not be checked: {problem!r}", {}
        if meta is None and not (changed or adapters):
            return None
        meta = meta or OffloadingWorkerMetadata()
        return Notes(meta.completed_jobs, meta.transfer_stats, changed, adapters)


def _hash_of(vllm_config: Any) -> str:
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def _check(vllm_config: Any) -> None:
    """Raise UncachedError for an engine whose pages depend on more than is counted."""
    speculative = vllm_config.speculative_config
    if not _hash_of(vllm_config).startswith("sha256"):
        raise UncachedError("other hashes can collide: --prefix-caching-hash-algo sha256")
    if speculative is not None and speculative.method not in (*DRAFTS, *WITHOUT_LAYERS):
        raise refused("draft_method", f"speculative decoding by {speculative.method!r}")
