"""The dashboard and the alert rules in `deploy/` speak of metrics that the code has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from vua.connector.metrics import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
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
    """What the dashboard asks Prometheus."""
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    return [one["expr"] for panel in dashboard["panels"] for one in panel.get("targets", ())]


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
        """The dashboard has every metric."""
        shown = " ".join(expressions())
        self.assertEqual([], [name for name in METRICS if name not in shown])

    def test_panels(self) -> None:
        """Panels have ids of their own, and none lies on another."""
        panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
        self.assertEqual(len(panels), len({one["id"] for one in panels}))
        cells = [
            (x, y)
            for at in (one["gridPos"] for one in panels)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ]
        self.assertEqual(len(cells), len(set(cells)))
        self.assertLess(max(x for x, _ in cells), 24)

    @unittest.skipUnless(PROMTOOL, "promtool is not installed (Debian: prometheus)")
    def test_rules(self) -> None:
        """Prometheus' own tool takes the rules, and sees each one fire."""
        for words in (["check", "rules", RULES], ["test", "rules", DEPLOY / "vua-alerts.test.yml"]):
            done = subprocess.run(
                [str(PROMTOOL), *map(str, words)], capture_output=True, text=True, check=False
            )
            self.assertEqual(0, done.returncode, done.stdout + done.stderr)

    @unittest.skipUnless(PROMTOOL, "promtool is not installed (Debian: prometheus)")
    def test_expressions(self) -> None:
        """It also understands what the dashboard asks."""
        given = {"$__rate_interval": "5m", "$__range": "1h", "$job": ".*", "$instance": ".*"}
        rules = []
        for number, text in enumerate(expressions()):
            for name, value in given.items():
                text = text.replace(name, value)  # noqa: PLW2901
            rules.append({"record": f"panel:{number}", "expr": text})
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as stream:
            json.dump({"groups": [{"name": "panels", "rules": rules}]}, stream)  # JSON is YAML
            stream.flush()
            done = subprocess.run(
                [str(PROMTOOL), "check", "rules", stream.name],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
