"""Debian's Prometheus: where its programs are, and a server of one's own."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.real_node.rig import cache
from tests.real_node.rig.errors import RequirementError

MONITORING = Path(__file__).resolve().parents[2] / "manifests" / "components" / "monitoring"
_PATIENCE_SECONDS = 60


def programs() -> Path:
    """The folder with `prometheus` and `promtool`.

    The package is unpacked and not installed, because an installed one would start a server of its
    own. It is fetched once per machine.

    Raises:
        RequirementError: they are not here and cannot be had.
    """
    found = shutil.which("promtool")
    if found is not None and (Path(found).parent / "prometheus").exists():
        return Path(found).parent
    if shutil.which("apt-get") is None:
        raise RequirementError("promtool is not in PATH, and there is no apt-get to fetch it")

    def make(folder: Path) -> None:
        download = ["apt-get", "download", "-qq", "prometheus"]
        # Package lists are often absent or stale, and fetching them is slow.
        for command in (download, ["apt-get", "update", "-qq"], download):
            result = subprocess.run(
                command, cwd=folder, text=True, capture_output=True, check=False
            )
            if command is download and result.returncode == 0:
                break
        packages = list(folder.glob("prometheus_*.deb"))
        if len(packages) != 1:
            raise RequirementError(f"apt-get download prometheus: {result.stderr.strip()}")
        subprocess.run(["dpkg-deb", "--extract", str(packages[0]), str(folder)], check=True)
        packages[0].unlink()

    return cache.get("prometheus-debian", make) / "usr" / "bin"


def rules(folder: Path) -> Path:
    """The groups of the PrometheusRule, as Prometheus itself reads them."""
    manifest = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(manifest["spec"], sort_keys=False))
    return path


class Prometheus:
    """A server that scrapes each second and evaluates the alerts.

    State: one process and its data in ``folder``.
    """

    def __init__(self, folder: Path, jobs: Mapping[str, Mapping[str, str]]) -> None:
        """Prepare it for ``jobs``: job → name of the node → address."""
        self._folder, self._began = folder, 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""
        folder.mkdir()
        scrapes = [
            {
                "job_name": job,
                "honor_labels": True,
                "static_configs": [
                    {"targets": [address], "labels": {"node": node}}
                    for node, address in targets.items()
                ],
            }
            for job, targets in jobs.items()
        ]
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules(folder))],
            "scrape_configs": scrapes,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))

    async def start(self, port: int) -> None:
        """Start, and wait until it answers."""
        self._began = time.time()
        self._url = f"http://127.0.0.1:{port}"
        command = [
            str(programs() / "prometheus"),
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        await self.until(lambda: self._ask("/-/ready") or True, "Prometheus to be ready")

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    def _ask(self, path: str, **arguments: str) -> Any:
        query = urllib.parse.urlencode(arguments)
        url = f"{self._url}{path}?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - http, our own
            content = answer.read()
        return json.loads(content) if path.startswith("/api") else content

    def series(self, query: str) -> list[dict[str, Any]]:
        """The series that a query has had at any moment since the start."""
        answer = self._ask(
            "/api/v1/query_range",
            query=query,
            start=str(self._began),
            end=str(time.time()),
            step="1",
        )
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def alerts(self) -> list[dict[str, Any]]:
        """Every alert that is pending or fires."""
        found: list[dict[str, Any]] = self._ask("/api/v1/alerts")["data"]["alerts"]
        return found

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until the condition holds."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                if await asyncio.to_thread(condition):
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                log = (self._folder / "log").read_text()[-2000:]
                raise TimeoutError(f"waited {_PATIENCE_SECONDS} s in vain for {what}: {log}")
            await asyncio.sleep(0.5)
