"""The manifests in `deploy/` are what Kubernetes and Docker Compose take; their settings exist."""

from __future__ import annotations

import copy
import importlib.util
import json
import unittest
from pathlib import Path
from typing import Any

import pytest

from vua.connector.config import defaults
from vua.vllm.serve import with_connector

pytest.importorskip("kubernetes_validate")
pytest.importorskip("check_jsonschema")
pytest.importorskip("jsonschema")
pytest.importorskip("vllm")
import jsonschema
import kubernetes_validate
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))


def objects(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def compose_schema() -> Any:
    spec = importlib.util.find_spec("check_jsonschema")
    assert spec is not None
    assert spec.origin is not None
    schemas = Path(spec.origin).parent / "builtin_schemas" / "vendor"
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
        self.assertEqual(2, len(KUBERNETES))
        for path in KUBERNETES:
            for one in objects(path):
                with self.subTest(path.name, kind=one["kind"]):
                    kubernetes_validate.validate(one, "1.34", strict=True)
                    wrong = copy.deepcopy(one)
                    wrong["specs"] = {}
                    with self.assertRaises(kubernetes_validate.ValidationError):
                        kubernetes_validate.validate(wrong, "1.34", strict=True)

    @pytest.mark.thorough
    def test_compose(self) -> None:
        """Each file fits the specification, and one with a field that it does not know does not."""
        self.assertEqual(2, len(COMPOSE))
        schema = compose_schema()
        for path in COMPOSE:
            with self.subTest(path.name):
                (one,) = objects(path)
                jsonschema.validate(one, schema)
                one["services"]["vllm-x"] = {"imagine": "vllm-vua"}
                with self.assertRaises(jsonschema.ValidationError):
                    jsonschema.validate(one, schema)

    def test_settings(self) -> None:
        """What the engines are started with is what `vua-vllm serve` takes."""
        started = []
        for path in KUBERNETES:
            for one in objects(path):
                if one["kind"] == "Deployment":
                    (container,) = one["spec"]["template"]["spec"]["containers"]
                    arguments = container.get("command") or ["vllm", "serve", *container["args"]]
                    started.append(arguments[1:])
        for path in COMPOSE:
            services = objects(path)[0]["services"]
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
