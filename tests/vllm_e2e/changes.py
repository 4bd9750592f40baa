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
    llm.apply_model(lambda model: _load(model, source))


def _function(llm: Any, source: Path, _: Any) -> None:
    """A function for the worker, which writes past PyTorch's counters."""
    llm.collective_rpc(lambda worker: _load(worker.model_runner.model, source))


def _behind(_: Any, source: Path, __: Any) -> None:
    """Somebody who has had a reference to the model all the time."""
    import torch
    from vllm.model_executor.models.llama import LlamaForCausalLM

    for found in gc.get_objects():
        if issubclass(type(found), LlamaForCausalLM):
            with torch.no_grad():
                _load(found, source)


def _load(model: Any, source: Path) -> None:
    """Write other weights into a model's parameters, in place."""
    from safetensors.torch import load_file

    model.load_weights(load_file(source / "model.safetensors").items())


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
