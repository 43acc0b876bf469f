"""A Kubernetes API server for demos, tests and benchmarks: as much of it as a node agent and a
scheduler use, on a TCP port.

A simulated cluster starts one, puts a Node and pods into `ApiServer.objects` (or creates them over
HTTP, as a user would), and gives the agent the file that `ApiServer.kubeconfig` writes. It shares
no code with the agent's own client, so that the two cannot share a mistake. ``faults``, `down`,
`cut` and ``latency_seconds`` cause failures. ``requests`` lists the requests.

Rules of objects are in `sim.api.objects`; here are HTTP, selectors, pages, and watches.
"""

from __future__ import annotations

import asyncio
import email.utils
import inspect
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
from aiohttp import web

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.api.faults import Fault, FaultKind, Request, take
from vgpu_agent.sim.api.objects import KINDS, ApiRefusalError, ObjectStore
from vgpu_agent.sim.api.requests import Selector, parse_request

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from vgpu_agent.sim.api.objects import Change, Object

    Hook = Callable[[Request], Awaitable[None] | None]

_MAX_BODY_BYTES = 16 * 1024 * 1024
_PAGES_KEPT = 100
# answered to every client, and not recorded
_VERSION = "/version"
_OWN_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_MERGE_PATCH, _STRATEGIC_PATCH = (
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
)


class ApiServer:
    """The server; an async context, or `start` and `stop`.

    Args:
        objects: the cluster's objects; a fresh store by default.
        latency_seconds: how long every answer takes, and the beginning of every watch.
        bookmark_seconds: how often a quiet watch that asked for bookmarks gets one.
        ssl_context: with it, HTTPS is used.

    Attributes:
        requests: every request that could be parsed, since the start or since a test cleared the
            list.
        faults: the faults to come, each for the next request that it matches.
        tokens: the bearer tokens that are accepted; empty accepts every client.
        denied: the rights, (verb, resource), that a SelfSubjectAccessReview denies. Requests are
            carried out all the same.
        clock_offset_seconds: how far the server's clock is ahead, in the header ``Date``.
        before_write: called with each write before anything is changed, and awaited when it can be;
            if it raises, the request is answered with 500.
        after_write: the same after the change, before the answer is sent.
    """

    def __init__(
        self,
        objects: ObjectStore | None = None,
        *,
        latency_seconds: float = 0.0,
        bookmark_seconds: float = 60.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.objects = objects or ObjectStore()
        self.latency_seconds = latency_seconds
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.tokens: set[str] = set()
        self.denied: set[tuple[str, str]] = set()
        self.clock_offset_seconds = 0.0
        self.before_write: Hook | None = None
        self.after_write: Hook | None = None
        self._bookmark_seconds = bookmark_seconds
        self._ssl_context = ssl_context
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._port = 0
        self._pages: dict[str, tuple[int, Sequence[Object]]] = {}

    @property
    def url(self) -> str:
        """The server's URL, e.g. ``http://127.0.0.1:43211``; the port is the same again after
        `down` and `up`.
        """
        return f"{'https' if self._ssl_context else 'http'}://127.0.0.1:{self._port}"

    @property
    def writes(self) -> list[Request]:
        """List the requests that were meant to change something."""
        return [request for request in self.requests if request.is_write]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Serve on a free port of 127.0.0.1."""
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await self.up()

    async def stop(self) -> None:
        """Stop serving and drop every connection; twice is fine."""
        if self._runner is not None:
            self.cut()
            await self._runner.cleanup()
            self._runner = self._site = None

    async def down(self) -> None:
        """Begin an outage: all connections are reset, and new ones refused."""
        if self._site is not None:
            await self._site.stop()
            self._site = None
        self.cut()

    async def up(self) -> None:
        """End an outage; nothing that the server knew is lost."""
        if self._runner is None:
            raise SimulationError(
                "the simulated API server has not been started; call start() before up()"
            )
        if self._site is None:
            self._site = web.TCPSite(
                self._runner,
                "127.0.0.1",
                self._port,
                ssl_context=self._ssl_context,
                reuse_address=True,
            )
            await self._site.start()
            self._port = self._runner.addresses[0][1]

    def cut(self) -> None:
        """Reset every connection there is."""
        server = self._runner.server if self._runner else None
        for connection in list(server.connections) if server else ():
            if connection.transport is not None:
                connection.transport.abort()

    def kubeconfig(
        self,
        path: str | os.PathLike[str],
        *,
        token: str = "",
        certificate_authority: str | os.PathLike[str] = "",
    ) -> Path:
        """Write a kubeconfig file for this server, and return its path. Blocks, so it is not for
        the event loop's thread.

        Args:
            path: of the file; one that exists is replaced.
            token: the bearer token to use; it is not added to ``tokens``.
            certificate_authority: path of the CA certificate, for HTTPS.
        """
        cluster = {"server": self.url} | (
            {"certificate-authority": str(certificate_authority)} if certificate_authority else {}
        )
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "simulated",
            "clusters": [{"name": "simulated", "cluster": cluster}],
            "users": [{"name": "simulated", "user": {"token": token} if token else {}}],
            "contexts": [
                {"name": "simulated", "context": {"cluster": "simulated", "user": "simulated"}}
            ],
        }
        # JSON is YAML, too.
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        return Path(path)

    async def _answer(self, web_request: web.Request) -> web.StreamResponse:
        if web_request.path == _VERSION:
            now = time.time() + self.clock_offset_seconds
            date = email.utils.formatdate(now, usegmt=True)
            return _json({"gitVersion": "v0.0.0-simulated"}, 200, {"Date": date})
        if web_request.path == _OWN_REVIEWS:
            return self._reviewed(await web_request.json())
        try:
            request = await parse_request(web_request)
        except ApiRefusalError as err:
            return _json(err.status, err.code)
        self.requests.append(request)
        try:
            response = await self._answer_parsed(web_request, request)
        except ApiRefusalError as err:
            response = _json(err.status, err.code)
        request.status = response.status
        return response

    def _reviewed(self, review: Any) -> web.Response:
        asked = review["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        allowed = (asked["verb"], resource) not in self.denied
        return _json({**review, "status": {"allowed": allowed}}, 201)

    async def _answer_parsed(
        self, web_request: web.Request, request: Request
    ) -> web.StreamResponse:
        if self.tokens and request.authorization.removeprefix("Bearer ") not in self.tokens:
            raise ApiRefusalError(401, "Unauthorized", "Unauthorized")
        fault = take(self.faults, request)
        if self.latency_seconds:
            await asyncio.sleep(self.latency_seconds)
        if (
            fault is not None
            and (refused := await self._refuse(web_request, request, fault)) is not None
        ):
            return refused
        if request.verb == "watch":
            return await self._watch(web_request, request, fault)
        if request.is_write:
            await _call(self.before_write, request)
        code, answer = self._carry_out(request)
        if request.is_write:
            await _call(self.after_write, request)
        if fault is not None and fault.kind is FaultKind.LOST_ANSWER:
            _abort(web_request)
        body = msgspec.json.encode(answer)
        if fault is not None and fault.kind is FaultKind.TRUNCATED:
            body = body[: len(body) // 2]
        return web.Response(body=body, status=code, content_type="application/json")

    async def _refuse(
        self, web_request: web.Request, request: Request, fault: Fault
    ) -> web.StreamResponse | None:
        """Return a fault's answer instead of the real one; None where the request is carried out
        all the same, and at most its answer is spoilt or lost.
        """
        match fault.kind:
            case FaultKind.STATUS:
                code = fault.code or 500
                text = fault.reason or f"{request.resource}: a fault was ordered"
                headers = (
                    {"Retry-After": str(fault.retry_after_seconds)}
                    if fault.retry_after_seconds
                    else {}
                )
                return _json(
                    ApiRefusalError(code, fault.reason or "InternalError", text).status,
                    code,
                    headers,
                )
            case FaultKind.HTML:
                text = (
                    "<html><head><title>502 Bad Gateway</title></head><body><h1>Bad "
                    "Gateway</h1></body></html>"
                )
                return web.Response(text=text, status=fault.code or 502, content_type="text/html")
            case FaultKind.GARBAGE:
                return web.Response(text="}this is no JSON\n", content_type="application/json")
            case FaultKind.RESET if request.verb != "watch":
                _abort(web_request)
            case FaultKind.SILENCE if request.verb != "watch":
                await asyncio.Event().wait()
            case _:
                pass
        return None

    def _carry_out(self, request: Request) -> tuple[int, object]:
        """Carry the request out; return the HTTP status and the answer's JSON."""
        resource, _, subresource = request.resource.partition("/")
        name, namespace, body = request.name, request.namespace, request.body or {}
        match request.verb, subresource:
            case "get", "" | "status":
                return 200, self.objects.get(resource, name, namespace)
            case "list", "":
                return 200, self._page(request)
            case "patch", "" | "status":
                if request.content_type not in (_MERGE_PATCH, _STRATEGIC_PATCH):
                    text = (
                        "the body of the request was in an unknown format - accepted media types "
                        f"include: {_MERGE_PATCH}"
                    )
                    raise ApiRefusalError(415, "UnsupportedMediaType", text)
                strategic = request.content_type == _STRATEGIC_PATCH
                return 200, self.objects.patch(
                    resource, name, body, namespace, subresource=subresource, strategic=strategic
                )
            case "create", _:
                return 201, self._created(request, body)
            case "delete", "":
                return 200, self.objects.delete(
                    resource, name, namespace, **_delete_options({**request.query, **body})
                )
            case _:
                raise ApiRefusalError(
                    405,
                    "MethodNotAllowed",
                    "the server does not allow this method on the requested resource: "
                    f"{request.method}",
                )

    def _created(self, request: Request, body: Object) -> Object:
        match request.resource:
            case "pods/binding":
                self.objects.bind(request.name, request.namespace, body)
                return _SUCCESS
            case "pods/eviction":
                self.objects.delete(
                    "pods",
                    request.name,
                    request.namespace,
                    **_delete_options(body.get("deleteOptions") or {}),
                )
                return _SUCCESS
            case _:
                return self.objects.create(request.resource, body, request.namespace)

    def _page(self, request: Request) -> Object:
        """Return one page of a list; later pages show the state of the first one."""
        resource, selector = request.resource, Selector.of(request)
        token = request.query.get("continue", "")
        if token:
            if token not in self._pages:
                raise ApiRefusalError(410, "Expired", "The provided continue parameter is too old")
            version, rest = self._pages.pop(token)
        else:
            version = self.objects.version
            rest = [
                item
                for item in self.objects.list(resource, request.namespace)
                if selector.matches(item)
            ]
        limit = int(request.query.get("limit") or 0) or len(rest)
        metadata: Object = {"resourceVersion": str(version)}
        if len(rest) > limit:
            token = f"{version}-{len(rest) - limit}-{len(self.requests)}"
            self._pages[token] = (version, rest[limit:])
            metadata |= {"continue": token, "remainingItemCount": len(rest) - limit}
            if len(self._pages) > _PAGES_KEPT:
                del self._pages[next(iter(self._pages))]
        kind = KINDS[resource]
        # A real API server leaves kind and apiVersion out of the items of a list.
        items = [
            {key: value for key, value in item.items() if key not in ("kind", "apiVersion")}
            for item in rest[:limit]
        ]
        return {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.api_version,
            "metadata": metadata,
            "items": items,
        }

    async def _watch(
        self, web_request: web.Request, request: Request, fault: Fault | None
    ) -> web.StreamResponse:
        selector = Selector.of(request)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(web_request)
        request.status = 200
        if fault is not None and not await self._spoil(web_request, response, fault):
            return response
        lasting = float(request.query.get("timeoutSeconds") or 1800)
        try:
            async with asyncio.timeout(lasting):
                await self._stream(response, request, selector)
        except TimeoutError:
            pass  # a watch ends cleanly when its time is over
        except ApiRefusalError as err:
            await response.write(_event("ERROR", err.status))
        except ConnectionResetError:
            return response  # the client has gone
        await response.write_eof()
        return response

    async def _spoil(
        self, web_request: web.Request, response: web.StreamResponse, fault: Fault
    ) -> bool:
        """Let the fault act on a watch whose headers were sent; tell whether the watch goes on."""
        match fault.kind:
            case FaultKind.CLOSE:
                await response.write_eof()
            case FaultKind.ERROR_EVENT:
                code = fault.code or 410
                reason = fault.reason or ("Expired" if code == 410 else "InternalError")
                await response.write(
                    _event(
                        "ERROR",
                        ApiRefusalError(code, reason, "too old resource version: 1 (2)").status,
                    )
                )
                await response.write_eof()
            case FaultKind.GIANT_LINE:
                await response.write(b'{"type":"MODIFIED","object":{"metadata":{"name":"')
                for _ in range(fault.size // 65536):
                    await response.write(b"x" * 65536)
                await response.write(b'"}}}\n')
            case FaultKind.TRUNCATED:
                await response.write(b'{"type":"MODIFIED","object":{"metadata"')
                await response.write_eof()
            case FaultKind.RESET:
                _abort(web_request)
            case FaultKind.SILENCE:
                await asyncio.Event().wait()
            case _:
                return True
        return fault.kind is FaultKind.GIANT_LINE

    async def _stream(
        self, response: web.StreamResponse, request: Request, selector: Selector
    ) -> None:
        """Send what changes, until the caller's time is over."""
        start = request.query.get("resourceVersion", "")
        position = self.objects.version if start in ("", "0") else int(start)
        if start in ("", "0"):
            for item in self.objects.list(request.resource, request.namespace):
                if selector.matches(item):
                    await response.write(_event("ADDED", item))
        bookmarks = request.query.get("allowWatchBookmarks", "") in ("true", "1", "True")
        while True:
            seen = self.objects.revision.version  # advances with each change, and is no `position`
            changes = self.objects.changes_after(position)
            for change in changes:
                position = change.version
                if change.resource == request.resource and (
                    line := _event_of(change, request.namespace, selector)
                ):
                    await response.write(line)
            try:
                async with asyncio.timeout(self._bookmark_seconds):
                    await self.objects.revision.newer_than(seen)
            except TimeoutError:
                if bookmarks:
                    position = max(position, self.objects.version)
                    metadata = {"resourceVersion": str(position), "creationTimestamp": None}
                    kind = KINDS[request.resource]
                    await response.write(
                        _event(
                            "BOOKMARK",
                            {
                                "kind": kind.kind,
                                "apiVersion": kind.api_version,
                                "metadata": metadata,
                            },
                        )
                    )


_SUCCESS: Object = {
    "kind": "Status",
    "apiVersion": "v1",
    "metadata": {},
    "status": "Success",
    "code": 201,
}


def _event_of(change: Change, namespace: str, selector: Selector) -> bytes:
    """Return the event of a change for a watch of that namespace and selector; empty when it gets
    none.
    """

    def visible(item: Object | None) -> bool:
        return (
            item is not None
            and namespace in ("", item["metadata"].get("namespace", ""))
            and selector.matches(item)
        )

    before, after = visible(change.before), visible(change.after)
    if after:
        return _event("MODIFIED" if before else "ADDED", change.after)
    if before and change.before is not None:
        gone = {
            **change.before,
            "metadata": {**change.before["metadata"], "resourceVersion": str(change.version)},
        }
        return _event("DELETED", gone)
    return b""


def _event(kind: str, item: Any) -> bytes:
    return msgspec.json.encode({"type": kind, "object": item}) + b"\n"


def _delete_options(options: Any) -> dict[str, Any]:
    grace = options.get("gracePeriodSeconds")
    return {
        "uid": (options.get("preconditions") or {}).get("uid") or "",
        "grace_seconds": None if grace is None else int(grace),
    }


def _json(answer: object, code: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(answer),
        status=code,
        headers=headers,
        content_type="application/json",
    )


def _abort(web_request: web.Request) -> None:
    """Reset the connection; nothing that is sent afterwards arrives."""
    if web_request.transport is not None:
        web_request.transport.abort()


async def _call(hook: Hook | None, request: Request) -> None:
    if hook is not None and inspect.isawaitable(waiting := hook(request)):
        await waiting
