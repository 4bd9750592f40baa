"""What is in `deploy/`: metrics that the code has, and an image of the newest vLLM."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

from helpers import ROOT
from vua.connector.metrics import METRICS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEPLOY = ROOT / "deploy"
RULES, DASHBOARD = DEPLOY / "vua-alerts.yml", DEPLOY / "grafana-vua.json"
QUERY = re.compile(r"(vua_[a-z_]+)(?:\{([^}]*)\})?")
PROMTOOL = shutil.which("promtool")
HADOLINT = Path(sys.executable).with_name("hadolint")


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

    @unittest.skipUnless(HADOLINT.exists(), "hadolint is not installed")
    def test_hadolint(self) -> None:
        done = subprocess.run(
            [str(HADOLINT), str(DEPLOY / "docker" / "Dockerfile")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)


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
