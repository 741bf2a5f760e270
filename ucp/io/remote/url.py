"""URLs of checkpoints: scheme, bucket, key and nothing else.

URLs end up in manifests, logs and messages, so one with a password, a token or a signature is refused.

>>> check_url("s3://bucket/run")
>>> check_url("s3://key:secret@bucket/run")
Traceback (most recent call last):
ucp.errors.UsageError: expected a URL without a user and password; got s3://***@bucket/run. Credentials come from the \
environment, as the library of the store reads them
"""

from __future__ import annotations

import os
import re

from ucp.errors import UsageError

EXTRAS = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "hf": ("huggingface_hub", "hf"),
    "memory": ("fsspec", "s3"),
}
"""Scheme to the package that reads it, and to our extra that installs the package."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://?")
"""Examples: s3://bucket/run, and s3:/bucket/run, which pathlib turns it into."""

_USER = re.compile(r"(?<=//)[^/\s]*:[^/\s]*@")
"""Example: `key:secret@` of https://key:secret@host/."""

_QUERY = re.compile(r"\?[^\s'\"]*")
"""Example: `?X-Amz-Signature=...` of a signed URL."""

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|CREDENTIAL|SAS", re.IGNORECASE)
"""Found in the names of environment variables with secrets."""


def scheme_of(text: str) -> str:
    """Scheme of a URL; empty for a path.

    >>> scheme_of("s3://bucket/run"), scheme_of("s3:/bucket/run"), scheme_of("run/s3:/x")
    ('s3', 's3', '')
    """
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


def as_url(text: str) -> str:
    """Restore the second slash of a URL, which pathlib drops; any other text is unchanged.

    >>> as_url("s3:/bucket/run"), as_url("s3://bucket/run"), as_url("run/s3:/x"), as_url("s3")
    ('s3://bucket/run', 's3://bucket/run', 'run/s3:/x', 's3')
    """
    scheme, slash, rest = text.partition(":/")
    return f"{scheme}://{rest}" if slash and scheme in EXTRAS and not rest.startswith("/") else text


def key_of(url: str) -> str:
    """The URL without its scheme, as libraries of stores want it.

    >>> key_of("s3://bucket/run")
    'bucket/run'
    """
    return url.partition("://")[2]


def bucket_of(url: str) -> str:
    """Bucket of a URL (of the Hugging Face Hub: its first component).

    >>> bucket_of("s3://bucket/run/step1")
    'bucket'
    """
    return key_of(url).partition("/")[0]


def check_url(url: str) -> None:
    """Raise UsageError unless a URL is a known scheme, a bucket and a key."""
    scheme, rest = scheme_of(url), key_of(url)
    shown = redact(url)
    if shown != url and "@" in shown:
        raise UsageError(
            f"expected a URL without a user and password; got {shown}. Credentials come from the environment, as the "
            "library of the store reads them"
        )
    if "?" in rest or "#" in rest:
        raise UsageError(
            f"expected a URL of a scheme, a bucket and a key; got {shown.partition('?')[0].partition('#')[0]} with a "
            "query. Signed URLs are not supported: give the process its own credentials"
        )
    if scheme not in EXTRAS:
        raise UsageError(
            f"expected a path, or a URL of {', '.join(f'{name}://' for name in EXTRAS)}; got {shown}. Copy it to this "
            "machine, or mount it"
        )
    if not bucket_of(url):
        raise UsageError(f"expected the URL of a bucket, or of a folder in one, such as s3://bucket/run; got {shown}")
    if "::" in rest or any(part in (".", "..") for part in rest.split("/")):
        raise UsageError(f"expected a URL without '..' and '::'; got {shown}")


def redact(text: str) -> str:
    """Replace passwords and queries of URLs, and secrets of the environment, by ***.

    >>> redact("cannot connect to http://me:pw@host/x?X-Amz-Signature=1f")
    'cannot connect to http://***@host/x?***'
    """
    text = _QUERY.sub("?***", _USER.sub("***@", text)) if "://" in text else text
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name) and "FILE" not in name:
            text = text.replace(value, "***")
    return text
