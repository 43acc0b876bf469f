"""Names in the kubelet's records, checked before they are used: they end up in paths and in log
lines.

`checkpoint` and `held_ids` check each entry here. An entry with a name that Kubernetes does not
allow is damaged or forged; it is left out and logged once. All other entries count.
"""

from __future__ import annotations

from vgpu_agent import log
from vgpu_agent.errors import quoted
from vgpu_agent.pods import is_container_name, is_object_name, is_uid

_logger = log.get(__name__)
_MAX_LOGGED = 32  # different entries
_changes = log.ChangeFilter()  # what was logged; the records are read before every start


def is_allowed_in_checkpoint(pod_uid: str, container: str) -> bool:
    """Tell whether an entry of the checkpoint has names that Kubernetes allows."""
    return (is_uid(pod_uid) and is_container_name(container)) or _skip(
        "checkpoint", pod_uid, container
    )


def is_allowed_in_pod_resources(namespace: str, pod: str, container: str) -> bool:
    """Tell whether an entry of pod-resources has names that Kubernetes allows."""
    usable = is_object_name(namespace) and is_object_name(pod) and is_container_name(container)
    return usable or _skip("pod-resources", f"{namespace}/{pod}", container)


def _skip(record: str, pod: str, container: str) -> bool:
    """Log a forbidden entry of ``record`` once; return False, the answer about it."""
    if len(_changes) < _MAX_LOGGED and _changes.is_new((record, pod[:256], container[:256])):
        _logger.warning(
            "kubelet.entry_skipped", record=record, pod=quoted(pod), container=quoted(container)
        )
    return False
