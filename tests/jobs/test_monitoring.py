"""Alerts and dashboards of jobs/monitoring: valid for Prometheus, on metrics that exist, each alert with its runbook."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from infembed_ray.telemetry import METRICS
from scripts import reference

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "jobs" / "monitoring"
ALERTS = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARDS = {file.stem: json.loads(file.read_text()) for file in sorted(MONITORING.glob("*.json"))}
QUERIES = [target["expr"] for board in DASHBOARDS.values() for panel in board["panels"] for target in panel["targets"]]
SUFFIXES = re.compile(r"_(total|bucket|sum|count)$")


@pytest.fixture
def promtool():
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")

    def run(*arguments, **options):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_the_pages_prometheus_file_is_valid(promtool, tmp_path):
    page = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    (file,) = re.findall(r"```yaml\n(rule_files.*?)```", page, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(file)
    (tmp_path / "metrics.key").write_text("key")
    shutil.copy(MONITORING / "alerts.yaml", tmp_path)
    promtool("check", "config", "prometheus.yml", cwd=tmp_path)


def test_every_metric_exists():
    used = set(re.findall(r"\w*infembed_\w+", " ".join([*QUERIES, *(alert["expr"] for alert in ALERTS)])))
    of_stages = {name.removeprefix("ray_infembed_") for name in used if name.startswith("ray_")}
    assert of_stages <= METRICS.keys()
    assert len(of_stages) < len(used)
    of_the_api = [name for name in used if not name.startswith("ray_")]
    assert {SUFFIXES.sub("", name) for name in of_the_api} <= reference.metrics().keys()


def test_every_alert_has_a_section_in_the_runbook():
    page = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### (Infembed\w+)$", page, re.MULTILINE)
    assert sections == [alert["alert"] for alert in ALERTS]
    for alert in ALERTS:
        assert alert["annotations"]["runbook_url"] == f"docs/operations/monitoring.md#{alert['alert'].lower()}"


def test_each_alert_fires_on_its_fault_and_none_on_a_healthy_api(promtool, tmp_path):
    shutil.copy(MONITORING / "alerts.yaml", tmp_path)
    shutil.copy(ROOT / "tests" / "jobs" / "alerts_test.yaml", tmp_path)
    promtool("check", "rules", "alerts.yaml", cwd=tmp_path)
    promtool("test", "rules", "alerts_test.yaml", cwd=tmp_path)


def test_the_dashboards_queries_are_valid(promtool, tmp_path):
    plain = [query.replace("$__rate_interval", "1m") for query in QUERIES]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(plain)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "queries.yaml", cwd=tmp_path)
