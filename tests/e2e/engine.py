"""Runs vLLM engines for the tests: `python -m e2e.engine`, one JSON job per line on stdin.

A job is a list of phases, each an engine with what it is to do, or a program. Every job runs in a
process of its own, forked from this one before any engine exists here: a fresh process without the
ten seconds that importing vLLM takes. Answers are lines on stdout that start with `MARK`; what vLLM
prints goes into the answer's "log". Ends when stdin does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from e2e.checkpoints import make_llava, picture, stand_in_for_torchvision
from e2e.trouble import adapter, change_memory, snapshots, trouble, weight_transfer
from small_models import ENGINE_ENVIRONMENT
from vua.capacity import reclaim
from vua.connector import opening

MARK = "VUA-ANSWER "
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


def main() -> None:
    """Answer jobs until there are no more."""
    prepare()
    stand_in_for_torchvision()
    opening._START_WAIT_S = 60.0  # type: ignore[misc] # an idle machine needs a hundredth of it
    reclaim._WAIT_S = 60.0  # type: ignore[misc] # likewise
    tell({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        if "serve" in job:
            tell({"pid": start_server(job["serve"], Path(job["log"]), job["timeout_s"])})
        elif "end" in job:
            tell({"end": wait_for(job["end"], job["timeout_s"])})
        else:
            tell(in_process_of_its_own(job))


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


def start_server(arguments: list[str], log: Path, timeout_s: float) -> int:
    """Start `vua-vllm serve`, whose processes are forks and need not import vLLM; return its pid.

    It lives until it is told to end, which another job waits for, or until this process is dead.
    """
    for module in SERVER_MODULES:
        importlib.import_module(module)
    child = os.fork()
    if child == 0:
        become_worker(log, timeout_s)
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


def tell(answer: Any) -> None:
    """Write one answer."""
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def in_process_of_its_own(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a forked process; its processes are gone when this returns."""
    with tempfile.TemporaryDirectory(prefix="vua-engine-") as folder:
        answer, log = Path(folder, "answer"), Path(folder, "log")
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                become_worker(log, job["timeout_s"])
                if "program" in job:
                    done: dict[str, Any] = {"status": run_program(job["program"])}
                else:
                    done = {"phases": [one_phase(phase) for phase in job["phases"]]}
                answer.write_text(json.dumps({"pid": os.getpid(), **done}))
            os._exit(0)
        status = wait_for(child, job["timeout_s"])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        text = log.read_text(errors="replace") if log.exists() else ""
        if not answer.exists():
            return {"problem": f"no answer, {status}", "log": text}
        return {**json.loads(answer.read_text()), "log": text}


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


def become_worker(log: Path, timeout_s: float) -> None:
    """Prepare a forked process: output into a file, no input, dead when its parent is."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.dump_traceback_later(timeout_s * 0.9)


def wait_for(child: int, timeout_s: float) -> str:
    """Wait for a process to end; say how it did."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return f"exit status {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"still busy after {timeout_s} s"


def one_phase(phase: dict[str, Any]) -> dict[str, Any]:
    """Do what one phase asks for: mostly to run an engine."""
    if "make" in phase:
        make_model(Path(phase["make"]["at"]), phase["make"])
        return {}
    if "llava" in phase:
        make_llava(Path(phase["llava"].pop("at")), **phase["llava"])
        return {}
    with mock.patch.dict(os.environ, phase.get("environment", {})):
        return with_engine(phase)


def with_engine(phase: dict[str, Any]) -> dict[str, Any]:
    """Start the engine itself, give it its steps, shut it down."""
    from vllm import LLM
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    settings = dict(phase["engine"])
    if phase.get("transfer"):
        settings["kv_transfer_config"] = phase["transfer"]
    if "kv_events_config" in settings:
        from vllm.config.kv_events import KVEventsConfig

        settings["kv_events_config"] = KVEventsConfig(**settings["kv_events_config"])
    if "ec_transfer_config" in settings:
        from vllm.config import ECTransferConfig

        settings["ec_transfer_config"] = ECTransferConfig(**settings["ec_transfer_config"])
    if "weight_transfer_config" in settings:
        settings["weight_transfer_config"] = weight_transfer(settings["weight_transfer_config"])
    counts: dict[str, int] = {}
    troubled = trouble(phase.get("trouble", {}))
    blocks: list[dict[str, list[str]]] | None = [] if phase.get("snapshots") else None
    with troubled, forked_workers(), counted(counts), snapshots(blocks):
        try:
            llm = LLM(**settings)
        except Exception as problem:  # noqa: BLE001 - the test decides what it should have been
            return {"problem": f"{type(problem).__name__}: {problem}"}
        counts.clear()  # the connector tries itself out
        batches: list[list[dict[str, Any]]] = []
        side = get_kv_transfer_group() if has_kv_transfer_group() else None
        try:
            for step in phase["steps"]:
                batches += in_a_copy(llm, step["fork"]) if "fork" in step else act(llm, step)
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
    return {"batches": batches, "counts": counts, "blocks": blocks}


def act(llm: Any, step: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Do one step: a batch of prompts, or something that gives no outputs."""
    from vllm import SamplingParams

    if step.get("reset"):
        wait_for_saves()
        if not llm.reset_prefix_cache(reset_connector=step["reset"] == "all"):
            raise RuntimeError("the prefix cache could not be reset")
        return []
    if "change" in step:
        wait_for_saves()
        change_memory(llm, **step["change"])
        return []
    if step.get("settle"):
        settle(llm)
        return []
    if "exchange" in step or "call" in step:
        change(llm, step)
        return []
    prompts = described_prompts(step)
    hinted = with_hints(llm, step["hints"]) if step["hints"] else nullcontext()
    greedy = SamplingParams(max_tokens=step["max_tokens"], temperature=0, ignore_eos=True)
    if step["pooled"]:
        given = llm.embed(prompts, use_tqdm=False)
    else:
        adapters = [adapter(path) for path in step["loras"]] if any(step["loras"]) else None
        with hinted:
            given = llm.generate(prompts, greedy, use_tqdm=False, lora_request=adapters)
    return [[described_output(done) for done in given]]


def described_output(done: Any) -> dict[str, Any]:
    if hasattr(done.outputs, "embedding"):
        return {"tokens": done.outputs.embedding, "cached": 0, "finish": ""}
    (output,) = done.outputs
    return {
        "tokens": list(output.token_ids),
        "cached": done.num_cached_tokens,
        "finish": output.finish_reason,
    }


def with_hints(llm: Any, actions: list[dict[str, Any]]) -> Any:
    """Give all requests meanwhile an orchestrator's hints, as a router does."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    made = [KvHintAction(str(n), action_version="1.0", **one) for n, one in enumerate(actions)]
    envelope = KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=made)
    add = partial(llm.llm_engine.add_request, kv_hints=envelope)
    return mock.patch.object(llm.llm_engine, "add_request", add)


def in_a_copy(llm: Any, step: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Do one step in a forked copy of this process, whatever its threads are at."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException), os.fdopen(into, "w") as answer:
            try:
                json.dump(act(llm, step), answer)
            except BaseException:
                traceback.print_exc()
                raise
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    batches: list[list[dict[str, Any]]] = json.loads(text)
    return batches


def change(llm: Any, step: dict[str, Any]) -> None:
    """Replace files behind the engine's back, or have its workers do something."""
    wait_for_saves()
    if "exchange" in step:
        shutil.copytree(step["exchange"]["source"], step["exchange"]["target"], dirs_exist_ok=True)
    else:
        llm.collective_rpc(step["call"], kwargs=step["arguments"])


def described_prompts(step: dict[str, Any]) -> list[dict[str, Any]]:
    """A batch's prompts in vLLM's form."""
    prompts: list[dict[str, Any]] = [
        {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})
        for ids, salt in zip(step["prompts"], step["salts"], strict=True)
    ]
    for prompt, seed in zip(prompts, step["embeddings"], strict=False):
        if seed is not None:
            prompt["prompt_embeds"] = rows(len(prompt.pop("prompt_token_ids")), *seed)
    for prompt, seed, name in zip(prompts, step["images"], step["image_names"], strict=True):
        if seed is not None:
            prompt["multi_modal_data"] = {"image": picture(seed)}
            prompt["mm_processor_kwargs"] = step["processor"]
        if name is not None:
            prompt["multi_modal_uuids"] = {"image": name}
    return prompts


def rows(count: int, seed: int, other_from: int = 1 << 30) -> Any:
    """Random embeddings for the small model; from a row on those of another seed."""
    import torch

    def made(seed: int) -> Any:
        chance = torch.Generator().manual_seed(seed)
        return 0.25 * torch.randn(count, 128, generator=chance)

    return torch.cat([made(seed)[:other_from], made(seed + 1000)[other_from:]])


def wait_for_saves(_worker: Any = None) -> None:
    """Wait until this process has stored what it has to: the next prompt may rely on it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return
    group, until = get_kv_transfer_group(), time.monotonic() + 60.0
    for one in getattr(group, "_connectors", [group]):  # a MultiConnector's
        worker = getattr(one, "worker", None)
        while worker is not None and worker.saves.pending and time.monotonic() < until:
            time.sleep(0.01)


def settle(llm: Any) -> None:
    """Wait until this engine has stored everything, and has published its events."""
    from vllm import SamplingParams

    from vua.vllm.tier import VUATier

    some_steps = SamplingParams(max_tokens=4, ignore_eos=True)
    llm.collective_rpc(wait_for_saves)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], some_steps, use_tqdm=False)
    for tier in [one for one in gc.get_objects() if type(one) is VUATier]:
        tier.drain_jobs()
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], some_steps, use_tqdm=False)
    if llm.llm_engine.vllm_config.kv_events_config is not None:
        time.sleep(0.2)  # the publisher's own thread


@contextmanager
def counted(counts: dict[str, int]) -> Iterator[None]:
    """Count tokens put into this process's engine's cache, and preemptions."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vua.connector.group_transfer import CachedLoads
    from vua.device.cpu_pages import PagedKV
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


def make_model(target: Path, what: dict[str, Any]) -> None:
    """Make a checkpoint of an architecture that `small_models` does not know."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(what["model_type"], **what["config"])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(target)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main()
