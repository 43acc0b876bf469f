"""The three parts of kubernetes_asyncio that this agent uses, imported without the other 1,200 modules.

Importing any module of that package runs its ``__init__`` files, which load every model of the API: 60 MB that are
not needed here. So the packages are registered bare, without running them, and only configuration is loaded below
them. urllib3, which it imports for basic authentication that no API server takes any more, is left out. Used by
`credentials` only. tests/cluster/test_kubernetes_parts.py notices when a new minor version (pinned in pyproject.toml)
has another layout.

Transport is aiohttp, used directly: the package's own transport has no time limits, obeys proxies of the environment
and reads a CA once.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from vgpu_agent.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGE = "kubernetes_asyncio"


class Parts(NamedTuple):
    """The parts of kubernetes_asyncio that are used.

    Attributes:
        configuration: the class ``Configuration``: server, TLS files, token.
        load_incluster_config: fills one from a service account; reads files.
        load_kube_config: a coroutine function that fills one from a kubeconfig file; reads files and may run a credential plugin.
    """

    configuration: Any
    load_incluster_config: Any
    load_kube_config: Any


def load() -> Parts:
    """Import them; later calls cost nothing. Reads files, so not for the event loop's thread.

    Raises:
        ClusterError: the package is not installed.
    """
    if _PACKAGE not in sys.modules:
        client = _bare(f"{_PACKAGE}.client", parent=_bare(_PACKAGE))
        with _without("urllib3"):
            client.Configuration = importlib.import_module(f"{_PACKAGE}.client.configuration").Configuration  # type: ignore[attr-defined]  # what its __init__ would have done
        client.ApiClient = None  # type: ignore[attr-defined]  # imported by name in config/, used only by functions that we do not call
    kube_config = importlib.import_module(f"{_PACKAGE}.config.kube_config")
    incluster = importlib.import_module(f"{_PACKAGE}.config.incluster_config")
    return Parts(kube_config.Configuration, incluster.load_incluster_config, kube_config.load_kube_config)


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """Make imports meanwhile find an empty module of that name, which costs nothing."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


def _bare(name: str, parent: types.ModuleType | None = None) -> types.ModuleType:
    """Register the package ``name`` without running its ``__init__``."""
    last = name.rpartition(".")[2]
    if parent is None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ClusterError(f"the Python package {name} is not installed; install the agent with its locked requirements")
        locations = list(spec.submodule_search_locations)
    else:
        locations = [f"{location}/{last}" for location in parent.__path__]
    package = types.ModuleType(name)
    package.__path__ = locations
    sys.modules[name] = package
    if parent is not None:
        setattr(parent, last, package)
    return package
