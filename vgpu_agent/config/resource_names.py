"""The rules for names of NVIDIA's resources; used by `reading` for names in the files and by `iktos`."""

from __future__ import annotations

import re

from vgpu_agent.config.problems import shown
from vgpu_agent.config.sharing import NVIDIA_DOMAIN

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*\Z")


def resource_name_problem(name: str) -> str | None:
    """Explain why ``name`` (complete, with its domain) cannot be shared, as the end of a sentence; None when it can.

    NVIDIA's rule (nvidia §2): DNS names before and after the slash, stricter than that of Kubernetes (IsExtendedResourceName).
    """
    domain, _, base = name.partition("/")
    if len(domain) > 253 or not _DOMAIN.match(domain):
        return f"expected a DNS name before the slash, got {shown(name)}"
    if len(base) > 63 or not _DOMAIN.match(base):
        return f"expected up to 63 lower case letters, digits, '-' and '.' after the slash, got {shown(name)}"
    if domain != NVIDIA_DOMAIN:
        return f"expected a resource whose name begins with {NVIDIA_DOMAIN}/, got {shown(name)}"
    return None


def complete_resource_name(name: str) -> str:
    """``name`` with NVIDIA's domain when it has none (nvidia §2)."""
    return name if "/" in name else f"nvidia.com/{name}"
