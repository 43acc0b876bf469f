"""The certificate of an HTTPS server, which may be renewed while it is served."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_agent import log
from vgpu_agent.errors import ListenError

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = log.get(__name__)

CERTIFICATE_SECONDS = 5.0  # how often the files are checked, by default


class Certificate:
    """The TLS context of a certificate that may be renewed while it is served.

    State: the context, and the versions of both files that it was loaded from: inode number and
    time of change.
    """

    def __init__(
        self,
        certificate_file: str,
        key_file: str,
        *,
        listen: str,
        flags: str,
        clock: Callable[[], float],
        every_seconds: float | None = None,
    ) -> None:
        """Load the certificate; reads files.

        Args:
            certificate_file: the certificate with its chain, in PEM.
            key_file: its private key, in PEM.
            listen: the address that is served, for messages.
            flags: the settings that name the files, for messages.
            clock: seconds, monotonic.
            every_seconds: how often the files are checked; `CERTIFICATE_SECONDS` where None.

        Raises:
            ListenError: the certificate cannot be used.
        """
        self._files = (Path(certificate_file), Path(key_file))
        self._clock, self._every_seconds = clock, every_seconds
        self._checked_at = clock()
        # why the files could not be loaded at the last check; empty if they could
        self._trouble = ""
        try:
            self._version = self._file_versions()
            self._context = self._load()
        except (OSError, ValueError) as err:
            files = " and ".join(map(str, self._files))
            if isinstance(err, FileNotFoundError) and err.filename:
                reason = f"{err.filename} does not exist"
            else:
                reason = f"{files} cannot be used: {err}"
            raise ListenError(
                f"cannot serve {listen} with TLS: {reason}; mount a certificate with its "
                f"key in PEM, as {flags} name them"
            ) from err

    async def context(self) -> ssl.SSLContext:
        """Return the context after checking the files for a renewed certificate. The object is
        always the same. Its next connections get the newest valid certificate. Call this regularly.
        """
        now = self._clock()
        every = CERTIFICATE_SECONDS if self._every_seconds is None else self._every_seconds
        if now - self._checked_at >= every:
            self._checked_at = now
            try:
                version = await asyncio.to_thread(self._changed_version)
                if version is not None:
                    # Not in a thread: a handshake that came between certificate and key would fail.
                    self._context.load_cert_chain(*self._files)
                    self._version = version
                    _logger.info("web.certificate_renewed", file=str(self._files[0]))
                self._trouble = ""
            except (OSError, ValueError) as err:
                if str(err) != self._trouble:
                    self._trouble = str(err)
                    _logger.warning(
                        "web.certificate_unusable",
                        file=str(self._files[0]),
                        error=str(err),
                        remedy="the one before stays in use; mount a certificate with its key",
                    )
        return self._context

    def _changed_version(self) -> tuple[tuple[int, int], ...] | None:
        """Return the version of files that have changed and can be used; None if they have not.

        Raises:
            OSError: a file cannot be read, or its content is no certificate with its key.
            ValueError: likewise.
        """
        version = self._file_versions()
        if version == self._version:
            return None
        self._load()  # tried first: a wrong key would leave the served context without one
        return version

    def _file_versions(self) -> tuple[tuple[int, int], ...]:
        found = [file.stat() for file in self._files]
        return tuple((one.st_ino, one.st_mtime_ns) for one in found)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files)
        return context
