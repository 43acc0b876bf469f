"""The rules for names of NVIDIA's resources; used for names in the configuration and by `iktos`."""

from __future__ import annotations

import re

from vgpu_agent.config.problems import shown

NVIDIA_GPU = "nvidia.com/gpu"
NVIDIA_DOMAIN = "nvidia.com"
"""The domain that NVIDIA's plugin puts before a name without one,
and the only one whose devices can be shared.
"""
MIG_PREFIX = "nvidia.com/mig-"

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*\Z")


def completed_resource_name(name: str) -> tuple[str, str]:
    """Return ``name`` with NVIDIA's domain when it has none (nvidia §2), and why it cannot be
    shared; empty when it can.
    """
    complete = name if "/" in name else f"{NVIDIA_DOMAIN}/{name}"
    return complete, resource_name_problem(complete)


def resource_name_problem(name: str) -> str:
    """Explain why ``name`` (complete, with its domain) cannot be shared, as the end of a sentence;
    empty when it can.

    NVIDIA's rule (nvidia §2): DNS names before and after the slash, stricter than that of
    Kubernetes (IsExtendedResourceName).
    """
    domain, _, base = name.partition("/")
    if len(domain) > 253 or not _DOMAIN.match(domain):
        return f"expected a DNS name before the slash, got {shown(name)}"
    if len(base) > 63 or not _DOMAIN.match(base):
        return (
            "expected up to 63 lower case letters, digits, '-' and '.' after the slash, got "
            f"{shown(name)}"
        )
    if domain != NVIDIA_DOMAIN:
        return f"expected a resource whose name begins with {NVIDIA_DOMAIN}/, got {shown(name)}"
    return ""
