"""A real Prometheus on loopback that reads the repository's own configuration, and questions to it by its HTTP API."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from support.ports import own_port
from support.repository import ROOT
from support.waiting import NO_LIMIT_S, until

CONFIGURATION = ROOT / "deploy" / "prometheus"
WHY_NOT = "needs Prometheus (Debian, Ubuntu: apt-get install prometheus), which is not installed here"


def is_installed() -> bool:
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None


class Prometheus:
    """Use as a context manager. The configuration is the repository's, scraped and evaluated every second in place of
    every ten."""

    def __init__(
        self,
        folder: Path,
        plain: Sequence[object],
        tls: Sequence[object],
        keys: Path,
        jobs: Sequence[Mapping[str, object]] = (),
    ) -> None:
        """plain, tls: the entries of the files that name targets; keys: Prometheus' own, for the second kind; jobs: to
        be scraped in addition to the configuration's.
        """
        self._folder = folder
        self.url = f"http://127.0.0.1:{own_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        shutil.copytree(CONFIGURATION, folder)
        self._configuration = folder / "prometheus-tls.yml"
        text = self._configuration.read_text()
        quick = text.replace("_interval: 10s", "_interval: 1s").replace("scrape_timeout: 5s", "scrape_timeout: 1s")
        assert quick.count("_interval: 1s") == 2, "prometheus-tls.yml has other intervals than this test knows"
        configuration = yaml.safe_load(quick)
        configuration["scrape_configs"] += [{**dict(job), "scrape_interval": "1s"} for job in jobs]
        self._configuration.write_text(yaml.safe_dump(configuration))
        for name, targets in (("targets", plain), ("targets-tls", tls)):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "live.json").write_text(json.dumps(targets))
        shutil.copytree(keys, folder / "keys")

    def __enter__(self) -> Prometheus:
        command = [
            "prometheus", f"--config.file={self._configuration}", f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn",
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        until(self._is_ready, "Prometheus is ready", self._log)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    @property
    def _log(self) -> Path:
        return self._folder / "prometheus.log"

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "Prometheus ended"
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, path: str, **parameters: object) -> Any:
        query = urllib.parse.urlencode({name: str(value) for name, value in parameters.items()})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=NO_LIMIT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def range(self, expr: str, begin_s: float, end_s: float, step_s: float = 2.0) -> list[dict[str, Any]]:
        found = self.ask("query_range", query=expr, start=begin_s, end=end_s, step=step_s)["result"]
        return [one for one in found if _has_value(one)]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("targets", state="active")["activeTargets"]
        return found


def _has_value(series: Mapping[str, Any]) -> bool:
    return any(not math.isnan(float(value)) for _, value in series.get("values", [])) or bool(series.get("histograms"))
