"""The files for other projects in `deploy/channels/` start engines with what VUA has."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers import ROOT
from vua import __version__
from vua.connector.config import ConnectorConfig, sglang_arguments
from vua.errors import ConfigError
from vua.vllm import TIER, VUA
from vua.vllm.serve import with_connector

yaml = pytest.importorskip("yaml")
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHANNELS = ROOT / "deploy" / "channels"
KUSTOMIZE = os.environ.get("VUA_KUSTOMIZE")
DECODE = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "decode"},
    "spec": {
        "selector": {"matchLabels": {"app": "decode"}},
        "template": {
            "metadata": {"labels": {"app": "decode"}},
            "spec": {"containers": [{"name": "modelserver", "image": "vllm/vllm-openai:v0.33.0"}]},
        },
    },
}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "llm-d-kv-cache-storage"},
}


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

    def test_rattler(self) -> None:
        """rattler-build takes the recipe, and none with a field that it does not know."""
        rattler = pytest.importorskip("rattler_build", reason="`dev.py channels` installs it")
        text = (CHANNELS / "conda-forge" / "recipe.yaml").read_text("utf-8")
        variants = rattler.VariantConfig.from_yaml("c_stdlib: [sysroot]")
        made = rattler.Stage0Recipe.from_yaml(text).render(variants)
        self.assertEqual(1, len(made))
        with self.assertRaises(rattler.RattlerBuildError):
            rattler.Stage0Recipe.from_yaml(text.replace("license_file:", "license_files:"))

    @unittest.skipUnless(KUSTOMIZE, "`dev.py channels` installs kustomize")
    def test_kustomize(self) -> None:
        """The overlay for llm-d goes over its deployment, and over none of another name."""
        made = self.rendered(DECODE)
        pod = next(one for one in made if one["kind"] == "Deployment")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        self.assertEqual("vllm-vua:latest", container["image"])
        self.assertEqual(
            {"VUA_PATH": "/mnt/files-storage/vua", "XDG_CACHE_HOME": "/mnt/files-storage/state"},
            {one["name"]: one["value"] for one in container["env"]},
        )
        (volume,) = pod["volumes"]
        self.assertEqual(CLAIM["metadata"]["name"], volume["persistentVolumeClaim"]["claimName"])
        with self.assertRaisesRegex(AssertionError, "decode"):
            self.rendered({**DECODE, "metadata": {"name": "prefill"}})

    def rendered(self, deployment: dict[str, Any]) -> list[Any]:
        """What kustomize makes of the overlay, with what lies below it in llm-d's tree."""
        root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, root)
        place = root / "guides/tiered-prefix-cache/modelserver/gpu/vllm/vua/fs/base"
        shutil.copytree(CHANNELS / "llm-d", place)
        below = (place / "../../../base", place / "../../../../../../manifests/pvc")
        for folder, one in zip(below, (deployment, CLAIM), strict=True):
            folder.mkdir(parents=True)
            (folder / "one.yaml").write_text(json.dumps(one), "utf-8")
            prefix = "namePrefix: gpu-vllm-\n" if one is deployment else ""
            (folder / "kustomization.yaml").write_text(f"{prefix}resources: [one.yaml]\n", "utf-8")
        done = subprocess.run(
            [KUSTOMIZE or "", "build", str(place)], capture_output=True, text=True, check=False
        )
        self.assertEqual(0, done.returncode, done.stderr)
        return list(yaml.safe_load_all(done.stdout))

    def test_check(self) -> None:
        """A setting, class, connector or place that VUA does not take is noticed."""
        words = command("vllm-integration.md", "Qwen/Qwen3-8B")
        for old, new in (("VUATier", "Tier"), ('"path"', '"root_dir"'), (TIER, "Offloading"),
                         ("/mnt/kv", "/mnt"), ('"path"', '"max_bytes": 1, "path"')):  # fmt: skip
            with self.subTest(new), self.assertRaises((AssertionError, ConfigError, KeyError)):
                check([one.replace(old, new) for one in words], "/mnt")
