"""Weights and adapters that change under a running engine. Called in the engine's process."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def change(llm: Any, how: str, source: str, target: str | None) -> None:
    """Change something.

    Args:
        llm: the engine.
        how: a name of `_WAYS`.
        source: the directory of a checkpoint or adapter with other content.
        target: the directory whose files are replaced, for "files".
    """
    _WAYS[how](llm, Path(source), target)


def _reload(llm: Any, source: Path, _: Any) -> None:
    """The worker's own method."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(source)})


def _apply(llm: Any, source: Path, _: Any) -> None:
    """A function for the model."""
    llm.apply_model(lambda model: _write(model, source))


def _function(llm: Any, source: Path, _: Any) -> None:
    """A function for the worker, which writes past PyTorch's counters."""
    llm.collective_rpc(lambda worker: _write(worker.model_runner.model, source))


def _behind(_: Any, source: Path, __: Any) -> None:
    """Somebody who has had a reference to the model all the time."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    gc.unfreeze()  # vLLM hides what it made at start
    for found in gc.get_objects():
        if issubclass(type(found), LlamaForCausalLM):
            _write(found, source)


def _write(model: Any, source: Path) -> None:
    """Write another embedding over a model's, past PyTorch's counters.

    On CPUs vLLM keeps the weights of linear layers packed, outside of all parameters.
    """
    from safetensors.torch import load_file

    name = "model.embed_tokens.weight"
    model.get_parameter(name).data.copy_(load_file(source / "model.safetensors")[name])


def _files(_: Any, source: Path, target: str) -> None:
    """Put other files in the place of an adapter's."""
    shutil.copytree(source, target, dirs_exist_ok=True)


def _add(llm: Any, source: Path, _: Any) -> None:
    """Load an adapter under the number and name that its directory has, anew if it is there."""
    from vllm_e2e.engine import adapter

    request = adapter(str(source))
    request.load_inplace = True
    llm.llm_engine.add_lora(request)


_WAYS: dict[str, Callable[..., None]] = {
    "reload": _reload,
    "apply": _apply,
    "function": _function,
    "behind": _behind,
    "files": _files,
    "add": _add,
}
