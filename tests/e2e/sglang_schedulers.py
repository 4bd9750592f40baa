"""Real schedulers of SGLang, one after the other in forks of one process: a server each, cheaply.

Run by SGLang's Python (`sglang_server.PYTHON`). A fork has all that SGLang starts in the process
that computes, but for the sockets to the others.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
from array import array
from collections.abc import Sequence
from typing import Any

DEADLINE_S = 120.0
SETTLED_STEPS = 20


class Engine:
    """One scheduler."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import zmq
        from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        given = ServerArgs(**arguments)
        given.resolve_once()
        given.check_server_args()
        ports = PortArgs.init_new(given)
        publish(given, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        configure_scheduler_process(given, 0)
        self._sockets = []
        for name in (ports.detokenizer_ipc_name, ports.tokenizer_ipc_name):
            with contextlib.suppress(zmq.ZMQError):  # the scheduler binds it itself
                socket = zmq.Context.instance().socket(zmq.PULL)
                socket.bind(name)
                self._sockets.append(socket)
        self.scheduler = Scheduler(given, ports)
        self._made: list[Any] = []
        make = self.scheduler._create_generation_req

        def made(*args: Any, **named: Any) -> Any:
            self._made.append(make(*args, **named))
            return self._made[-1]

        self.scheduler._create_generation_req = made

    def step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()
            time.sleep(0.002)
        scheduler.last_batch = batch

    def ask(
        self, ids: list[int], new: int, lora: str | None = None, until: int = 0, **fields: Any
    ) -> Any:
        """Generate greedily, and wait until what was computed is stored.

        ``until``: ask again until so many tokens come from the storage.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
        sampling.normalize(None)
        manager = self.scheduler.tp_worker.model_runner.lora_manager
        names = {one.lora_name: key for key, one in manager.lora_refs.items()} if manager else {}
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=f"request {len(self._made)}",
                input_text="",
                input_ids=array("q", ids),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                lora_id=names[lora] if lora else None,
                **fields,
            )
        )
        request, deadline = self._made[-1], time.monotonic() + DEADLINE_S
        while not request.finished() and time.monotonic() < deadline:
            self.step()
        self.forget()
        if request.cached_tokens_storage < until and time.monotonic() < deadline:
            return self.ask(ids, new, lora, until, **fields)
        return {"tokens": list(request.output_ids), "stored": request.cached_tokens_storage}

    def forget(self) -> None:
        """Drop what is in memory once it is stored."""
        deadline, quiet = time.monotonic() + DEADLINE_S, 0
        while quiet < SETTLED_STEPS and time.monotonic() < deadline:
            self.step()
            quiet = quiet + 1 if self.scheduler.is_fully_idle() else 0
        if not self.scheduler.flush_cache():
            raise AssertionError("the cache is not flushed")

    def update(self, directory: str) -> Any:
        """Load other weights from a directory, as `/update_weights_from_disk` does."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        asked = UpdateWeightFromDiskReqInput(model_path=directory, load_format="auto")
        done = self.scheduler.weight_updater.update_weights_from_disk(asked)
        return {"done": done.success, "message": done.message}


def answers(
    arguments: dict[str, Any],
    steps: Sequence[Any],
    change: str,
    variables: dict[str, str],
) -> list[Any]:
    """What a scheduler answers to each step, see `sglang_server.Schedulers.run`."""
    os.environ.update(variables)
    if package := variables.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        from sglang.srt.models import registry  # was imported before; it does this when it is

        registry.ModelRegistry.models.update(registry.import_model_classes(package))
    if change:
        getattr(importlib.import_module("e2e.sglang_hooks"), change)()
    engine = Engine(arguments)
    return [
        step()
        if callable(step)
        else engine.update(step["update"])
        if "update" in step
        else engine.ask(step["ask"], **{name: step[name] for name in step if name != "ask"})
        for step in steps
    ]


def begin() -> None:
    """What the process does first whose forks run schedulers."""
    import vua.sglang.storage  # noqa: F401

    gc.collect()
    gc.freeze()  # what is here now no fork looks at
