"""What is in `deploy/`: settings and metrics that the code has, objects that other tools take."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers import ROOT
from vua import __version__
from vua.connector.config import ConnectorConfig, defaults, sglang_arguments
from vua.connector.metrics import METRICS
from vua.errors import ConfigError
from vua.vllm import TIER, VUA
from vua.vllm.serve import with_connector

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEPLOY = ROOT / "deploy"
RULES, DASHBOARD = DEPLOY / "vua-alerts.yml", DEPLOY / "grafana-vua.json"
QUERY = re.compile(r"(vua_[a-z_]+)(?:\{([^}]*)\})?")
PROMTOOL = shutil.which("promtool")


def problems(text: str) -> list[str]:
    """What some expressions name that the code does not have."""
    found = []
    for name, labels in QUERY.findall(text):
        base = re.sub("_(bucket|sum|count)$", "", name)
        metric = METRICS.get(name) or METRICS.get(base)
        if metric is None or (name not in METRICS and metric.kind != "histogram"):
            found.append(f"no metric {name}")
            continue
        for label, values in re.findall(r'([a-z]+)=~?"([^"]*)"', labels):
            if label in ("job", "instance"):
                continue
            known = label == metric.label and set(values.split("|")) <= set(metric.values)
            found += [] if known else [f"{name} has no {label}={values}"]
    return found


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    return [one["expr"] for panel in dashboard["panels"] for one in panel.get("targets", ())]


def sent(name: str) -> bool:
    """Whether `docker build` is sent this file: the last pattern that fits decides."""
    found = True
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.removeprefix("!").replace("**/", "\0").replace(".", r"\.")
        if not pattern or pattern.startswith("#"):
            continue
        pattern = pattern.replace("*", "[^/]*").replace("\0", "(?:.*/)?")
        if re.fullmatch(f"{pattern}(?:/.*)?", name):
            found = line.startswith("!")
    return found


class ImageTest(unittest.TestCase):
    """`deploy/docker/Dockerfile` and what `docker build` is sent."""

    DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text("utf-8")

    def test_version(self) -> None:
        """The image is built on the newest vLLM that the tests run with."""
        newest = re.search(
            r'^NEWEST_VLLM = "([\d.]+)"', (ROOT / "dev.py").read_text(), re.MULTILINE
        )
        assert newest is not None
        self.assertEqual(
            [f"v{newest[1]}"], re.findall(r"^ARG VLLM=(\S+)", self.DOCKERFILE, re.MULTILINE)
        )

    def test_sent(self) -> None:
        """All that the wheel is made of is copied: the package, and what pyproject.toml names."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
        wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
        needed = {"pyproject.toml", project["project"]["readme"], wheel["hooks"]["custom"]["path"],
                  *project["project"]["license-files"]}  # fmt: skip
        for folder in wheel["packages"]:
            files = [one for one in (ROOT / folder).rglob("*.*") if one.is_file()]
            needed |= {str(one.relative_to(ROOT)) for one in files
                       if one.suffix not in (".pyc", ".so", "")}  # fmt: skip
        self.assertLess(100, len(needed))
        self.assertEqual([], sorted(name for name in needed if not sent(name)))

    def test_extras(self) -> None:
        """What the image adds is what the package's extras for keys and buckets ask for."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        extras = project["optional-dependencies"]
        added = re.findall(r'"([a-z]+>=[\d.]+)"', self.DOCKERFILE)
        self.assertLessEqual(set(added), {*extras["crypto"], *extras["object"]})
        self.assertLessEqual({"cryptography", "obstore"}, {one.partition(">=")[0] for one in added})


class DeployTest(unittest.TestCase):
    def test_names(self) -> None:
        """Every metric, label and value that is named is one of the connector's."""
        for text in (RULES.read_text("utf-8"), (DEPLOY / "vua-alerts.test.yml").read_text("utf-8"),
                     *expressions()):  # fmt: skip
            self.assertTrue(QUERY.search(text))
            self.assertEqual([], problems(text.replace(", ", ",")))

    def test_problems(self) -> None:
        """A metric, label or value that nobody has is noticed."""
        for text in ("vua_nothing_total", 'vua_loads_total{outcome="lost"}',
                     'vua_loads_total{reason="failed"}', "vua_loads_total_bucket"):  # fmt: skip
            self.assertEqual(1, len(problems(text)), text)

    def test_all_are_shown(self) -> None:
        shown = " ".join(expressions())
        missing = [name for name in METRICS if name not in shown]
        self.assertEqual([], missing, f"add them to a panel of {DASHBOARD.name}")

    @unittest.skipUnless(PROMTOOL, "promtool is not installed (Debian: prometheus)")
    def test_rules(self) -> None:
        """Prometheus' own tool takes the rules, and sees each one fire."""
        for words in (["check", "rules", RULES], ["test", "rules", DEPLOY / "vua-alerts.test.yml"]):
            done = subprocess.run(
                [str(PROMTOOL), *map(str, words)], capture_output=True, text=True, check=False
            )
            self.assertEqual(0, done.returncode, done.stdout + done.stderr)


yaml: Any = pytest.importorskip("yaml")
CHANNELS = ROOT / "deploy" / "channels"


def objects(name: str) -> Any:
    return yaml.safe_load((CHANNELS / name).read_text("utf-8"))


def command(name: str, word: str) -> list[str]:
    """The arguments after a word in the last command of a page."""
    blocks = re.findall(r"```bash\n(.*?)```", (CHANNELS / name).read_text("utf-8"), re.DOTALL)
    return shlex.split(blocks[-1].rpartition(f" {word} ")[2])


def has_class(module: str, name: str) -> bool:
    """Whether a module of VUA defines a class; imports no engine."""
    found = importlib.util.find_spec(module)
    source = Path(found.origin).read_text("utf-8") if found and found.origin else ""
    return name in [one.name for one in ast.parse(source).body if isinstance(one, ast.ClassDef)]


def check(arguments: list[str], mounted: str, env: Any = ()) -> dict[str, Any]:
    """Return the connector's configuration; it and its place inside the volume must be VUA's."""
    with mock.patch.dict(os.environ, {one["name"]: one["value"] for one in env}):
        given = with_connector(["serve", *arguments])
        transfer: dict[str, Any] = json.loads(given[-1])
        extra = transfer["kv_connector_extra_config"]
        if transfer["kv_connector"] == TIER:
            assert has_class(transfer["kv_connector_module_path"], TIER), transfer
            (tier,) = transfer["kv_connector_extra_config"]["secondary_tiers"]
            extra = {**tier, "shared_storage_path": tier["path"]}
            assert has_class(extra.pop("module_path"), extra.pop("type")), tier
            del extra["path"]
        else:
            assert transfer["kv_connector"] == VUA, transfer
        path = ConnectorConfig.from_extra_config(extra).shared_storage_path
    assert str(path).startswith(f"{mounted}/"), path
    return transfer


class ChannelTest(unittest.TestCase):
    def test_readme(self) -> None:
        text = (CHANNELS / "README.md").read_text("utf-8")
        names = [str(one.relative_to(CHANNELS)) for one in CHANNELS.rglob("*.*") if one.is_file()]
        self.assertLess(9, len(names))
        self.assertEqual(["README.md"], [one for one in names if f"`{one}`" not in text])

    def test_deployments(self) -> None:
        """What recipes, llm-d, production-stack and KServe start is what `vua-vllm` takes."""
        (option,) = objects("recipes/kv_offload.yaml").values()
        check(option["args"], "/mnt")
        pod = objects("llm-d/patch-vllm.yaml")["spec"]["template"]["spec"]
        own = pod["containers"][0]
        check(own["args"], own["volumeMounts"][0]["mountPath"], own["env"])
        model = objects("production-stack/values.yaml")["servingEngineSpec"]["modelSpec"][0]
        self.assertTrue(model["vllmConfig"]["enablePrefixCaching"])
        check([model["modelURL"]], "/data", model["env"])
        own = objects("kserve/connector.yaml")["spec"]["template"]["containers"][0]
        check(shlex.split(own["env"][0]["value"]), own["volumeMounts"][0]["mountPath"])
        spec = objects("kserve/offloading.yaml")["spec"]
        words = shlex.split(spec["template"]["containers"][0]["env"][0]["value"])
        nbytes = check(words, "/mnt/kv-cache-0")["kv_connector_extra_config"]["cpu_bytes_to_use"]
        self.assertEqual(f"{nbytes >> 30}Gi", spec["kvCacheOffloading"]["cpu"])

    def test_pages(self) -> None:
        """The commands of both pages are those that VUA gives."""
        transfer = check(command("vllm-integration.md", "Qwen/Qwen3-8B"), "/mnt")
        self.assertEqual(TIER, transfer["kv_connector"])
        words = command("sglang-hicache.md", "Qwen/Qwen3-8B")
        for name, value in sglang_arguments("/mnt/kv").items():
            at = words.index(f"--{name.replace('_', '-')}") + 1
            same = json.loads if name.endswith("_config") else str
            self.assertTrue(value is True or same(value) == same(words[at]), name)

    def test_conda(self) -> None:
        """The recipe asks for what the package asks for."""
        recipe = objects("conda-forge/recipe.yaml")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        wanted = {one.replace("xxhash", "python-xxhash") for one in project["dependencies"]}
        run = {one.replace(" ", "") for one in recipe["requirements"]["run"]}
        self.assertEqual((wanted | {"python"}, __version__), (run, recipe["context"]["version"]))

    def test_check(self) -> None:
        """A setting, class, connector or place that VUA does not take is noticed."""
        words = command("vllm-integration.md", "Qwen/Qwen3-8B")
        for old, new in (("VUATier", "Tier"), ('"path"', '"root_dir"'), (TIER, "Offloading"),
                         ("/mnt/kv", "/mnt"), ('"path"', '"max_bytes": 1, "path"')):  # fmt: skip
            with self.subTest(new), self.assertRaises((AssertionError, ConfigError, KeyError)):
                check([one.replace(old, new) for one in words], "/mnt")


KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def compose_schema() -> Any:
    package = pytest.importorskip("check_jsonschema")
    schemas = Path(package.__file__).parent / "builtin_schemas" / "vendor"
    return json.loads((schemas / "compose-spec.json").read_text("utf-8"))


def named(settings: dict[str, Any]) -> set[str]:
    """The names of settings, with those of their groups before them."""
    return {
        f"{group}.{name}" if isinstance(value, dict) else group
        for group, value in settings.items()
        for name in (value if isinstance(value, dict) else [group])
    }


class ManifestTest(unittest.TestCase):
    @pytest.mark.thorough
    def test_kubernetes(self) -> None:
        """Each object fits its schema, and one with a field that it does not know does not."""
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        self.assertEqual(2, len(KUBERNETES))
        for path in KUBERNETES:
            for one in documents(path):
                with self.subTest(path.name, kind=one["kind"]):
                    kubernetes_validate.validate(one, "1.34", strict=True)
                    wrong = copy.deepcopy(one)
                    wrong["specs"] = {}
                    with self.assertRaises(kubernetes_validate.ValidationError):
                        kubernetes_validate.validate(wrong, "1.34", strict=True)

    @pytest.mark.thorough
    def test_compose(self) -> None:
        """Each file fits the specification, and one with a field that it does not know does not."""
        jsonschema = pytest.importorskip("jsonschema")
        self.assertEqual(2, len(COMPOSE))
        schema = compose_schema()
        for path in COMPOSE:
            with self.subTest(path.name):
                (one,) = documents(path)
                jsonschema.validate(one, schema)
                one["services"]["vllm-x"] = {"imagine": "vllm-vua"}
                with self.assertRaises(jsonschema.ValidationError):
                    jsonschema.validate(one, schema)

    def test_settings(self) -> None:
        """What the engines are started with is what `vua-vllm serve` takes."""
        pytest.importorskip("vllm")
        started = []
        for path in KUBERNETES:
            for one in documents(path):
                if one["kind"] == "Deployment":
                    (container,) = one["spec"]["template"]["spec"]["containers"]
                    arguments = container.get("command") or ["vllm", "serve", *container["args"]]
                    started.append(arguments[1:])
        for path in COMPOSE:
            services = documents(path)[0]["services"]
            found = [one["command"] for name, one in services.items() if name.startswith("vllm")]
            started += [["serve", *command] for command in found]
        self.assertEqual(5, len(started))
        for arguments in started:
            if "--kv-transfer-config" not in arguments:  # the environment names the directory
                arguments += ["--vua-path", "/kv/vua"]
            config = json.loads(with_connector(arguments)[-1])
            self.assertEqual("VUA", config["kv_connector"])
            names = named(config["kv_connector_extra_config"]) - {"shared_storage_path"}
            self.assertLessEqual(names, defaults().keys())
