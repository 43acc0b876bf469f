"""One set of TCP connections to the API server, made with one set of TLS files,
and the requests over them.

Used by `client`, which makes another set when anything but the token has changed (such as the
server's address or the TLS files), and closes this one when its last request has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from typing import TYPE_CHECKING, Self

import aiohttp

from vgpu_agent import __version__
from vgpu_agent.cluster import answers
from vgpu_agent.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vgpu_agent.cluster.credentials import Access

_READ_BYTES = 256 * 1024  # aiohttp's buffer; it stops reading beyond twice that


class Connections:
    """The connections that were made with one set of TLS files; build them with `opened`.

    Attributes:
        users: the number of requests that use them; `client` counts a request before another
            request can replace and close them.
    """

    def __init__(self, access: Access, context: ssl.SSLContext | None) -> None:
        self.users = 0
        self._access = access
        self._retired = False
        self._responses: set[aiohttp.ClientResponse] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context or True),
            headers={
                "User-Agent": f"vgpu-agent/{__version__}",
                "Accept": "application/json",
                "Accept-Encoding": "identity",
            },
            read_bufsize=_READ_BYTES,
            # no compression is requested, and a small body could decompress into a huge one
            auto_decompress=False,
            # an HTTPS_PROXY that the node happens to set must not be used
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @classmethod
    async def opened(cls, access: Access) -> Self:
        """Return connections to the server of ``access``, which has the server's address, the token
        and the TLS files; the first request opens a connection.

        Raises:
            ClusterError: a TLS file is missing or invalid, such as a key of another certificate.
        """
        return cls(
            access,
            await asyncio.to_thread(_ssl_context, access)
            if access.server.startswith("https:")
            else None,
        )

    @property
    def closed(self) -> bool:
        """Tell whether they can carry no more requests."""
        return self._session.closed

    def suits(self, access: Access) -> bool:
        """Tell whether these connections can be used with ``access``. Its token may differ, because
        each request sends the token.
        """
        return dataclasses.replace(access, authorization="") == dataclasses.replace(
            self._access, authorization=""
        )

    async def request(
        self,
        method: str,
        path: str,
        limits: aiohttp.ClientTimeout,
        seconds: float,
        *,
        params: Mapping[str, str] | None,
        data: bytes | None,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        """Send a request, and return the response if it is a success; the caller then calls
        `leave`.

        Args:
            method: of HTTP.
            path: below the server's URL.
            limits: for the whole of the request; a watch has none for the whole.
            seconds: the time within which at least the headers must arrive.
            params: of the query.
            data: the body.
            headers: in addition to those of every request.

        Raises:
            ClusterError: no answer, or no success.
        """
        access, response = self._access, None
        try:
            # `failures` turns aiohttp's errors into `ClusterError`, `check` any answer other than a
            # success
            with answers.failures(method, path, seconds, server=access.server):
                async with asyncio.timeout(seconds):
                    response = await self._session.request(
                        method,
                        access.server + path,
                        params=params,
                        data=data,
                        headers=headers,
                        timeout=limits,
                        allow_redirects=False,  # a redirect would carry the token elsewhere
                        proxy=access.proxy or None,
                        server_hostname=access.server_name or None,
                    )
                    await answers.check(response, method, path)
        except BaseException:
            if response is not None:
                response.close()
            await self.leave(response)
            raise
        self._responses.add(response)
        return response

    async def leave(self, response: aiohttp.ClientResponse | None) -> None:
        """Count a request as ended. After `retire`, the last one closes the connections."""
        self.users -= 1
        if response is not None:
            self._responses.discard(response)
        if self._retired and self.users == 0:
            await self._session.close()

    async def retire(self) -> None:
        """Close the connections once the last request has ended; there must be no new ones."""
        self._retired = True
        if self.users == 0:
            await self._session.close()

    async def close(self) -> None:
        """Close them now; readers get an error."""
        # aiohttp would leave the readers waiting for ever.
        for response in list(self._responses):
            response.close()
        await self._session.close()


def _ssl_context(access: Access) -> ssl.SSLContext:
    """Build the TLS context of the credentials; reads files.

    Raises:
        ClusterError: a file is missing or invalid, such as a key of another certificate.
    """
    try:
        context = ssl.create_default_context(cafile=access.ca_file or None)
        if access.certificate_file:
            context.load_cert_chain(access.certificate_file, access.key_file or None)
    except (OSError, ValueError) as err:  # ssl.SSLError is an OSError
        files = ", ".join(filter(None, (access.ca_file, access.certificate_file, access.key_file)))
        raise ClusterError(
            f"the TLS files for the API server ({files}) cannot be used: {err}; look into them "
            "with openssl x509"
        ) from err
    # Python 3.13 began to require extensions that the CAs of many clusters do not have and that no
    # other Kubernetes client requires.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not access.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
