"""Secrets of this process, kept out of every text that people may read.

`cluster` passes its credentials to `conceal` as soon as it has read them. `ClusterError`, the
journal's `bounded` and `log` pass their texts through `redacted`, so a token is in no message, log
line, traceback, event or page, even where an API server repeats our request in its answer.
"""

from __future__ import annotations

import re
import threading

HIDDEN = "(hidden)"

# A token lives an hour, so a few generations also cover late replies of an API server that quote an
# earlier one.
_MAX_SECRETS = 16
# Shorter texts are words, and replacing them would garble messages.
_SHORTEST_SECRET = 8

# Credentials that were not passed to `conceal`, by their form: a header, a JSON Web Token, userinfo
# in a URL, a private key.
_FORMS = re.compile(
    r"(?P<scheme>\b(?:Bearer|Basic)\s+)[^\s\"',;]+"
    r"|\beyJ[\w-]{8,}(?:\.[\w-]*)*"
    r"|(?P<url>\b[a-z][a-z0-9+.-]{0,20}://)[^\s/@\"']+@"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?",
    re.ASCII | re.IGNORECASE,
)
# Each match of `_FORMS` contains one of these, in any case.
_FORM_HINTS = ("://", "eyj", "bearer", "basic", "private key")
# Replaced as a whole, so that any thread can read it while another adds a secret; the latest come
# last.
_secrets: tuple[str, ...] = ()
_adding = threading.Lock()


def conceal(secret: str) -> None:
    """Redact ``secret`` and each of its words from now on. Words of less than eight characters are
    ignored, and only the latest secrets are kept.
    """
    global _secrets  # noqa: PLW0603 - one per process, like its credentials
    texts = {text for text in (secret, *secret.split()) if len(text) >= _SHORTEST_SECRET}
    with _adding:
        _secrets = (*(known for known in _secrets if known not in texts), *texts)[-_MAX_SECRETS:]


def _may_match(text: str) -> bool:
    """Tell whether `_FORMS` can match; much quicker than trying it."""
    low = text.lower()
    return any(part in low for part in _FORM_HINTS)


def redacted(text: str) -> str:
    """Return ``text`` without secrets: those passed to `conceal`,
    and everything that looks like credentials.
    """
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    if _may_match(text):
        text = _FORMS.sub(
            lambda found: (
                f"{found['scheme'] or found['url'] or ''}{HIDDEN}{'@' if found['url'] else ''}"
            ),
            text,
        )
    return text
