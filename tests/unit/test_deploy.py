"""What stands in deploy/ and in the examples is what the code takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from coordinator.config import from_mapping
from jobspecs.documents import parse_yaml
from jobspecs.reading import read_spec

ROOT = Path(__file__).parents[2]


def test_the_settings_are_settings() -> None:
    values = yaml.safe_load((ROOT / "deploy/coordinator.yaml").read_text())
    settings = from_mapping(values)
    assert {name: getattr(settings, name) for name in values} == values


def test_the_compose_file_names_each_member_of_etcd() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    members = [name for name in services if name.startswith("etcd")]
    assert len(members) == 3
    for name in members:
        assert services[name]["environment"]["ETCD_INITIAL_CLUSTER"].count("=http://") == 3
        assert f"--name={name}" in services[name]["command"]


def test_the_dashboard_shows_metrics_that_exist() -> None:
    source = "".join(path.read_text() for path in (ROOT / "coordinator").rglob("*.py"))
    dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    shown = set(re.findall(r"serai_[a-z_]+", json.dumps([panel["targets"] for panel in dashboard["panels"]])))
    assert len(shown) >= 6
    for name in shown:
        assert f'"{re.sub("_(count|bucket|total|sum)$", "", name)}"' in source, name


@pytest.mark.parametrize(
    "file", sorted((ROOT / "jobspecs/examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_the_examples_are_specs(file: Path) -> None:
    document = parse_yaml(file.read_text())
    assert isinstance(document, dict)
    assert read_spec({"tenant": "a"} | document, tenant=None).name
