"""Redaction: what settings refuse, and what log lines, errors, run states and dead letters show as `***`.

Credentials in a URL are refused where a setting is validated, and masked wherever a text is printed or stored, because
libraries quote the URLs of proxies and stores in their errors. Ray's reports of exhausted memory list the command lines of all
processes of a node, those of other users too; they are left out.
"""

import re
from collections.abc import Iterator
from typing import Any

MASK = "***"
VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": "AZURE_STORAGE_ACCOUNT_KEY",
    "abfss": "AZURE_STORAGE_ACCOUNT_KEY",
}
"""Scheme of an object store -> environment variables with its credentials."""

_HOST = r"(?:[\w.-]*[A-Za-z][\w.-]*|\d+(?:\.\d+){3}|\[[\da-fA-F:.]+\])"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # scheme://user:password@. A password with an unquoted `/`, `?` or `#` is found too: what follows the colon is no port.
    (
        re.compile(
            r"(?P<scheme>\b[a-z][\w+.-]*:/{1,2}|(?<![:/\w])//)"
            r"(?:[^\s/?#@:\[\]]*:(?!\d*(?:[/?#]|\s|$))\S*|[^\s/?#:@]*:[^\s/?#]*)@(?!sha\d+:)",
            re.IGNORECASE,
        ),
        rf"\g<scheme>{MASK}@",
    ),
    # https://token@: where no one has a user name without a password, it is a secret itself.
    (re.compile(r"\b((?:[\w.-]+\+)?(?:https?|wss?|grpcs?|rediss?|s3)://)[^\s/?#@]+@", re.IGNORECASE), rf"\g<1>{MASK}@"),
    # user:password@host, as proxies and addresses are written without a scheme. `image:tag@sha256:...` is none.
    (
        re.compile(rf"(?<![\w/.+@-])[^\s/@:'\"=()]{{0,256}}:[^\s/@'\"]{{1,4096}}@(?!sha\d+:)(?={_HOST}(?![\w@]))"),
        f"{MASK}@",
    ),
    # ?api_key=, &sig= (shared access signatures), #access_token=
    (
        re.compile(
            r"([?&#](?:[\w.%-]*(?:key|token|secret|passw(?:or)?d|pwd|passphrase|signature|credentials?)"
            r"|sig|auth|authorization|sas|jwt|code|pass)=)[^\s&#'\"<>]+",
            re.IGNORECASE,
        ),
        rf"\g<1>{MASK}",
    ),
)
_PROCESSES = re.compile(
    r"(?:Object store memory usage: \[|Top \d+ memory users:).*?(?=Refer to the documentation|\Z)"
    r"|^\d+\t\d+\.\d+\t[^\n]*\n?",
    re.DOTALL | re.MULTILINE,
)


def masked(text: str) -> str:
    """Return a text for a log or a file: credentials in URLs are masked, and tables of processes are left out."""
    for pattern, mask in _PATTERNS:
        text = pattern.sub(mask, text)
    return _PROCESSES.sub("", text)


def holds_credentials(value: Any) -> bool:
    """Whether a string, or a string in a list, tuple or mapping, holds credentials in a URL."""
    return any(pattern.search(text) for text in _strings(value) for pattern, _ in _PATTERNS)


def where_they_belong(value: Any, variable: str = "an environment variable") -> str:
    """Return why a setting refuses credentials, and where they belong: of an object store, into its own variables."""
    schemes = (text.partition("://")[0].lower() for text in _strings(value) if holds_credentials(text))
    variable = next(filter(None, map(VARIABLES.get, schemes)), variable)
    return f"must not hold credentials, because logs and manifests show it; put them into {variable} or a mounted file"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _strings(item)
