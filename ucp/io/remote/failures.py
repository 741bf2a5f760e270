"""What the libraries of stores raise, as errors of ours: what failed, where, and what to do.

Their errors are not chained to ours: a traceback would show requests, with what they were signed by.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from ucp.errors import (
    AccessError,
    ChangedError,
    ConnectionLostError,
    DestinationError,
    MissingFileError,
    MissingLibraryError,
    SourceError,
    UcpError,
)
from ucp.io.remote.url import EXTRAS, bucket_of, redacted, scheme_of

_LIBRARIES = (
    *("aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "google"),
    *("httpx", "httpx2", "huggingface_hub", "requests", "s3fs"),
)
"""Packages whose own exceptions are failures of a store, not mistakes of this program."""

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "hf": "HF_TOKEN, or `hf auth login`",
    "memory": "nothing",
}
"""Where each library looks for them."""

_TIMEOUTS = ("Timeout", "TimedOut")
_BROKEN = ("ClientPayloadError", "IncompleteRead", "ContentLengthError", "ResponseStreamingError", "ChunkedEncoding")
_UNREACHED = (
    "ConnectionError",
    "EndpointConnection",
    "ConnectorError",
    "ServerDisconnected",
    "ConnectError",
    "OSError",
)
_NO_KEYS = ("Credential", "SSOToken", "TokenRetrieval", "ProfileNotFound", "RefreshError", "LocalTokenNotFound")
_REFUSED = ("Permission", "Forbidden", "Unauthorized", "GatedRepo")
_ANSWERED = ("HttpError", "HTTPError")
"""Errors that say what a store answered: it was reached."""


@contextmanager
def told(url: str, *, doing: str = "read") -> Iterator[None]:
    """Raise what a library raises about `url` as an error of ours. `doing`: what to, "read" or "write"."""
    try:
        yield
    except UcpError:
        raise
    except Exception as error:
        modules = [type(error).__module__]
        if isinstance(error, ValueError):  # for what a store answers, or for a name or an endpoint that none has
            modules += [frame.f_globals.get("__name__", "") for frame, _ in list(walk_tb(error.__traceback__))[-1:]]
        if isinstance(error, OSError | ImportError) or any(own.partition(".")[0] in _LIBRARIES for own in modules):
            raise failure(error, url, doing=doing) from None
        raise


def failure(error: BaseException, url: str, *, doing: str = "read") -> UcpError:
    """The error that `error`, of a library of a store, is to a user who reads or writes `url`."""
    scheme, kinds = scheme_of(url), [own.__name__ for own in type(error).__mro__]

    def is_one(names: tuple[str, ...]) -> bool:
        return any(name in kind for kind in kinds for name in names)

    if isinstance(error, ImportError) and EXTRAS[scheme][0] in str(error):
        return missing_library(scheme)
    if is_one(("FileExpired",)):
        return changed(url)
    if is_one(_NO_KEYS) or is_one(_REFUSED) or _status(error) in (401, 403):
        why = f"{'there are no credentials' if is_one(_NO_KEYS) else 'the store refused'} ({_reason(error)})"
        return AccessError(
            f"cannot {doing} {url}: {why}. Credentials come from the environment: {CREDENTIALS[scheme]}; they must "
            f"allow listing and reading{', writing and deleting' if doing == 'write' else ''}"
        )
    if isinstance(error, FileNotFoundError) and doing == "write":
        return DestinationError(f"cannot write {url}: there is no bucket {bucket_of(url)!r}. Create it first")
    if isinstance(error, FileNotFoundError):
        return MissingFileError(f"expected an object at {url}; nothing is there. Check the URL")
    is_late = isinstance(error, TimeoutError) or is_one(_TIMEOUTS)
    if is_late or is_one(_BROKEN):
        what = "the store did not answer in time, though" if is_late else "answers broke off before their end, though"
        return ConnectionLostError(
            f"cannot {doing} {url}: {what} asked several times. Try again; a conversion goes on with --resume"
        )
    lost = getattr(error, "errno", None) in (None, errno.ECONNREFUSED, errno.ECONNRESET)
    if lost and is_one(_UNREACHED) and not is_one(_ANSWERED):
        return ConnectionLostError(
            f"cannot {doing} {url}: the store cannot be reached ({_reason(error)}). Check the network and the endpoint"
        )
    kind = DestinationError if doing == "write" else SourceError
    return kind(f"cannot {doing} {url}: {_reason(error)}")


def _status(error: BaseException) -> int:
    """The status of HTTP that an error of gcsfs or huggingface_hub stands for; 0 where it says none."""
    if isinstance(error, OSError) and str(error).startswith("Forbidden: "):  # what gcsfs makes of 403
        return 403
    found = str(getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None))
    return int(found) if found.isdecimal() else 0


def missing_library(scheme: str) -> MissingLibraryError:
    """The error for a store whose library is not installed."""
    package, extra = EXTRAS[scheme]
    return MissingLibraryError(
        f"{scheme}:// is read by {package}, which is not installed: pip install 'universal-checkpoint[{extra}]'"
    )


def changed(url: str) -> ChangedError:
    """The error for an object that is another one than the index was read of."""
    return ChangedError(
        f"{url} was replaced while it was read: it is not the object that was seen at first. Wait until whoever writes "
        "there is done, then begin again"
    )


def _reason(error: BaseException) -> str:
    text = " ".join(redacted(str(error)).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
