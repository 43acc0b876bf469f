"""The content of the simulated API server: objects, their versions, and the changes that watches
report.

Used by `sim.api.server`, which puts HTTP in front of it, and directly by tests and the demo to look
at or change something without a request. It has those of Kubernetes' rules that a node agent and a
scheduler can meet: versions, preconditions, a Binding that sets node and annotations at once,
deletion with grace, status as a subresource. A refusal has the code and the reason of the real
server.

Objects are plain JSON values and never changed in place. Receivers must not change them either.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import itertools
import uuid
from typing import TYPE_CHECKING, Any

from vgpu_agent.concurrency import Latest
from vgpu_agent.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One resource of the API: the name in its path, the kind of its objects, and whether they have
    a namespace and a status.
    """

    resource: str
    kind: str
    api_version: str = "v1"
    namespaced: bool = True
    has_status: bool = False


KINDS = {
    kind.resource: kind
    for kind in (
        Kind("nodes", "Node", namespaced=False, has_status=True),
        Kind("pods", "Pod", has_status=True),
        Kind("configmaps", "ConfigMap"),
        Kind("events", "Event"),
        Kind("poddisruptionbudgets", "PodDisruptionBudget", "policy/v1", has_status=True),
        Kind("secrets", "Secret"),
        Kind("leases", "Lease", "coordination.k8s.io/v1"),
        *(
            Kind(
                f"{kind.lower()}webhookconfigurations",
                f"{kind}WebhookConfiguration",
                "admissionregistration.k8s.io/v1",
                namespaced=False,
            )
            for kind in ("Mutating", "Validating")
        ),
    )
}


class ApiRefusalError(SimulationError):
    """The request is answered with a Status object.

    Attributes:
        code: the HTTP status.
        reason: the machine-readable reason, e.g. ``Conflict``.
    """

    def __init__(self, code: int, reason: str, text: str) -> None:
        self.code, self.reason = code, reason
        super().__init__(text)

    @property
    def status(self) -> Object:
        """The Status object of this refusal."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


@dataclasses.dataclass(frozen=True)
class Change:
    """One step of the history: an object before and after; None when it did not exist."""

    version: int
    resource: str
    before: Object | None
    after: Object | None


class ObjectStore:
    """All objects of the simulated cluster.

    State: in memory only. Every change gets the next resource version and a place in the history,
    which keeps the last ``history`` changes.
    """

    def __init__(self, *, history: int = 10_000) -> None:
        # the resource version of the last change; watches wait for a newer one
        self.revision: Latest[int] = Latest(1)
        # resource → (namespace, name) → object
        self._objects: dict[str, dict[tuple[str, str], Object]] = {
            resource: {} for resource in KINDS
        }
        self._history: list[Change] = []
        self._max_history = history
        self._forgotten = 0  # the version up to which changes are no longer in the history
        self._numbers = itertools.count(1)  # the ends of generated names

    @property
    def version(self) -> int:
        """The resource version of the last change."""
        return self.revision.value

    def get(self, resource: str, name: str, namespace: str = "") -> Object:
        """The object of that name.

        Raises:
            ApiRefusalError: 404, there is none.
        """
        found = self._objects[resource].get((namespace, name))
        if found is None:
            raise ApiRefusalError(404, "NotFound", f'{resource} "{name}" not found')
        return found

    def list(self, resource: str, namespace: str = "") -> Sequence[Object]:
        """All objects of that resource, or those of one namespace, by namespace and name."""
        return [
            self._objects[resource][key]
            for key in sorted(self._objects[resource])
            if not namespace or key[0] == namespace
        ]

    def create(self, resource: str, wanted: Mapping[str, Any], namespace: str = "") -> Object:
        """Add an object, and fill in its UID, version and creation time as the API server does.

        A UID or a creation time that ``wanted`` names is kept, unlike in a real API server, so
        that a test can choose it.

        Raises:
            ApiRefusalError: 409, the name is taken; 422, it has no name.
        """
        kind = KINDS[resource]
        created: Object = copy.deepcopy(dict(wanted))
        metadata = created.setdefault("metadata", {})
        name = metadata.get("name") or (
            f"{metadata['generateName']}{next(self._numbers):05d}"
            if metadata.get("generateName")
            else ""
        )
        if not name:
            raise ApiRefusalError(
                422,
                "Invalid",
                f"{kind.kind} is invalid: metadata.name: Required value: name or generateName is "
                "required",
            )
        namespace = (namespace or metadata.get("namespace") or "default") if kind.namespaced else ""
        if (namespace, name) in self._objects[resource]:
            raise ApiRefusalError(409, "AlreadyExists", f'{resource} "{name}" already exists')
        metadata["name"] = name
        if namespace:
            metadata["namespace"] = namespace
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", _now())
        created.setdefault("apiVersion", kind.api_version)
        created.setdefault("kind", kind.kind)
        if resource == "pods":
            created.setdefault("spec", {}).setdefault("schedulerName", "default-scheduler")
            created.setdefault("status", {}).setdefault("phase", "Pending")
        return self._put(resource, (namespace, name), created)

    def patch(
        self,
        resource: str,
        name: str,
        patch: Mapping[str, Any],
        namespace: str = "",
        *,
        subresource: str = "",
        strategic: bool = False,
    ) -> Object:
        """Merge ``patch`` into an object; a patch that changes nothing makes no new version.

        Args:
            resource: e.g. ``pods``.
            name: of the object.
            patch: what to merge; None removes a key. ``metadata.uid`` and
                ``metadata.resourceVersion`` in it are preconditions.
            namespace: empty for objects without one.
            subresource: ``status`` changes only status and metadata; without it, status is left as
                it was.
            strategic: merge conditions by their type instead of replacing the whole list.

        Raises:
            ApiRefusalError: 404; 409, the version is another; 422, it would change a fixed field,
                the UID for example.
        """
        kind, before = KINDS[resource], self.get(resource, name, namespace)
        wanted = patch.get("metadata") or {}
        self._check_preconditions(
            resource, name, before, {"resourceVersion": wanted.get("resourceVersion")}
        )
        if wanted.get("uid") not in (None, before["metadata"]["uid"]):
            # Not a conflict: a real API server, too, takes a patch with another UID for an attempt
            # to change the UID.
            text = (
                f'{kind.kind} "{name}" is invalid: metadata.uid: Invalid value: "{wanted["uid"]}": '
                "field is immutable"
            )
            raise ApiRefusalError(422, "Invalid", text)
        after: Object = _merged(before, patch, strategic=strategic)
        for key in ("name", "namespace", "uid", "creationTimestamp", "resourceVersion"):
            _keep(before["metadata"], after["metadata"], key)
        for key in ("kind", "apiVersion"):
            _keep(before, after, key)
        if kind.has_status:
            _keep(before, after, "spec" if subresource else "status")
        if resource == "pods" and after.get("spec") != before.get("spec"):
            raise ApiRefusalError(
                422,
                "Invalid",
                f'Pod "{name}" is invalid: spec: Forbidden: pod updates may not change this field',
            )
        return before if after == before else self._put(resource, (namespace, name), after)

    def bind(self, name: str, namespace: str, binding: Mapping[str, Any]) -> Object:
        """Set a pod's node, and add the Binding's annotations and labels to its own, in one change.

        Raises:
            ApiRefusalError: 404; 409, the pod is bound already, is being deleted, or has another
                UID.
        """
        pod = self.get("pods", name, namespace)
        metadata, target = (
            binding.get("metadata") or {},
            (binding.get("target") or {}).get("name", ""),
        )
        self._check_preconditions("pods", name, pod, {"uid": metadata.get("uid")})
        if not target:
            raise ApiRefusalError(500, "", "target.name: Required value")
        if pod["metadata"].get("deletionTimestamp"):
            raise _conflict(
                "pods/binding", name, f"pod {name} is being deleted, cannot be assigned to a host"
            )
        if pod["spec"].get("nodeName"):
            raise _conflict(
                "pods/binding",
                name,
                f"pod {name} is already assigned to node {pod['spec']['nodeName']!r}",
            )
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": _now()}
        change = {
            "metadata": {
                key: dict(metadata[key]) for key in ("annotations", "labels") if metadata.get(key)
            },
            "spec": {"nodeName": target},
            "status": {"conditions": [scheduled]},
        }
        return self._put("pods", (namespace, name), _merged(pod, change, strategic=True))

    def delete(
        self,
        resource: str,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace_seconds: int | None = None,
    ) -> Object:
        """Remove an object; a bound pod only gets a deletion time, until it is deleted with 0
        seconds of grace.

        Raises:
            ApiRefusalError: 404; 409, the object of that name has another UID.
        """
        found = self.get(resource, name, namespace)
        self._check_preconditions(resource, name, found, {"uid": uid or None})
        bound = resource == "pods" and (found.get("spec") or {}).get("nodeName")
        if bound and grace_seconds != 0:
            if found["metadata"].get("deletionTimestamp"):
                return found
            grace = 30 if grace_seconds is None else grace_seconds
            change = {
                "metadata": {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": grace}
            }
            return self._put(resource, (namespace, name), _merged(found, change))
        del self._objects[resource][namespace, name]
        version = self.version + 1
        last: Object = _merged(found, {"metadata": {"resourceVersion": str(version)}})
        self._record(Change(version, resource, last, None))
        return last

    def set_status(
        self, resource: str, name: str, status: Mapping[str, Any], namespace: str = ""
    ) -> Object:
        """Merge into the status of an object, as the kubelet would."""
        return self.patch(resource, name, {"status": status}, namespace, subresource="status")

    def changes_after(self, version: int) -> Sequence[Change]:
        """Every change later than ``version``, oldest first.

        Raises:
            ApiRefusalError: 410, the history does not reach back that far.
        """
        if version < self._forgotten:
            text = f"too old resource version: {version} ({self._forgotten})"
            raise ApiRefusalError(410, "Expired", text)
        first = max(0, version - self._forgotten)
        return self._history[first:]

    def compact(self) -> None:
        """Forget the history, as etcd does every few minutes: a watch from an earlier version must
        list again.
        """
        self._history.clear()
        self._forgotten = self.version

    def _put(self, resource: str, key: tuple[str, str], wanted: Object) -> Object:
        version = self.version + 1
        stored = {**wanted, "metadata": {**wanted["metadata"], "resourceVersion": str(version)}}
        before = self._objects[resource].get(key)
        self._objects[resource][key] = stored
        self._record(Change(version, resource, before, stored))
        return stored

    def _record(self, change: Change) -> None:
        if not self._history:
            self._forgotten = change.version - 1
        self._history.append(change)
        if len(self._history) > 2 * self._max_history:
            del self._history[: -self._max_history]
            self._forgotten = self._history[0].version - 1
        self.revision.publish(change.version)

    @staticmethod
    def _check_preconditions(
        resource: str, name: str, found: Object, wanted: Mapping[str, Any]
    ) -> None:
        metadata = found["metadata"]
        if wanted.get("uid") not in (None, metadata["uid"]):
            raise _conflict(
                resource,
                name,
                f"Precondition failed: UID in precondition: {wanted['uid']}, UID in object meta: "
                f"{metadata['uid']}",
            )
        if wanted.get("resourceVersion") not in (None, "", metadata["resourceVersion"]):
            raise _conflict(
                resource,
                name,
                "the object has been modified; please apply your changes to the latest version and "
                "try again",
            )


def _conflict(resource: str, name: str, why: str) -> ApiRefusalError:
    return ApiRefusalError(
        409, "Conflict", f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    )


def _merged(target: Any, patch: Any, *, strategic: bool = False, field: str = "") -> Any:
    """Apply a JSON merge patch (RFC 7386); with ``strategic``, lists ``conditions`` are merged by
    type.
    """
    if strategic and field == "conditions" and isinstance(patch, list) and isinstance(target, list):
        by_type = {condition["type"]: condition for condition in target}
        for condition in patch:
            by_type[condition["type"]] = {**by_type.get(condition["type"], {}), **condition}
        return list(by_type.values())
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value, strategic=strategic, field=key)
    return merged


def _keep(before: Mapping[str, Any], after: Object, key: str) -> None:
    """Give ``after`` the value that ``before`` has under ``key``, or none where it has none."""
    if key in before:
        after[key] = before[key]
    else:
        after.pop(key, None)


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
