"""Identifies the weights that a vLLM engine has loaded.

The files are those that vLLM's own loader chooses; without its answer there is none. Nothing is
downloaded.
"""

from __future__ import annotations

import inspect
import multiprocessing
import threading
from pathlib import Path
from typing import Any, Final

from vua.connector.cache_spec import UncachedError, local_directory
from vua.errors import ConfigError
from vua.vllm.support import DRAFTS
from vua.weights import Weights, checkpoint_files, identify_weights, process_began_s

__all__ = ["find_weights", "has_secondary"]

_READS_ALL: Final = frozenset(
    ("bitsandbytes", "gguf", "runai_streamer", "runai_streamer_sharded", "sharded_state")
)
"""Load formats whose loaders choose among the directory's weight files: all of them count."""
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".gguf")


def find_weights(vllm_config: Any, stop: threading.Event) -> Weights:
    """Identify what the engine has loaded; takes as long as reading it, if it was never read.

    Raises:
        UncachedError: the loaded weights cannot be identified.
        CancelledError: ``stop`` was set.
    """
    model_config, load = vllm_config.model_config, vllm_config.load_config
    if _load_format(load) == "dummy":  # random weights that depend on the seed alone
        return Weights(f"dummy:{model_config.seed}", (), 0, 0, 0.0, 0.0)
    try:
        weights = identify_weights(_engine_files(model_config, load), stop=stop)
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method in DRAFTS:
            files = _engine_files(speculative.draft_model_config, load)
            weights = weights.joined(identify_weights(files, stop=stop))
        # vLLM's process of that name was started for this engine, so before it loaded. A process
        # that makes engines in itself may have written the model, too: times tell nothing there.
        own = multiprocessing.current_process().name.startswith("EngineCore")
        changed = own and weights.changed_since(process_began_s(), stop=stop)
    except (ConfigError, OSError) as problem:
        msg = f"the weights cannot be identified: {problem}"
        raise UncachedError(msg) from problem
    if changed:
        msg = (
            "weight files were changed after the engine's start, so the loaded weights are "
            "unknown; restart the engine"
        )
        raise UncachedError(msg)
    return weights


def _load_format(load: Any) -> str:
    return str(getattr(load.load_format, "value", load.load_format))


def _engine_files(model_config: Any, load: Any) -> list[Path]:
    """Return the files that hold what the engine loads. Raises UncachedError, ConfigError, OSError.

    ConfigError where there are none.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    root = _root(model_config, load)
    if _load_format(load) in _READS_ALL:
        listed = sorted(root.iterdir()) if root.is_dir() else []
        files = [file for file in listed if file.suffix in _SUFFIXES] or checkpoint_files(root)
    else:
        loader: Any = get_model_loader(load)
        copies = _load_format(load) == "npcache"  # loads a copy that it keeps beside the files
        if type(loader) is not DefaultModelLoader or copies:
            msg = f"load_format {_load_format(load)!r}: it is unknown what its loader loads"
            raise UncachedError(msg)
        files = _chosen_by(loader, model_config, root)
    return files + _quantisation_files(model_config, root)


def _root(model_config: Any, load: Any) -> Path:
    """Return the directory of the model's files. Raises UncachedError."""
    from vllm import envs

    model = model_config.model
    if getattr(model_config, "model_weights", ""):
        msg = "weights in an object storage are not identified"
        raise UncachedError(msg)
    if Path(model).exists():
        return Path(model)
    if envs.VLLM_USE_MODELSCOPE:
        msg = "weights from ModelScope are not identified; give --model a local directory"
        raise UncachedError(msg)
    root = local_directory(model, model_config.revision, load.download_dir)
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if commit is not None and root.name != commit:
        msg = f"the engine runs {model!r} at commit {commit}, and {root.name} is here now"
        raise UncachedError(msg)
    return root


def _chosen_by(loader: Any, model_config: Any, root: Path) -> list[Path]:
    """Return the files that vLLM's default loader chooses in a directory. Raises UncachedError."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    try:
        model_class = get_model_architecture(model_config)[0]
        arguments = {
            "model_name_or_path": str(root),
            "subfolder": None,
            "revision": None,
            "fall_back_to_pt": getattr(model_class, "fall_back_to_pt_during_load", True),
            "allow_patterns_overrides": getattr(model_class, "allow_patterns_overrides", None),
        }
        choose = loader._prepare_weights  # noqa: SLF001 - there is no public way
        wanted = inspect.signature(choose).parameters
        found = choose(**{name: value for name, value in arguments.items() if name in wanted})
        files = [Path(file) for file in found[1]]
    except Exception as problem:  # whatever another release raises: then it is unknown
        msg = f"vLLM's loader does not say what it loads from {root}: {problem}"
        raise UncachedError(msg) from problem
    if has_secondary(model_class):
        msg = f"{model_class.__name__} loads weights from a second place"
        raise UncachedError(msg)
    return files


def has_secondary(model_class: type) -> bool:
    """Whether a model names further sources of weights, as its loader expects of every model.

    Instances do so in code, and there is no instance here.
    """
    functions = [member for base in model_class.__mro__ for member in vars(base).values()]
    codes = [one.__code__ for one in functions if inspect.isfunction(one)]
    named = any("secondary_weights" in code.co_names for code in codes)
    return named or hasattr(model_class, "secondary_weights")


def _quantisation_files(model_config: Any, root: Path) -> list[Path]:
    """Return the files in which a quantised checkpoint describes itself beside its config."""
    if model_config.quantization is None or not root.is_dir():
        return []
    from vllm.model_executor.layers.quantization import get_quantization_config

    names = get_quantization_config(model_config.quantization).get_config_filenames()
    return [file for name in sorted(set(names)) if (file := root / name).is_file()]
