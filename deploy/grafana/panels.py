"""The parts that dashboards are made of: panels, rows, variables, and the JSON that Grafana reads.

A dashboard is a list of rows of panels; places, numbers and identifiers are worked out here, so that a change of a
panel is a change of one line there. Must never know what is measured: that stands in make.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = 24
"""Width of a dashboard in Grafana's units."""

SCHEMA_VERSION = 39
"""Grafana 10.4 and newer read it; newer ones migrate it as they load it."""

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"

Step = tuple[float | None, str]
"""From this value on this colour; the first one's value is None."""


@dataclass(frozen=True)
class Query:
    """One expression. legend: with `{{label}}`; instant: the newest value alone."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel. unit: a name of Grafana's units; steps: colours by value; values: words for numbers."""

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    decimals: int | None = None
    least: float | None = None
    most: float | None = None
    steps: Sequence[Step] = ()
    values: Mapping[float, tuple[str, str]] = field(default_factory=dict)
    """Number: (word, colour)."""
    stacked: bool = False
    log_scale: bool = False
    calculation: str = "lastNotNull"
    lines: bool = False
    """Draw `steps` as lines: the limit that a series must not cross."""

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATA_SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": self._options(),
            "targets": [_target(query, index, self.kind) for index, query in enumerate(self.queries)],
            **({"transformations": _ONE_TABLE} if self.kind == "table" else {}),
        }

    def _defaults(self) -> dict[str, Any]:
        steps = [{"value": value, "color": colour} for value, colour in self.steps or ((None, GREEN),)]
        found: dict[str, Any] = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        coloured_by_value = bool(self.steps) and self.kind in ("stat", "gauge", "bargauge", "table")
        found["color"] = {"mode": "thresholds" if coloured_by_value else "palette-classic"}
        for name, value in (("decimals", self.decimals), ("min", self.least), ("max", self.most)):
            if value is not None:
                found[name] = value
        words = {f"{at:g}": {"text": text, "color": colour} for at, (text, colour) in self.values.items()}
        found["mappings"] = [{"type": "value", "options": words}] if words else []
        if self.kind == "timeseries":
            found["custom"] = self._lines()
        if self.kind == "state-timeline":
            found["custom"] = {"fillOpacity": 80, "lineWidth": 0}
        return found

    def _lines(self) -> dict[str, Any]:
        return {
            "drawStyle": "line",
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "fillOpacity": 25 if self.stacked else 5,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            "scaleDistribution": {"type": "log", "log": 10} if self.log_scale else {"type": "linear"},
            "thresholdsStyle": {"mode": "dashed" if self.lines else "off"},
        }

    def _options(self) -> dict[str, Any]:
        reduced = {"calcs": [self.calculation], "fields": "", "values": False}
        match self.kind:
            case "stat":
                return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "none", "textMode": "auto"}
            case "gauge" | "bargauge":
                return {"reduceOptions": reduced, "orientation": "auto"}
            case "table":
                return {"showHeader": True, "cellHeight": "sm"}
            case "state-timeline":
                return {"mergeValues": True, "showValue": "auto", "legend": _LEGEND}
        return {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}}


_LEGEND = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}
_ONE_TABLE = [{"id": "merge", "options": {}}, {"id": "organize", "options": {"excludeByName": {"Time": True}}}]


def _target(query: Query, index: int, kind: str) -> dict[str, Any]:
    instant = query.instant or kind == "table"
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATA_SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": instant,
        "range": not instant,
        "format": "table" if kind == "table" else "time_series",
    }


@dataclass(frozen=True)
class Row:
    """Panels under one heading, from left to right; what is too wide goes below."""

    title: str
    panels: Sequence[Panel]

    def json(self, number: int, y: int) -> tuple[list[dict[str, Any]], int]:
        """Its panels, and the first free line below it."""
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        found: list[dict[str, Any]] = [
            {"id": number, "type": "row", "title": self.title, "collapsed": False, "gridPos": place, "panels": []}
        ]
        y, x, below = y + 1, 0, y + 1
        for panel in self.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, below
            found.append(panel.json(number + len(found), x, y))
            x, below = x + panel.width, max(below, y + panel.height)
        return found, below


@dataclass(frozen=True)
class Variable:
    """A choice above the panels: the values of a label."""

    name: str
    label: str
    query: str
    """`label_values(metric, label)`."""

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": DATA_SOURCE,
            "query": {"query": self.query, "refId": f"variable-{self.name}"},
            "definition": self.query,
            "refresh": 2,
            "sort": 1,
            "multi": self.name != "run",
            "includeAll": self.name != "run",
            "allValue": ".*",
            "current": {},
            "options": [],
            "hide": 0,
        }


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; `name` is the file's and the end of its uid, which must never change: links lead to it."""

    name: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]

    def json(self) -> dict[str, Any]:
        return {
            "uid": f"dips-{self.name}",
            "id": None,
            "title": self.title,
            "description": self.description,
            "tags": ["dips"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "timezone": "browser",
            "time": {"from": "now-3h", "to": "now"},
            "refresh": "10s",
            "templating": {"list": [_DATA_SOURCES, *(variable.json() for variable in self.variables)]},
            "annotations": {"list": [_ALARMS]},
            "links": [_OTHERS],
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterator[dict[str, Any]]:
        number, y = 1, 0
        for row in self.rows:
            found, y = row.json(number, y)
            number += len(found)
            yield from found


_DATA_SOURCES = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "current": {},
    "options": [],
    "refresh": 1,
    "hide": 0,
}
_OTHERS = {
    "type": "dashboards",
    "title": "Di-PS",
    "tags": ["dips"],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
}
_ALARMS = {
    "name": "Alarms",
    "enable": True,
    "datasource": DATA_SOURCE,
    "expr": 'ALERTS{alertname=~"Dips.*", alertstate="firing", run="$run"}',
    "titleFormat": "{{alertname}}",
    "textFormat": "{{cluster}} {{slave}}",
    "iconColor": RED,
}
