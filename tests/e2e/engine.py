"""Runs vLLM engines for the tests, in forks of a process that has imported vLLM (`forks.Forker`).

That takes ten seconds. What the classes of `harness` name is done here.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import forks
from e2e.checkpoints import picture, stand_in_for_torchvision
from e2e.trouble import adapter, snapshots, weight_transfer
from small_models import ENGINE_ENVIRONMENT
from vua.capacity import reclaim
from vua.connector import opening

ENVIRONMENT = ENGINE_ENVIRONMENT | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
MODULES = (
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vua.vllm.kv_connector_v1",
)
"""Imported once, for all jobs."""
SERVER_MODULES = ("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vua.vllm.serve")
"""Likewise, as soon as there is one."""


def begin() -> None:
    """What the process does first whose forks run engines."""
    prepare()
    stand_in_for_torchvision()
    opening._START_WAIT_S = 60.0  # type: ignore[misc] # an idle machine needs a hundredth of it
    reclaim._WAIT_S = 60.0  # type: ignore[misc] # likewise


def prepare() -> None:
    """Import vLLM for forks of this process, and do what each engine in them would do first."""
    gc.disable()  # to look for garbage would be a quarter of the time, and there is none
    for module in MODULES:
        with suppress(ModuleNotFoundError):  # not every vLLM has each
            importlib.import_module(module)
    with suppress(ImportError, AttributeError):  # vLLM 0.28 does not look through all modules
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging_if_needed
        from vllm.model_executor.models import registry
        from vllm.platforms import current_platform
        from vllm.triton_utils import dispatcher

        current_platform.register_triton_kernel_overrides()
        dispatcher.register_kernels = lambda _: None
        registry._run_in_subprocess = lambda look: look()  # the first look at a class takes 10 s
        configure_logging_if_needed(LoggingConfig())
    gc.collect()
    gc.freeze()  # what is here now no later collection looks at...
    gc.unfreeze = lambda: None  # ...also after an engine's shutdown: 2 s for each otherwise
    gc.enable()


def start_server(arguments: list[str], log: Path) -> int:
    """Start `vua-vllm serve`, whose processes are forks and need not import vLLM; return its pid.

    It lives until it is told to end, which another job waits for, or until this process is dead.
    """
    for module in SERVER_MODULES:
        importlib.import_module(module)
    child = os.fork()
    if child == 0:
        forks.alone(log)
        try:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
            fork = multiprocessing.get_context("fork")
            with mock.patch.object(multiprocessing, "get_context", return_value=fork):
                importlib.import_module("vua.vllm.serve").main(["serve", *arguments])
        except BaseException:  # noqa: BLE001 - whoever waits for the server shows the log
            traceback.print_exc()
        finally:
            os._exit(0)
    return child


def run_program(words: list[str]) -> int:
    """Run a program, of a path and its arguments, as Python would; return its exit status."""
    sys.argv, status = words, 0
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stderr.write("" if isinstance(end.code, int) else f"{end.code or ''}\n")
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    return status


def run_phases(phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run engines one after the other."""
    return [run_phase(phase) for phase in phases]


def run_phase(phase: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, give it its steps, shut it down."""
    with mock.patch.dict(os.environ, phase["environment"]):
        return {"pid": os.getpid(), **with_engine(phase)}


def with_engine(phase: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    settings = dict(phase["engine"])
    if "weight_transfer_config" in settings:
        settings["weight_transfer_config"] = weight_transfer(settings["weight_transfer_config"])
    counts: dict[str, int] = {}
    blocks: list[dict[str, list[str]]] | None = [] if phase["snapshots"] else None
    with ExitStack() as stack, forked_workers(), counted(counts), snapshots(blocks):
        for begin_trouble in phase["trouble"]:
            stack.enter_context(begin_trouble())
        try:
            llm = LLM(**settings)
        except Exception as problem:  # noqa: BLE001 - the test decides what it should have been
            return {"problem": f"{type(problem).__name__}: {problem}"}
        counts.clear()  # the connector tries itself out
        outputs: list[tuple[Any, int, str]] = []
        side = get_kv_transfer_group() if has_kv_transfer_group() else None
        try:
            for step in phase["steps"]:
                outputs += step.act(llm)
            llm.collective_rpc(wait_for_saves)  # the end itself waits less
        except Exception:  # noqa: BLE001 - likewise
            return {"problem": traceback.format_exc()}
        finally:
            llm.llm_engine.engine_core.shutdown()
            worker = getattr(side, "worker", None)
            groups = [one for one in getattr(worker, "groups", ()) if hasattr(one, "files")]
            counts |= sum((one.store.counts for one in groups), Counter[str]())
            del llm, side, worker, groups
            gc.collect()
    return {"outputs": outputs, "counts": counts, "blocks": blocks}


def ask(llm: Any, batch: Any) -> list[tuple[Any, int, str]]:
    """Give an engine prompts; per prompt tokens or a vector, what was cached, and why it ended."""
    from vllm import SamplingParams

    prompts = described_prompts(batch)
    if batch.pooled:
        return [(one.outputs.embedding, 0, "") for one in llm.embed(prompts, use_tqdm=False)]
    greedy = SamplingParams(max_tokens=batch.max_tokens, temperature=0, ignore_eos=True)
    adapters = [adapter(path) for path in batch.loras] if any(batch.loras) else None
    with with_hints(llm, batch.hints) if batch.hints else nullcontext():
        given = llm.generate(prompts, greedy, use_tqdm=False, lora_request=adapters)
    return [
        (list(one.outputs[0].token_ids), one.num_cached_tokens, one.outputs[0].finish_reason)
        for one in given
    ]


def with_hints(llm: Any, actions: Any) -> Any:
    """Give all requests meanwhile an orchestrator's hints, as a router does."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    made = [KvHintAction(str(n), action_version="1.0", **one) for n, one in enumerate(actions)]
    envelope = KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=made)
    add = partial(llm.llm_engine.add_request, kv_hints=envelope)
    return mock.patch.object(llm.llm_engine, "add_request", add)


def in_a_copy(llm: Any, batch: Any) -> list[tuple[Any, int, str]]:
    """Do one step in a forked copy of this process, whatever its threads are at."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException), os.fdopen(into, "w") as answer:
            try:
                json.dump(ask(llm, batch), answer)
            except BaseException:
                traceback.print_exc()
                raise
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return [(tokens, cached, finish) for tokens, cached, finish in json.loads(text)]


def described_prompts(batch: Any) -> list[dict[str, Any]]:
    """A batch's prompts in vLLM's form."""
    salt = {"cache_salt": batch.salt} if batch.salt else {}
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": list(p), **salt} for p in batch.prompts]
    for prompt, seed in zip(prompts, batch.images, strict=False):
        if seed is not None:
            prompt["multi_modal_data"] = {"image": picture(seed)}
    for prompt, name in zip(prompts, batch.image_names, strict=False):
        prompt["multi_modal_uuids"] = {"image": name}
    return prompts


def wait_for_saves(_worker: Any = None) -> None:
    """Wait until this process has stored what it has to: the next prompt may rely on it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return
    group, stop_s = get_kv_transfer_group(), time.monotonic() + 60.0
    for one in getattr(group, "_connectors", [group]):  # a MultiConnector's
        worker = getattr(one, "worker", None)
        while worker is not None and worker.saves.pending and time.monotonic() < stop_s:
            time.sleep(0.01)


def settle(llm: Any) -> None:
    """Wait until this engine has stored everything."""
    from vllm import SamplingParams

    from vua.vllm.tier import VUATier

    some_steps = SamplingParams(max_tokens=4, ignore_eos=True)
    llm.collective_rpc(wait_for_saves)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], some_steps, use_tqdm=False)
    for tier in [one for one in gc.get_objects() if type(one) is VUATier]:
        tier.drain_jobs()
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], some_steps, use_tqdm=False)


@contextmanager
def counted(counts: dict[str, int]) -> Iterator[None]:
    """Count tokens put into this process's engine's cache, and preemptions."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vua.connector.group_transfer import CachedLoads
    from vua.device.paged import PagedKV
    from vua.store.store import Loader

    scatter, preempt = PagedKV.scatter_chunks, Scheduler._preempt_request
    aim, load = CachedLoads.aim, Loader.load_cached
    aims: dict[int, Any] = {}

    def add(event: str, number: int) -> None:
        counts[event] = counts.get(event, 0) + number

    def counting_scatter(self: PagedKV, ids: Any, start: int, count: int, *rest: Any) -> None:
        scatter(self, ids, start, count, *rest)
        add("tokens_loaded", count)

    def noting_aim(self: CachedLoads, part: Any, at: int, order: Any) -> Any:
        aims[id(self.loader)] = part
        return aim(self, part, at, order)

    def counting_load(self: Loader, keys: Any, *rest: Any) -> int:
        done, part = load(self, keys, *rest), aims.get(id(self))
        if done and part is not None:  # else a tier's
            stop = min(keys[done - 1].stop, part.stop)
            add("tokens_loaded", stop - max(keys[0].start, part.start))
        return done

    def counting_preempt(*args: Any, **kwargs: Any) -> None:
        preempt(*args, **kwargs)
        add("preemptions", 1)

    with (
        mock.patch.object(PagedKV, "scatter_chunks", counting_scatter),
        mock.patch.object(CachedLoads, "aim", noting_aim),
        mock.patch.object(Loader, "load_cached", counting_load),
        mock.patch.object(Scheduler, "_preempt_request", counting_preempt),
    ):
        yield


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork the workers of parallel engines: vLLM would start each anew, which takes 15 s."""
    import vllm.v1.executor.multiproc_executor as executor

    context = multiprocessing.get_context("fork")
    with mock.patch.object(executor, "get_mp_context", return_value=context):
        yield


def make_model(target: Path, model_type: str, config: dict[str, Any]) -> None:
    """Make a checkpoint of an architecture that `small_models` does not know."""
    import torch
    import transformers

    made = transformers.AutoConfig.for_model(model_type, **config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    model.save_pretrained(target)
