"""What a model in memory is, and whether it has changed.

A `ModelWatch` compares a model with what its configuration makes, and remembers a cheap mark
(modules, their attributes, hooks, code, configuration, modes, tensors' shapes, versions and
addresses) and the tensors' content. docs/decisions/0050-what-computes-in-transformers.md says what
is checked when, what it costs, and what remains.

`is_compared` says whether the model's attention computes what vLLM's does. All implementations
compute softmax over scaled products; some leave out soft caps, sinks or windows. So an
implementation is left out of an identity only for the model types (and for torch's function the
config values) for which K and V were compared: those of transformers' own function and of torch's
with vLLM's, and of these two with each other, in models with sharp attention
(`tests/e2e/meeting.py`). ``attention.json`` lists them; ``python tests/make_shared_configs.py``
measures and writes it.

`foreign_code` says whether the Python code that a model runs is that of the installed packages: it
names a class, method or function that replaces the one in the source file of transformers, of torch
or of the checkpoint. A function that changes its own globals is not seen.
"""

from __future__ import annotations

import ast
import copy
import enum
import functools
import hashlib
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.quantization_config import QuantizationConfigMixin

from vua.format.shared_config import unproven
from vua.transformers.tensors import Contents, digests, same_bytes, small_digest

_PACKAGES: Final = ("transformers", "torch", "transformers_modules")
_SHARED: Final = (
    "transformers.activations",
    "transformers.cache_utils",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "transformers.pytorch_utils",
)
"""Modules whose functions every model runs, beside those of its own classes."""

_FOLDERS: Final = tuple(
    f"{Path(str(package.__file__)).parent}/" for package in (transformers, torch)
)
_WRAPPERS: Final = frozenset(
    str(sys.modules[name].__file__) for name in ("contextlib", "functools", "typing")
)
_approved: dict[str, tuple[object, ...]] = {}
"""The mark of each module when it was compared with its file."""


def foreign_class(kind: type) -> str:
    """Describe a class that is not transformers', torch's or the checkpoint's; else ""."""
    module = sys.modules.get(kind.__module__)
    if kind.__module__.partition(".")[0] not in _PACKAGES or module is None:
        return f"the class {kind.__module__}.{kind.__qualname__}, expected one of transformers"
    found: Any = module
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind and "<locals>" not in kind.__qualname__:
        return f"a replaced class {kind.__module__}.{kind.__qualname__}"
    return ""


def foreign_function(function: object) -> str:
    """Return where a function was written, if that is outside of transformers and torch."""
    for code in _codes(function):
        if not _is_of_packages(code.co_filename):
            name = getattr(function, "__qualname__", type(function).__name__)
            return f"{name} of {code.co_filename}:{code.co_firstlineno}"
    return ""


def foreign_code(kinds: Iterable[type]) -> str:  # noqa: C901 - one look at each kind of place
    """Return the first piece of code that differs from the packages' files; "" if none does.

    Args:
        kinds: the classes of a model's modules.
    """
    classes = set(_lineage(kinds))
    for kind in classes:
        if problem := foreign_class(kind):
            return problem
    for name in _modules_of(kinds):
        module = sys.modules[name]
        mark = _mark_of(vars(module))
        mark = (*mark, *(_mark_of(vars(kind)) for kind in _classes_of(module)))
        if _approved.get(name) == mark:
            continue
        if problem := _differs_from_file(module):
            return problem
        _approved[name] = mark
    for kind in classes:
        for name, member in vars(kind).items():
            if problem := foreign_function(member):
                return f"{kind.__qualname__}.{name}: {problem}"
        forward = vars(kind).get("forward")
        if (
            forward is not None
            and kind is not torch.nn.Module
            and _named(forward) != f"{kind.__module__}.{kind.__qualname__}.forward"
        ):
            return f"{kind.__qualname__}.forward is {_named(forward)}"
    for name, value in vars(torch.nn.functional).items():
        if problem := foreign_function(value):
            return f"torch.nn.functional.{name}: {problem}"
    return ""


def code_mark(kinds: Iterable[type]) -> tuple[object, ...]:
    """Return a value that changes when a method or a module's function is replaced."""
    kinds = set(kinds)
    spaces: list[Mapping[str, Any]] = [vars(kind) for kind in sorted(_lineage(kinds), key=id)]
    spaces += [vars(sys.modules[name]) for name in _modules_of(kinds)]
    spaces.append(vars(torch.nn.functional))
    return tuple(_mark_of(space) for space in spaces)


def _modules_of(kinds: Iterable[type]) -> list[str]:
    """Return the modules whose functions are compared with their files: none of torch's."""
    names = {*(kind.__module__ for kind in kinds), *_SHARED}
    return sorted(name for name in names if name in sys.modules and not name.startswith("torch."))


def _named(function: object) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def _mark_of(space: Mapping[str, Any]) -> tuple[object, ...]:
    values = list(space.values())
    codes = [id(value.__code__) for value in values if type(value) is types.FunctionType]
    return (*map(id, values), *codes)


def _lineage(kinds: Iterable[type]) -> Iterator[type]:
    for kind in set(kinds):
        yield from (each for each in kind.__mro__ if each.__module__ not in {"builtins", "abc"})


def _classes_of(module: types.ModuleType) -> list[type]:
    found = [value for value in vars(module).values() if isinstance(value, type)]
    own = [kind for kind in found if kind.__module__ == module.__name__]
    return [kind for kind in own if issubclass(kind, torch.nn.Module | Cache | CacheLayerMixin)]


def _is_of_packages(file: str) -> bool:
    if file.startswith(_FOLDERS) or file in _WRAPPERS:
        return True
    return "/transformers_modules/" in file


def _codes(value: object, depth: int = 0) -> Iterator[types.CodeType]:
    """Yield the code of a function or method, and of the functions that it wraps."""
    if depth > 8:
        return
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _codes(part, depth + 1)
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        yield from _codes(value.__func__, depth + 1)
    elif isinstance(value, functools.partial):
        yield from _codes(value.func, depth + 1)
    elif isinstance(value, types.FunctionType):
        yield value.__code__
        cells = [] if value.__closure__ is None else value.__closure__
        for inner in (getattr(value, "__wrapped__", None), *(_content(cell) for cell in cells)):
            yield from _codes(inner, depth + 1)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _differs_from_file(module: types.ModuleType) -> str:  # noqa: C901 - likewise
    """Return the first function of a module, or method of its classes, that its file lacks."""
    file = getattr(module, "__file__", None) or ""
    try:
        source = Path(file).read_bytes()
        tree = ast.parse(source)
        whole = compile(source, file, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{module.__name__}, whose source cannot be read ({error})"
    written = set(_inside(whole))
    imported = _imported(tree, module.__package__ or "")
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for name, value in vars(module).items():
        if not isinstance(value, types.FunctionType):
            continue
        where, (source_module, original) = f"{module.__name__}.{name}", imported.get(name, ("", ""))
        if original:
            expected = getattr(sys.modules.get(source_module), original, value)
            if value is not expected:
                return f"{where} is {_named(value)}, expected {source_module}.{original}"
            if source_module.partition(".")[0] not in _PACKAGES:
                continue
        if problem := foreign_function(value):
            return f"{where}: {problem}"
        if name in defined and not written.intersection(_codes(value)):
            return f"{where} is not the function of {file}"
    bodies = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    for kind in _classes_of(module):
        body = bodies.get(kind.__qualname__, [])
        for name in (node.name for node in body if isinstance(node, ast.FunctionDef)):
            if not written.intersection(_codes(vars(kind).get(name))):
                return f"{module.__name__}.{kind.__qualname__}.{name} is not that of {file}"
    return ""


def _imported(tree: ast.Module, package: str) -> dict[str, tuple[str, str]]:
    """Return the origin of each name in a module's source: module and name there."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")
            base = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return found


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inside(constant)


_EAGER: Final = ("eager", "", "transformers.masking_utils.eager_mask")
_SDPA: Final = (
    "sdpa",
    "transformers.integrations.sdpa_attention.sdpa_attention_forward",
    "transformers.masking_utils.sdpa_mask",
)


def is_compared(model: Any) -> bool:
    """Whether the model's attention was compared with vLLM's for its config."""
    text, compared = model.config.get_text_config(), _compared()
    attention = attention_of(model)
    if attention == _EAGER:
        return text.model_type in compared["eager"]
    if attention != _SDPA or text.model_type not in compared["sdpa"]:
        return False
    return not unproven(text.to_dict(), compared["sdpa"][text.model_type])


@cache
def _compared() -> dict[str, Any]:
    """Return the types for which transformers' own function was compared ("eager"), and torch's.

    For torch's by type and key the only values for which it computes the same.
    """
    text = (files("vua.transformers") / "attention.json").read_text(encoding="utf-8")
    compared: dict[str, Any] = json.loads(text)
    return compared


def attention_of(model: Any) -> tuple[str, str, str]:
    """Return the name of a model's attention, and its attention and mask functions."""
    attends, masks = attention_functions(model)
    return _name(model), _called(attends), _called(masks)


def attention_functions(model: Any) -> tuple[object, object]:
    """Return the attention function (None: the model's own) and the mask function."""
    name = _name(model)
    return ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def _name(model: Any) -> str:
    return str(getattr(model.config.get_text_config(), "_attn_implementation", None) or "eager")


def _called(function: object) -> str:
    if function is None:
        return ""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


_MODULE: Final = frozenset(vars(nn.Module()))
_HOOKS: Final = tuple(
    name for name in sorted(_MODULE)
    if name.endswith(("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"))
)  # fmt: skip
_GLOBAL_HOOKS: Final = tuple(
    name for name in vars(nn.modules.module)
    if name.startswith("_global_") and name.endswith(("forward_hooks", "pre_hooks"))
)  # fmt: skip
_NOT_COUNTING: Final = frozenset(
    "_is_hf_initialized _weight_conversions _use_kernels hf_quantizer generation_config generate "  # noqa: SIM905 - words
    "name_or_path hf_device_map warnings_issued loss_type _loss_function is_gradient_checkpointing "
    "_tp_plan _ep_plan _pp_plan _fsdp_plan _no_split_modules _skip_keys_device_placement "
    "_keys_to_ignore_on_load_unexpected _keys_to_ignore_on_load_missing _keys_to_ignore_on_save "
    "_keep_in_fp32_modules _keep_in_fp32_modules_strict all_tied_weights_keys kernel_config".split()
)
"""Attributes of models that loading or `generate` sets and no forward pass reads."""
_PASSED_OVER: Final = _MODULE | _NOT_COUNTING
_CONFIG_NOT_COUNTING: Final = frozenset(
    "_name_or_path _commit_hash transformers_version _experts_implementation_internal use_cache "  # noqa: SIM905 - words
    "return_dict output_hidden_states _output_attentions pad_token_id bos_token_id eos_token_id "
    "id2label label2id problem_type architectures dtype".split()
)
_PLAIN_TYPES: Final = frozenset(
    (type(None), int, float, str, bool, bytes, complex, torch.dtype, torch.device)
)
_MOST_PLAIN_NBYTES: Final = 1 << 20
_Named = dict[str, Any]


class ModelWatch:
    """A model, as it was when the watch was made, and its changes since."""

    def __init__(
        self,
        model: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compare ``model`` with what its configuration makes; faster than loading it.

        Args:
            model: one of transformers.
            clock: seconds, to measure the cost of checks.
        """
        self.model, self.clock = model, clock
        self.obstacle = ""
        """Why nothing of it can be stored under any name; "" if it can."""
        self.difference = ""
        """How it differs from what its configuration makes; "" if it does not."""
        self._contents: Contents | None = None
        self._looked_at: tuple[object, ...] = ()
        """Versions and addresses at the last check that read every byte."""
        self._mark = _Mark(model)
        self.versions = self.versions_now()
        self.obstacle = (
            self._mark.obstacle() or foreign_code(self._mark.kinds) or _attention_obstacle(model)
        )
        if not self.obstacle:
            try:
                made = _made_by_config(model)
            except Exception as problem:  # noqa: BLE001 - whatever a model's constructor raises
                self.difference = f"its config makes no model ({type(problem).__name__}: {problem})"
            else:
                self.difference = _difference(self._mark, _Mark(made), model, made)

    def change(self) -> str:
        """Return what changed since the watch was made; "" if nothing did. Cheap."""
        began = self.clock()
        try:
            return self._mark.change(_Mark(self.model))
        except Exception as problem:  # noqa: BLE001 - the model is in a state nobody foresaw
            return f"the model cannot be looked at ({type(problem).__name__}: {problem})"
        finally:
            if self._contents is not None:
                self._contents.spend(self.clock() - began)

    def versions_now(self) -> tuple[object, ...]:
        """Return a value that changes when a tensor is replaced or written to, but for `.data`."""
        try:
            return tuple(
                [
                    (id(tensor), tensor.data_ptr(), _version(tensor))
                    for tensor in self._all()
                    if not tensor.is_meta
                ]
            )
        except Exception:  # noqa: BLE001 - the model is in a state nobody foresaw
            return (object(),)  # equal to nothing else

    def change_of_versions(self, versions: tuple[object, ...]) -> str:
        """Return that a tensor was replaced or written to since `versions_now`; "" if none was."""
        return "" if self.versions_now() == versions else "a tensor was replaced or written to"

    def read(self) -> Contents:
        """Return the tensors' content; reads all bytes, at memory speed."""
        return Contents(self._all(), self.clock)

    def keep(self, contents: Contents) -> str:
        """Accept the result of `read` as the identified content; return why not.

        Reads all bytes.
        """
        if contents.differ(self._all(), whole=True):
            return "the model's tensors changed"
        self._contents, self._looked_at = contents, self.versions_now()
        return ""

    def earn(self, spent_s: float) -> None:
        """Report the time of generating: a part of it is for checks."""
        if self._contents is not None:
            self._contents.earn(spent_s)

    def change_of_bytes(self) -> str:
        """Return that the tensors do not hold what was identified; "" if they seem to.

        Reads every byte if a tensor was written to or replaced since that was last done, or has no
        versions; else what `Contents` reads. Never raises.
        """
        other = "the model's tensors hold other values than were identified"
        if self._contents is None:
            return other
        try:
            versions, tensors = self.versions_now(), self._all()
            signed = not any(tensor.is_inference() for tensor in tensors)
            whole = versions != self._looked_at or not signed
            if self._contents.differ(tensors, whole=whole):
                self._looked_at = ()
                return other
            if whole:
                self._looked_at = versions
        except Exception as problem:  # noqa: BLE001 - the model is in a state nobody foresaw
            return f"the model's tensors cannot be read ({type(problem).__name__}: {problem})"
        return ""

    def change_of_modes(self) -> str:
        """Return which mode of torch or of the model forbids storing; "" if none does.

        Immediate.
        """
        if self.model.training:
            return "the model is in training mode, expected model.eval()"
        return _modes(self.model)[0]

    def _all(self) -> list[torch.Tensor]:
        return [
            tensor
            for _, module in _modules(self.model)
            for tensor in (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
            if tensor is not None
        ]

    def digest(self, stop: threading.Event) -> str:
        """Return 64 hex digits of everything that the model is: tensors, modules, attributes.

        Raises CancelledError.
        """
        found = hashlib.sha256(b"vua.transformers.memory.v1\n")
        for part in (transformers.__version__, attention_of(self.model), self._mark.portable()):
            text = repr(part).encode()
            found.update(len(text).to_bytes(8, "little") + text)
        for digest in digests(dict(_tensors(self.model)), stop):
            found.update(digest)
        return found.hexdigest()


def _attention_obstacle(model: Any) -> str:
    for function in attention_functions(model):
        if function is not None and (problem := foreign_function(function)):
            return f"the attention {attention_of(model)[0]!r} is {problem}"
    return ""


# -- marks ------------------------------------------------------------------------------------


class _Mark:
    """Everything that a model is at one moment, except its tensors' bytes."""

    def __init__(self, model: Any) -> None:
        named = _modules(model)
        self.kinds = {type(module) for _, module in named}
        known: dict[int, Any] = {}  # of values that many modules have, such as the config
        self.modules = {name: _module(module, known) for name, module in named}
        self.objects = [id(module) for _, module in named]
        self.tensors = {
            prefix + key: (type(tensor), tensor.dtype, tensor.shape, tensor.device)
            for prefix, module in [(name and f"{name}.", module) for name, module in named]
            for key, tensor in (*module._parameters.items(), *module._buffers.items())  # noqa: SLF001
            if tensor is not None
        }
        self.config = _plain(model.config)
        self.modes = _modes(model)
        self.functions = tuple(map(id, attention_functions(model)))
        self.code = code_mark(self.kinds)

    def obstacle(self) -> str:  # noqa: C901, PLR0911 - one case for each kind
        """Return why a model in this state has no lasting name; "" if it has one."""
        if self.modes[0]:
            return self.modes[0]
        for name, found in self.modules.items():
            where = name or "the model"
            if found["training"]:
                return f"{where} is in training mode, expected model.eval()"
            if found["hooks"]:
                return f"{where} has hooks ({', '.join(found['hooks'])}), expected none"
            for key, value in found.items():
                if what := _opaque(value):
                    return f"{where} has {key}, {what}, which no digest can stand for"
        for name, (kind, *_, device) in self.tensors.items():
            if kind not in {torch.Tensor, nn.Parameter}:
                return f"{name} is a {_name_of(kind)}, expected a plain tensor"
            if device.type == "meta":
                return f"{name} has no bytes (meta), expected a model that is in memory"
        if what := _opaque(self.config):
            return f"the config has {what}, which no digest can stand for"
        return ""

    def portable(self) -> object:
        """Return the part that means the same in every process."""
        return self.modules, self.config

    def change(self, now: _Mark) -> str:
        """Return how another mark of the same model differs; "" if it does not."""
        if now.modes[0]:
            return now.modes[0]
        for what in ("modules", "tensors"):
            if problem := _first_difference(getattr(self, what), getattr(now, what)):
                return problem
        for what, text in (
            ("objects", "a module was replaced"),
            ("config", "the config was edited"),
            ("modes", f"the modes are {now.modes}, expected {self.modes}"),
            ("functions", "the attention's functions were replaced"),
            ("code", "a method or function of the model's classes was replaced"),
        ):
            if getattr(self, what) != getattr(now, what):
                return text
        return ""


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `named_modules` yields, with repetitions, in a tenth of its time."""
    found = [("", model)]
    for name, module in found:  # grows meanwhile
        prefix = f"{name}." if name else ""
        found += [
            (prefix + key, part)
            for key, part in module._modules.items()  # noqa: SLF001 - its only dict
            if part is not None
        ]
    return found


def _module(module: nn.Module, known: dict[int, Any]) -> _Named:
    own = vars(module)
    found: _Named = {
        "type": _name_of(type(module)),
        "training": own["training"],
        "hooks": tuple([name for name in _HOOKS if own.get(name)]),
    }
    for key in [key for key in own if key not in _PASSED_OVER]:
        value = own[key]
        if type(value) in _PLAIN_TYPES:
            found[key] = value
            continue
        if _is_of_its_class(key, value, module):  # as PEFT leaves them
            continue
        if (kept := known.get(id(value))) is None:
            kept = known[id(value)] = _plain(value)
        found[key] = kept
    if "generate" in own and not _is_generate(own["generate"], module):
        found["generate"] = _plain(own["generate"])
    return found


def _is_of_its_class(key: str, value: Any, module: nn.Module) -> bool:
    """Whether an attribute equals what the module has without it: the method of its class."""
    return (
        type(value) is types.MethodType
        and value.__self__ is module
        and value.__func__ is getattr(type(module), key, None)
    )


def _is_generate(value: Any, module: nn.Module) -> bool:
    return type(value).__module__ == "vua.transformers.generation" or _is_of_its_class(
        "generate", value, module
    )


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - its only name


def _modes(model: Any) -> tuple[str, object]:
    """Return what forbids storing now, and what must stay the same."""
    kind = model.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return f"autocast is on ({torch.get_autocast_dtype(kind)}), expected none", None
    active = _function_modes()  # type: ignore[no-untyped-call]
    modes = [mode for mode in active if type(mode) is not DeviceContext]
    if modes or (modes := [*_get_current_dispatch_mode_stack()]):
        return f"a {type(modes[-1]).__name__} is active, expected no mode of torch", None
    if hooks := [name for name in _GLOBAL_HOOKS if getattr(nn.modules.module, name)]:
        return f"torch has hooks for all modules ({', '.join(hooks)}), expected none", None
    return "", torch.get_float32_matmul_precision()


class _Opaque(tuple[str, int]):
    """A value of unknown meaning: equal only to itself."""

    __slots__ = ()


def _plain(value: Any, depth: int = 0) -> Any:  # noqa: C901, PLR0911, PLR0912 - one case for each kind
    """Return a value's meaning, equal for equal ones, or an `_Opaque`."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if depth > 12:
        return _Opaque((_name_of(kind), id(value)))
    if isinstance(value, list | tuple):
        return (_name_of(kind), *(_plain(item, depth + 1) for item in value))
    if isinstance(value, PreTrainedConfig):
        kept = {k: v for k, v in vars(value).items() if k not in _CONFIG_NOT_COUNTING}
        return (_name_of(kind), _plain(kept, depth + 1))
    if isinstance(value, QuantizationConfigMixin):
        return (_name_of(kind), _plain(value.to_dict(), depth + 1))
    if isinstance(value, Mapping):
        items = [part for item in value.items() for part in item]
        return ("mapping", *(_plain(part, depth + 1) for part in items))
    if isinstance(value, set | frozenset):
        return ("set", *sorted((_plain(item, depth + 1) for item in value), key=repr))
    if isinstance(value, enum.Enum):
        return (_name_of(kind), value.name)
    if isinstance(value, torch.Tensor):
        small = value.nbytes <= _MOST_PLAIN_NBYTES and not value.is_meta
        if not small:
            return _Opaque((_name_of(kind), id(value)))
        return ("tensor", str(value.dtype), tuple(value.shape), small_digest(value))
    if isinstance(value, nn.Module):
        return ("module", _name_of(kind))
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, dict(value.keywords))
        return ("partial", *(_plain(part, depth + 1) for part in parts))
    if isinstance(value, types.MethodType):
        owner = "" if isinstance(value.__self__, nn.Module) else _plain(value.__self__, depth + 1)
        return ("method", _plain(value.__func__, depth + 1), owner)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        if foreign_function(value):
            return _Opaque((f"function {value.__qualname__}", id(value)))
        return ("function", f"{value.__module__}.{value.__qualname__}")
    if isinstance(value, type):
        return _Opaque((_name_of(value), id(value))) if foreign_class(value) else _name_of(value)
    return _Opaque((_name_of(kind), id(value)))


def _opaque(value: object) -> str:
    if isinstance(value, _Opaque):
        return f"a {value[0]}"
    if isinstance(value, tuple):
        return next(filter(None, map(_opaque, value)), "")
    return ""


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _first_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the first difference of two descriptions by name, with both values; "" if equal."""
    if expected == found:
        return ""
    name = next(name for name in [*expected, *found] if expected.get(name) != found.get(name))
    one, other, where = expected.get(name), found.get(name), name or "the model"
    if isinstance(one, dict) and isinstance(other, dict):
        key = next(key for key in [*one, *other] if one.get(key) != other.get(key))
        one, other, where = one.get(key), other.get(key), f"{where}: {key}"
    return f"{where} is {_short(other)}, expected {_short(one)}"


def _short(value: object) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) < 120 else f"{text[:117]}..."


# -- what the configuration makes -------------------------------------------------------------


def _made_by_config(model: Any) -> Any:
    """Return a model of the same class and configuration: buffers as computed, parameters on meta.

    In the calling thread, like `from_pretrained`: torch's default dtype is the process's.
    """
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            torch.set_default_dtype(model.dtype)
            with torch.device("meta"):
                made = type(model)(copy.deepcopy(model.config))
            for module in made.modules():
                for name, buffer in module._buffers.items():  # noqa: SLF001 - no public way to set one
                    if buffer is not None:
                        module._buffers[name] = torch.empty_like(buffer, device="cpu")  # noqa: SLF001
                module._is_hf_initialized = False  # noqa: SLF001
            made.initialize_weights()
        finally:
            torch.set_default_dtype(before)
    return made.eval()


def _difference(mark: _Mark, expected: _Mark, model: Any, made: Any) -> str:
    """Return how a model differs from one that its configuration makes, except for loaded bytes."""
    if problem := _first_difference(expected.modules, mark.modules):
        return problem
    kept = [
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    for name in [*expected.tensors, *mark.tensors]:
        one, other = expected.tensors.get(name), mark.tensors.get(name)
        if one is None or other is None or one[2] != other[2]:
            return f"{name} is {_short(other)}, expected {_short(one)}"
        in_full = other[1] is torch.float32 and any(part in name for part in kept)
        if one[1] != other[1] and not in_full:
            return f"{name} is {other[1]}, expected {one[1]}"
    computed = dict(made.named_non_persistent_buffers(remove_duplicate=False))
    for name, buffer in model.named_non_persistent_buffers(remove_duplicate=False):
        if name not in computed or not same_bytes(computed[name], buffer):
            return f"{name} is not what the config computes"
    if (precision := mark.modes[1]) != "highest" and model.dtype is torch.float32:
        return f"torch's float32 matmul precision is {precision!r}, expected 'highest'"
    return ""
