"""The agent's real command line with credentials like those of its pod in a cluster.

There the agent has a service account. The stand-in for the API server has no TLS, which a service
account implies, so the agent is given a kubeconfig, and kubernetes_asyncio would be imported to
read it: 38 MiB that no node with a service account has. Here the file is read without that library.
All else is the agent's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from vgpu_agent.cluster import credentials
from vgpu_agent.config.settings import Settings


def _without_the_library(settings: Settings) -> credentials.Credentials:
    """Return the credentials of ``settings.kubeconfig``,
    which `vgpu_agent.sim.api.server` has written.
    """
    return credentials.Credentials(
        lambda: _access(Path(settings.kubeconfig)), f"kubeconfig {settings.kubeconfig}"
    )


def _access(path: Path) -> credentials.Access:
    (cluster,) = msgspec.json.decode(path.read_bytes())["clusters"]
    return credentials.Access(cluster["cluster"]["server"])


if __name__ == "__main__":
    # before the agent's own modules take it from there
    credentials.credentials = _without_the_library  # type: ignore[assignment]
    from vgpu_agent.cli.main import main

    sys.exit(main())
