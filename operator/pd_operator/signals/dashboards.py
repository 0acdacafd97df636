"""Two Grafana dashboards, for charts/pd-operator/files/dashboards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pd_operator.signals.dashboard_panels import DEPLOYMENT, FLEET, READY, Panel, Row

SCHEMA: Final = 39  # of Grafana 11's dashboard JSON; newer ones migrate it
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24  # columns of Grafana's grid
HEIGHT: Final = {"stat": 4, "timeseries": 8, "table": 8}


def files() -> dict[str, str]:
    """Name -> text of each dashboard."""
    return {
        "fleet.json": _text("PD deployments: fleet", "pd-operator-fleet", FLEET, _variables(fleet=True)),
        "deployment.json": _text("PD deployment", "pd-operator-deployment", DEPLOYMENT, _variables(fleet=False)),
    }


def _text(title: str, uid: str, rows: Sequence[Row], variables: Sequence[Mapping[str, Any]]) -> str:
    found = {
        "title": title,
        "uid": uid,
        "tags": ["pd-operator"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(variables)},
        "panels": _panels(rows),
    }
    return json.dumps(found, indent=1) + "\n"


def _variables(*, fleet: bool) -> list[dict[str, Any]]:
    where = "" if fleet else ',namespace="$namespace"'
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    namespace = _variable("namespace", f"label_values({READY}}}, namespace)", everything=fleet)
    return [source, namespace] + ([] if fleet else [_variable("name", f"label_values({READY}{where}}}, name)", everything=False)])


def _variable(name: str, query: str, *, everything: bool) -> dict[str, Any]:
    common = {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
    }
    return common | ({"multi": True, "includeAll": True, "allValue": ".*"} if everything else {})


def _panels(rows: Iterable[Row]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        found.append(
            {"id": len(found) + 1, "type": "row", "title": row.title, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}, "panels": []}
        )
        y, x, tall = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.columns > WIDTH:
                y, x, tall = y + tall, 0, 0
            place = {"x": x, "y": y, "w": panel.columns, "h": HEIGHT[panel.kind]}
            found.append({"id": len(found) + 1, **_panel(panel), "gridPos": place})
            x, tall = x + panel.columns, max(tall, HEIGHT[panel.kind])
        y += tall
    return found


def _panel(panel: Panel) -> dict[str, Any]:
    table = panel.kind == "table"
    targets = [
        {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": expression, "legendFormat": legend or "__auto"}
        | ({"instant": True, "range": False, "format": "table"} if table else {"range": True})
        for n, (expression, legend) in enumerate(panel.queries)
    ]
    made: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
    }
    if panel.text:
        made["description"] = panel.text
    if table:  # the value is 1 in each row, and the time is that of the query
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}]
    return made
