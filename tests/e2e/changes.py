"""Weights and adapters that change under a running engine. Called in the engine's process."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def adapter(path: str | None) -> Any:
    """What vLLM asks for the LoRA adapter in a directory by."""
    from vllm.lora.request import LoRARequest

    return path and LoRARequest(Path(path).name, 1 + zlib.crc32(path.encode()), path)


def change_memory(llm: Any, how: str, source: str) -> None:
    """Change something.

    Args:
        llm: the engine.
        how: a name of `_WAYS`.
        source: the directory of a checkpoint or adapter with other content.
    """
    _WAYS[how](llm, Path(source))


def _apply(llm: Any, source: Path) -> None:
    llm.apply_model(lambda model: write(model, source))


def _function(llm: Any, source: Path) -> None:
    """A function for the worker, which writes past PyTorch's counters."""
    llm.collective_rpc(lambda worker: write(worker.model_runner.model, source))


def _update(llm: Any, source: Path) -> None:
    """A session of vLLM's weight updates, as trainers of reinforcement learning begin them."""
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"source": str(source)}})
    llm.finish_weight_update()


def _sleep(llm: Any, source: Path) -> None:
    """A sleep, during which a trainer may bring other weights. vLLM keeps them in place on CPUs."""
    llm.sleep(level=1)
    if source.name:
        _, _, (model,), _ = llm.llm_engine._finalizer.peek()
        write(model(), source)
    llm.wake_up()


def _behind(llm: Any, source: Path) -> None:
    """Somebody who has had a reference to the model all the time: the engine itself has one."""
    _, _, (model,), _ = llm.llm_engine._finalizer.peek()
    write(model(), source)


def write(model: Any, source: Path) -> None:
    """Write another embedding over a model's, past PyTorch's counters.

    On CPUs vLLM keeps the weights of linear layers packed, outside of all parameters.
    """
    from safetensors.torch import load_file

    name = "model.embed_tokens.weight"
    model.get_parameter(name).data.copy_(load_file(source / "model.safetensors")[name])


def _add(llm: Any, source: Path) -> None:
    """Load an adapter under the number and name that its directory has, anew if it is there."""
    request = adapter(str(source))
    request.load_inplace = True
    llm.llm_engine.add_lora(request)


_WAYS: dict[str, Callable[..., None]] = {
    "apply": _apply,
    "function": _function,
    "update": _update,
    "behind": _behind,
    "sleep": _sleep,
    "add": _add,
}
