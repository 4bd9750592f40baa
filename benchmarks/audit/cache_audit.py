"""Audits any KV cache of vLLM's while an engine serves: how many of its hits are wrong, at most.

It takes the connector's place, with the connector inside. A sample of the hits is loaded as ever,
copied to the host, and then reported to vLLM as failed: vLLM computes these prompts itself, and
both are compared. What was loaded for a hit in the sample is not used.

    export PYTHONPATH=.../benchmarks/audit AUDIT_OUT=/tmp/audit AUDIT_SHARE=0.05
    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
        "kv_connector_module_path": "cache_audit", "kv_load_failure_policy": "recompute", ...}'
    python cache_audit.py report /tmp/audit

README.md says what the numbers mean. Needs vLLM 0.32 or later, and nothing of VUA.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

CONFIDENCE = 0.95
TOLERANCE = {"float32": 0.02, "bfloat16": 0.35, "float16": 0.1, "float8": 0.7}
"""How far an element may be off, as a share of its own size and the block's mean square."""


@dataclasses.dataclass
class Hit:
    """A hit in the sample: for each group of layers, blocks that were loaded, then computed."""

    name: str
    spans: list[tuple[int, int]]
    """For each group the first block that was loaded, and the one after the last."""
    tokens: int
    """Up to where the prompt has to be computed."""
    loaded: list[list[int]]
    computed: list[list[int]] = dataclasses.field(default_factory=list)
    told: bool = False


@dataclasses.dataclass
class Step:
    """A step's metadata: the connector's own, which may take no attribute, and the audit's."""

    inner: Any
    told: dict[str, Any]


def setting(name: str, default: str = "") -> str:
    """An environment variable, which the engine's processes inherit."""
    return os.environ.get(f"AUDIT_{name}", default)


def note(what: dict[str, Any]) -> None:
    """Append a line to this process's file of results."""
    folder = Path(setting("OUT", "audit-out"))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(what) + "\n")


class Scheduler:
    """Chooses hits, and knows when vLLM has computed them."""

    def __init__(self, kv_cache_config: Any) -> None:
        self.sizes = [one.kv_cache_spec.block_size for one in kv_cache_config.kv_cache_groups]
        self.share = float(setting("SHARE", "1"))
        self.random = random.Random(setting("SEED") or None)
        self.found: dict[str, int] = {}
        self.open: dict[str, Hit] = {}

    def again(self, request: str, local: int) -> None:
        """A hit is computed now; what the engine itself has of it is not."""
        hit = self.open[request]
        hit.spans = [
            (max(first, -(-local // size)), last)
            for (first, last), size in zip(hit.spans, self.sizes, strict=True)
        ]

    def allocated(self, request: str, blocks: Any, tokens: int) -> None:
        """A hit has its blocks: is it in the sample?"""
        local = self.found.pop(request, None)
        if local is None or not tokens or request in self.open:
            return
        chosen = self.random.random() < self.share
        note({"hit": f"{os.getpid()}:{request}", "chosen": chosen})
        if chosen:
            end = local + tokens
            spans = [(-(-local // size), end // size) for size in self.sizes]
            ids = [list(one) for one in blocks.get_block_ids()]
            self.open[request] = Hit(f"{os.getpid()}:{request}", spans, end, ids)

    def step(self, output: Any) -> dict[str, Any]:
        """What the workers have to know of a step: hits to load, to compare and to forget."""
        ended = {*output.finished_req_ids, *(output.preempted_req_ids or ())} & self.open.keys()
        told: dict[str, Any] = {"load": {}, "compare": {}, "forget": list(ended)}
        for request in ended:
            del self.open[request]
        cached = output.scheduled_cached_reqs
        progress = [
            *((one.req_id, one.num_computed_tokens, one.block_ids, True)
              for one in output.scheduled_new_reqs),
            *((one, done, ids, one in cached.resumed_req_ids) for one, done, ids in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)),
        ]  # fmt: skip
        for request, done, ids, whole in progress:
            if (hit := self.open.get(request)) is None:
                continue
            if whole:
                hit.computed = [[] for _ in self.sizes]
            for one, more in zip(hit.computed, ids or (), strict=False):
                one.extend(more)
            if done + output.num_scheduled_tokens[request] >= hit.tokens:
                told["compare"][request] = hit
                del self.open[request]
        for request, hit in self.open.items():
            if not hit.told:
                told["load"][request], hit.told = hit, True
        return told


class Worker:
    """Copies what was loaded, and compares it with what was computed."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.count = kv_cache_config.num_blocks
        self.groups = [one.layer_names for one in kv_cache_config.kv_cache_groups]
        self.stored_as = str(vllm_config.cache_config.cache_dtype)
        self.caches: dict[str, Any] = {}
        self.waiting: dict[str, Hit] = {}
        self.copies: dict[str, tuple[Hit, dict[tuple[int, int], list[Any]]]] = {}
        self.due: dict[str, Hit] = {}

    def block(self, layer: str, number: int) -> Any:
        """What a layer's cache holds in a block, on the host; None where it is not K and V."""
        import torch

        cache = self.caches.get(layer)
        if not isinstance(cache, torch.Tensor) or self.count not in cache.shape:
            return None  # states have other memory
        part = cache.select(list(cache.shape).index(self.count), number)
        if not part.is_floating_point():
            if not self.stored_as.startswith("fp8"):
                return None
            form = torch.float8_e5m2 if "e5m2" in self.stored_as else torch.float8_e4m3fn
            part = part.view(torch.uint8).view(form)
        return part.detach().to("cpu", copy=True)

    def blocks(self, hit: Hit, ids: list[list[int]]) -> dict[tuple[int, int], list[Any]]:
        """By group and place in the prompt: the block of each layer. Block 0 is an empty place."""
        found = {}
        for group, (first, last) in enumerate(hit.spans):
            for at in range(first, min(last, len(ids[group]), len(hit.loaded[group]))):
                number = ids[group][at]
                parts = [self.block(layer, number) for layer in self.groups[group]]
                if number and any(part is not None for part in parts):
                    found[group, at] = parts
        return found

    def loads_ended(self, results: Any) -> None:
        """Copy hits whose loads have ended; say that these have failed."""
        for request in (results.finished_recving or set()) & self.waiting.keys():
            hit = self.waiting.pop(request)
            if request in results.failed_recving:
                note({"request": hit.name, "failed": True})
                continue
            self.copies[request] = hit, self.blocks(hit, hit.loaded)
            results.failed_recving.add(request)

    def not_loaded(self, failed: set[int]) -> set[int]:
        """Forget blocks whose loads failed, for they are not served; return those of others."""
        mine: set[int] = set()
        for hit, parts in self.copies.values():
            for group, at in [key for key in parts if hit.loaded[key[0]][key[1]] in failed]:
                del parts[group, at]
            mine.update(number for ids in hit.loaded for number in ids)
        return failed - mine

    def compare(self, request: str, hit: Hit) -> None:
        """Compare a hit that was computed in this step."""
        _, copies = self.copies.pop(request, (hit, {}))
        computed = self.blocks(hit, hit.computed)
        far = {
            at: max(
                distance(one, two) / tolerance(two)
                for one, two in zip(parts, computed[at], strict=True)
                if one is not None
            )
            for at, parts in copies.items()
            if at in computed
        }
        wrong = sorted(at for at, ratio in far.items() if not ratio <= 1)
        note({
            "request": hit.name, "blocks": len(far), "wrong": wrong,
            "drawn": far[random.Random(hit.name).choice(sorted(far))] if far else 0.0,
            "far": max(far.values(), default=0.0),
        })  # fmt: skip


def tolerance(part: Any) -> float:
    """How far arithmetic may be off in a dtype, by AUDIT_TOLERANCE if that is set."""
    name = str(part.dtype).removeprefix("torch.")
    return float(setting("TOLERANCE") or TOLERANCE.get(name.split("_")[0], 0.02))


def distance(loaded: Any, computed: Any) -> float:
    """The largest difference of an element, by its size and the block's root mean square."""
    import torch

    one, two = loaded.double(), computed.double()
    if not torch.equal(torch.isfinite(one), torch.isfinite(two)):
        return math.inf
    size = two.abs() + two.square().mean().sqrt()
    return float(torch.nan_to_num((one - two).abs() / size, nan=0.0).max())


def audited(base: Any) -> Any:  # noqa: C901 - one class
    """A connector that is audited: a subclass, so that vLLM sees all that it is."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    class Audited(base):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
                raise ValueError('an audit needs "kv_load_failure_policy": "recompute"')
            super().__init__(vllm_config, role, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                self.audit_scheduler = Scheduler(kv_cache_config)
            else:
                self.audit_worker = Worker(vllm_config, kv_cache_config)

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            side = self.audit_scheduler
            if request.request_id in side.open:
                side.again(request.request_id, num_computed_tokens)
                return 0, False
            found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
            if found and later:
                side.found[request.request_id] = num_computed_tokens
            return found, later

        def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
            super().update_state_after_alloc(request, blocks, tokens)
            self.audit_scheduler.allocated(request.request_id, blocks, tokens)

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            inner = super().build_connector_meta(scheduler_output)
            return Step(inner, self.audit_scheduler.step(scheduler_output))

        def update_connector_output(self, connector_output: Any) -> None:
            mine = self.audit_scheduler.open.keys()
            failed = set(connector_output.failed_recving or ()) - mine
            shown = dataclasses.replace(connector_output, failed_recving=failed)
            super().update_connector_output(shown)

        def register_kv_caches(self, kv_caches: Any) -> None:
            self.audit_worker.caches = dict(kv_caches)
            super().register_kv_caches(kv_caches)

        def handle_preemptions(self, kv_connector_metadata: Any) -> None:
            super().handle_preemptions(kv_connector_metadata.inner)

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            super().bind_connector_metadata(connector_metadata.inner)
            side, told = self.audit_worker, connector_metadata.told
            for request in told["forget"]:
                side.waiting.pop(request, None)
                side.copies.pop(request, None)
            side.waiting.update(told["load"])
            side.due = told["compare"]

        def wait_for_save(self) -> None:
            super().wait_for_save()
            due, self.audit_worker.due = self.audit_worker.due, {}
            for request, hit in due.items():
                self.audit_worker.compare(request, hit)

        def get_transfer_results(self, finished_req_ids: Any) -> Any:
            results = super().get_transfer_results(finished_req_ids)
            self.audit_worker.loads_ended(results)
            return results

        def get_block_ids_with_load_errors(self) -> set[int]:
            return self.audit_worker.not_loaded(super().get_block_ids_with_load_errors())

    Audited.__name__ = Audited.__qualname__ = base.__name__
    return Audited


def __getattr__(name: str) -> Any:
    """The connector of a name, audited: of the module AUDIT_MODULE, or of those vLLM knows."""
    if name.startswith("__"):
        raise AttributeError(name)
    if module := setting("MODULE"):
        return audited(getattr(importlib.import_module(module), name))
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return audited(KVConnectorFactory.get_connector_class_by_name(name))


def upper_bound(wrong: int, tried: int, confidence: float = CONFIDENCE) -> float:
    """Clopper and Pearson's one-sided bound: with none wrong, about 3 / tried."""
    if wrong >= tried:
        return 1.0
    low, high = wrong / tried, 1.0
    for _ in range(60):
        p = (low + high) / 2
        logs = [math.lgamma(tried + 1) - math.lgamma(i + 1) - math.lgamma(tried - i + 1)
                + i * math.log(p) + (tried - i) * math.log1p(-p)
                for i in range(wrong + 1)]  # fmt: skip
        low, high = (p, high) if sum(map(math.exp, logs)) > 1 - confidence else (low, p)
    return high


def report(folder: Path) -> dict[str, Any]:
    """What the processes of a folder have found, each hit once, however many ranks hold it."""
    hits, failed, found = 0, set(), dict[str, list[dict[str, Any]]]()
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            one = json.loads(line)
            if "hit" in one:
                hits += 1
            elif one.get("failed"):
                failed.add(one["request"])
            elif one["blocks"]:
                found.setdefault(one["request"], []).append(one)
    ranks = list(found.values())
    wrong = sum(any(one["wrong"] for one in each) for each in ranks)
    drawn = sum(max(one["drawn"] for one in each) > 1 for each in ranks)
    right = [one["far"] for each in ranks for one in each if not one["wrong"]]
    return {
        "hits": hits,
        "audited": len(ranks),
        "failed_loads": len(failed),
        "hits_wrong": wrong,
        "hits_wrong_at_most": upper_bound(wrong, len(ranks)),
        "blocks": sum(max(one["blocks"] for one in each) for each in ranks),
        "blocks_wrong": sum(len({tuple(at) for one in each for at in one["wrong"]})
                            for each in ranks),
        "drawn_wrong": drawn,
        "blocks_wrong_at_most": upper_bound(drawn, len(ranks)),
        "farthest_of_right": max(right, default=0.0),
    }  # fmt: skip


def main() -> int:
    """Print a report; the exit status is 1 if a wrong block was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["report"])
    parser.add_argument("folder", type=Path, help="AUDIT_OUT of the engine")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = report(given.folder)
    if given.json:
        print(json.dumps(found))
    else:
        print(f"{found['hits']} hits, {found['audited']} of them computed again and compared")
        print(f"hits with a wrong block: {found['hits_wrong']}, so at most "
              f"{found['hits_wrong_at_most']:.3g} of all (95 %)")  # fmt: skip
        print(f"blocks: {found['blocks']} compared, {found['blocks_wrong']} wrong; of one drawn "
              f"from each hit {found['drawn_wrong']}, so at most "
              f"{found['blocks_wrong_at_most']:.3g} of all (95 %)")  # fmt: skip
        print(f"right ones differ by {found['farthest_of_right']:.2g} of the tolerance at most")
    return 1 if found["hits_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
