"""vLLM's own offloading with a cache of VUA's below it: ``VUAOffloadingConnector``.

vLLM's OffloadingConnector does the work. This subclass tells the tier (:mod:`vua.vllm.tier`) what
vLLM's names of blocks leave out: the weights, the engine's configuration, the content of adapters
and images, the cache salt. vLLM's hash has an adapter's path, and for an image an identifier that a
client may choose. Weights and adapters are watched in the workers, as by the other connector.
"""

from __future__ import annotations

import ctypes
import math
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.cpu import gpu_worker, spec

from vua.connector.cache_spec import UncachedError, refused
from vua.connector.extras import AdapterBook, AdapterNote, Media, together
from vua.connector.log import WarnOnce, logger
from vua.connector.lookup import branches
from vua.connector.setup import code_of, joined
from vua.errors import VUAError
from vua.vllm.cache_spec import _name, _specs_of, is_causal, known_kind, stored_as
from vua.vllm.engine_identity import ENGINE, engine_identity, find_weights, pages_identity, setup_of
from vua.vllm.engine_worker import memory_of
from vua.vllm.kv_connector_v1 import RunningCode
from vua.vllm.support import (
    adapters_spill,
    check_drafts,
    check_starts,
    check_version,
    is_tested,
)
from vua.vllm.tier import ENGINES, Engine, Terms

log = logger("tier")

_PATIENCE_S: Final = 30.0
"""How long a request waits for what the workers say of its adapter."""
_FIRST_STATE: Final = 512
"""Tokens before the first state that is stored within a prompt: the engine ends a step for it."""


@dataclass
class Notes(OffloadingWorkerMetadata):
    """A worker's report of one step, with what it saw of weights and adapters."""

    changed: str = ""
    """The sign that the weights have changed."""
    adapters: dict[int, AdapterNote] = field(default_factory=dict)
    unsure: bool = False
    """Whether all bytes of the weights are being compared: the engine slept."""
    unknown: str = ""
    """Why it is not known what the weights are."""

    def aggregate(self, other: Any) -> Notes:
        both: Any = super().aggregate(other)
        return Notes(
            *(both.completed_jobs, both.transfer_stats, self.changed or other.changed),
            together(self.adapters, other.adapters),
            *(self.unsure or other.unsure, self.unknown or other.unknown),
        )


class VUAOffloadingConnector(OffloadingConnector):
    """vLLM's own connector, which tells VUA's tiers whose pages these are."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Identify the engine, and make vLLM's connector.

        Raises ConfigError for a vLLM that is too old, a model that it starts with no
        connector, or wrong settings of a tier. What cannot be identified is served without tiers.
        """
        check_version()
        check_starts(vllm_config)
        if current_platform.is_cpu():
            lend()
        self._warn_once = WarnOnce(log)
        self._terms: dict[str, tuple[Any, Terms]] = {}
        self._decided: set[str] = set()
        self._unsure_until_s = 0.0
        """Until when requests wait for what the workers say of the weights; 0: that is known."""
        self._steps, self._is_stale = 0, False
        """Steps since vLLM's own cache was emptied; whether it may hold older weights' blocks."""
        self._was_unsure, self._is_causal = False, True
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
                trusts_itself=is_tested(),
                elements=_elements(vllm_config, kv_cache_config),
                layers=vllm_config.model_config.get_total_num_hidden_layers(),
                quantised=vllm_config.model_config.quantization is not None,
            )
            self._book = AdapterBook(vllm_config.parallel_config.world_size, _PATIENCE_S)
            self._spills = adapters_spill(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        if self._memory is None:
            config = self.scheduler.config
            groups = config.kv_group_configs
            whole = [one.group_idx for one in groups if one.sliding_window_size_in_chunks is None]
            self._engine.whole = frozenset(whole)
            if config.retention_interval == 0:  # vLLM's default: windows at prompts' ends alone
                self.scheduler.config = config._replace(retention_interval=None)
            states = [one.tokens_per_chunk for one in groups if one.requires_cow_source]
            self._align = math.lcm(*states) if states else 0

    def _identify(self, vllm_config: Any, cache: Any) -> tuple[Mapping[str, object], str]:
        tables = cache.kv_cache_groups
        specs = {name: spec for one in tables for name, spec in _specs_of(one).items()}
        self._is_causal = all(map(is_causal, specs.values()))
        try:
            _check(vllm_config)
            if not self._is_causal:
                raise refused("no_prefix", "prefix-LM")
            dtypes = [spec.dtype for spec in specs.values() if hasattr(spec, "dtype")]
            dtype = (dtypes or [vllm_config.model_config.dtype])[0]
            known = engine_identity(vllm_config, dtype)
        except (VUAError, OSError) as problem:
            log.warning("VUA: this engine is served without VUA's tier: %s", problem)
            return {}, str(problem)
        self._media = Media(known.media, known.media_refused, getattr(cache, "num_blocks", 0))
        self._adapter_settings = known.adapters
        rows = build_offloading_config(vllm_config, cache)
        ranks, names = rows.parallel, [one.layer_names for one in tables]
        return {
            **known.config,
            "vua.pages": pages_identity(vllm_config, cache, names, specs),
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
        super().shutdown()
        if self._memory is not None:
            self._memory.close()

    # -- scheduler's process ------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        salt = (request.cache_salt or "").encode()
        terms = Terms(out=True, salt=salt, epoch=self._engine.epoch)
        self.scheduler._req_status[request.request_id].req_context.set_state(terms)  # noqa: SLF001
        self._terms[request.request_id] = (request, terms)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._is_causal:  # vLLM would load what its own memory has
            return 0, False
        if self._unsure_until_s:
            return (None if time.monotonic() < self._unsure_until_s else 0), False
        terms = self._terms[request.request_id][1]
        if request.request_id not in self._decided:
            try:
                if not self._decide(request, terms):
                    return None, False
            except Exception as problem:  # noqa: BLE001 - whatever breaks, requests are served
                self._leave_out(repr(problem))
            self._decided.add(request.request_id)
        terms.out |= self._is_stale and num_computed_tokens > 0
        tokens, loads = super().get_num_new_matched_tokens(request, num_computed_tokens)
        with self._guarded():
            if self._align and tokens is not None:
                ends = state_ends(request.num_prompt_tokens, self._align)
                terms.states = (*ends, self._parts(request))
                stop_at_state(request, terms.states, num_computed_tokens + tokens)
        return tokens, loads

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - whatever breaks
            self._warn_once(type(problem).__name__, f"an error in VUA: {problem!r}")

    def _parts(self, request: Any) -> int:
        status = self.scheduler._req_status[request.request_id]  # noqa: SLF001
        there, ends = (LookupResult.HIT, LookupResult.HIT_PENDING), []
        lookup = partial(self.scheduler.manager.lookup, req_context=status.req_context)
        groups = zip(self.scheduler.config.kv_group_configs, status.group_states, strict=True)
        for group, state in groups:
            if group.group_idx in self._engine.whole:
                found = takewhile(lambda key: lookup(key) in there, state.offload_keys)
                ends.append(sum(1 for _ in found) * group.tokens_per_chunk)
        return min(ends, default=0) // self._align * self._align

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
        self._terms.pop(request.request_id, None)
        self._decided.discard(request.request_id)
        self._media.gone(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta: Any = super().build_connector_meta(scheduler_output)
        self._steps += bool(scheduler_output.num_scheduled_tokens)
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            known = self._terms.get(request_id)
            if known is not None and known[1].states:  # later prompts may part there
                request, terms = known
                stop_at_state(request, terms.states, request.num_computed_tokens + tokens)
        meta.vua_adapters = self._book.take_wanted()
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """Heed what the workers saw, before rows of this step are passed to tiers."""
        notes = connector_output.kv_connector_worker_meta
        if isinstance(notes, Notes):
            self._heed(notes)
            changed = self._book.learn(notes.adapters)
            for request, terms in self._terms.values() if changed else ():
                if request.lora_request and request.lora_request.lora_int_id in changed:
                    terms.out = True
        super().update_connector_output(connector_output)

    def _heed(self, notes: Notes) -> None:
        wait_s = (self._unsure_until_s or time.monotonic() + _PATIENCE_S) if notes.unsure else 0.0
        self._unsure_until_s, self._engine.unsure = wait_s, notes.unsure
        if notes.unknown and not self._engine.left:
            self._engine.left = notes.unknown
            log.warning("VUA: this engine is served without VUA's tier: %s", notes.unknown)
        if not notes.changed:
            return
        self._engine.epoch += 1
        self._is_stale |= self._steps > 1
        log.warning(
            "VUA: the weights have changed (%s): nothing that was stored is used from now on, what "
            "is stored is of an epoch of its own",
            notes.changed,
        )
        try:
            self.scheduler.reset_cache()  # the rows in the host's memory
        except AssertionError:  # of a reset that has not ended
            self._engine.left = "vLLM's memory on the host could not be emptied"

    def reset_cache(self) -> bool | None:
        self._steps, self._is_stale = 0, False
        return super().reset_cache()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Learn which code each worker runs, and so the engine's setup."""
        codes = [one.digest for one in metadata.values() if isinstance(one, RunningCode)]
        with self._guarded():
            if len(codes) == self._vllm_config.parallel_config.world_size:
                self._engine.setup = joined(setup_of(self._vllm_config), codes)

    # -- workers ------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> RunningCode | None:
        model = None if self._memory is None else self._memory.model
        with self._guarded():
            return None if model is None else RunningCode(code_of(model, ENGINE.aside).digest)
        return None

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        if self._memory is None:
            return meta
        try:
            wanted = getattr(self._connector_metadata, "vua_adapters", ())
            if meta is not None:  # rows were moved: look at all tensors
                self._memory.proof()()
            changed = self._memory.weights_changed() or ""
            unsure = self._memory.comparing
            changed = changed if unsure else self._memory.weights_changed() or ""
            unknown = self._memory.unknown or ""
            if changed and not unknown:
                self._memory.rebase()
            adapters = self._memory.adapters.news(wanted)
        except Exception as problem:  # noqa: BLE001 - whatever breaks, requests are served
            changed, unsure, adapters = "", False, {}
            unknown = f"the weights could not be checked: {problem!r}"
        if meta is None and not (changed or adapters or unknown or unsure or self._was_unsure):
            return None
        meta, self._was_unsure = meta or OffloadingWorkerMetadata(), unsure
        return Notes(meta.completed_jobs, meta.transfer_stats, changed, adapters, unsure, unknown)


def state_ends(tokens: int, align: int) -> list[int]:
    """Return where within a prompt states are stored that later ones may need: at each doubling."""
    first = -(-_FIRST_STATE // align) * align
    return [at * first for at in branches(-(-tokens // first), 1, tokens)]


def stop_at_state(request: Any, states: Iterable[int], computed: int) -> None:
    """Make the engine end a step where a state is to be stored, after ``computed`` tokens.

    vLLM does so by itself if its own prefix cache knows that another request shares the prefix (its
    scheduler's "junction"), and, except with an odd size of its blocks, at the end of the prompt.
    An engine without ``shared_prefix_boundary`` is not changed.
    """
    if getattr(request, "shared_prefix_boundary", computed + 1) <= computed:
        further = [at for at in states if at > computed]
        request.shared_prefix_boundary = min(further, default=0)


def _hash_of(vllm_config: Any) -> str:
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def _elements(vllm_config: Any, cache: Any) -> dict[int, str]:
    found = {}
    for at, table in enumerate(cache.kv_cache_groups):
        specs = list(_specs_of(table).values())
        plain = [hasattr(one, "head_size") and known_kind(one, vllm_config) for one in specs]
        if all(isinstance(kind, str) for kind in plain):
            found[at] = str(stored_as(specs[0], vllm_config))
    return found


def _check(vllm_config: Any) -> None:
    """Raise UncachedError for an engine whose pages depend on more than is counted."""
    if not _hash_of(vllm_config).startswith("sha256"):
        raise UncachedError("other hashes can collide: --prefix-caching-hash-algo sha256")
    check_drafts(vllm_config)


class _Event(torch.cpu.Event):
    def __init__(self, *, enable_timing: bool = False) -> None:
        """Take what a torch event takes."""

    def elapsed_time(self, later: _Event) -> float:
        return 0.0


class _Platform:
    """vLLM's own, as a device that offloading takes; its streams are torch's for CPUs."""

    def __getattr__(self, name: str) -> Any:
        return (lambda: True) if name == "is_cuda_alike" else getattr(current_platform, name)


class _Torch:
    """torch, with events of a CPU."""

    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Blocks(torch.Tensor):
    """An engine's blocks, as offloading expects them."""

    is_cuda = property(lambda _: True)


def _copy(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
    for one, other, nbytes in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(other, one, nbytes)


def _pin(region: Any, **_: Any) -> None:
    region.is_pinned = True


def lend() -> None:
    """Let vLLM's offloading run in this process, which is a CPU engine's."""
    if isinstance(spec.current_platform, _Platform):
        return
    moves: Any = gpu_worker.SingleDirectionOffloadingHandler

    class OnCPU(moves):
        def __init__(self, gpu_tensors: list[torch.Tensor], **given: Any) -> None:
            blocks = [one.as_subclass(_Blocks) for one in gpu_tensors]
            super().__init__(gpu_tensors=blocks, **given)

    lent: dict[str, Any] = {
        "current_platform": _Platform(),
        "torch": _Torch(),
        "_select_swap_blocks_fn": lambda *_, **__: _copy,
        "pin_mmap_region": _pin,
        "SingleDirectionOffloadingHandler": OnCPU,
    }
    vars(gpu_worker).update(lent)
    vars(spec).update(current_platform=lent["current_platform"])
