"""Turns exceptions of the stores' libraries into UcpErrors, which say what failed, where, and what to do.

They are not chained: a traceback could show signed requests.
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
from ucp.io.remote.url import EXTRAS, bucket_of, redact, scheme_of

_LIBRARIES = (
    *("aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "google"),
    *("httpx", "httpx2", "huggingface_hub", "requests", "s3fs"),
)
"""Packages whose exceptions are failures of a store, not bugs of this program."""

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "hf": "HF_TOKEN, or `hf auth login`",
    "memory": "nothing",
}
"""Where the library of a store looks for credentials."""

_TIMEOUTS = ("Timeout", "TimedOut")
_TRUNCATED = ("ClientPayloadError", "IncompleteRead", "ContentLengthError", "ResponseStreamingError", "ChunkedEncoding")
_UNREACHABLE = (
    "ConnectionError",
    "EndpointConnection",
    "ConnectorError",
    "ServerDisconnected",
    "ConnectError",
    "OSError",
)
_NO_CREDENTIALS = ("Credential", "SSOToken", "TokenRetrieval", "ProfileNotFound", "RefreshError", "LocalTokenNotFound")
_DENIED = ("Permission", "Forbidden", "Unauthorized", "GatedRepo")
_HTTP_ERRORS = ("HttpError", "HTTPError")
"""Errors with an HTTP status: the store was reached."""


@contextmanager
def translate_errors(url: str, *, doing: str = "read") -> Iterator[None]:
    """Raise exceptions of a library as UcpError. `doing`: "read" or "write"."""
    try:
        yield
    except UcpError:
        raise
    except Exception as error:
        modules = [type(error).__module__]
        if isinstance(error, ValueError):  # raised for some answers, names and endpoints
            modules += [frame.f_globals.get("__name__", "") for frame, _ in list(walk_tb(error.__traceback__))[-1:]]
        if isinstance(error, OSError | ImportError) or any(
            module.partition(".")[0] in _LIBRARIES for module in modules
        ):
            raise to_ucp_error(error, url, doing=doing) from None
        raise


def to_ucp_error(error: BaseException, url: str, *, doing: str = "read") -> UcpError:
    """The UcpError for the exception of a library."""
    scheme, class_names = scheme_of(url), [base.__name__ for base in type(error).__mro__]

    def is_kind(names: tuple[str, ...]) -> bool:
        return any(name in kind for kind in class_names for name in names)

    if isinstance(error, ImportError) and EXTRAS[scheme][0] in str(error):
        return missing_library_error(scheme)
    if is_kind(("FileExpired",)):
        return changed_error(url)
    if is_kind(_NO_CREDENTIALS) or is_kind(_DENIED) or _http_status(error) in (401, 403):
        why = f"{'there are no credentials' if is_kind(_NO_CREDENTIALS) else 'access was denied'} ({_reason(error)})"
        return AccessError(
            f"cannot {doing} {url}: {why}. Credentials come from the environment: {CREDENTIALS[scheme]}; they must "
            f"allow listing and reading{', writing and deleting' if doing == 'write' else ''}"
        )
    if isinstance(error, FileNotFoundError) and doing == "write":
        return DestinationError(f"cannot write {url}: there is no bucket {bucket_of(url)!r}. Create it first")
    if isinstance(error, FileNotFoundError):
        return MissingFileError(f"expected an object at {url}; nothing is there. Check the URL")
    is_late = isinstance(error, TimeoutError) or is_kind(_TIMEOUTS)
    if is_late or is_kind(_TRUNCATED):
        what = "the store did not answer in time" if is_late else "the store's answers were cut off"
        return ConnectionLostError(
            f"cannot {doing} {url}: {what}, in several tries. Try again; a conversion continues with --resume"
        )
    lost = getattr(error, "errno", None) in (None, errno.ECONNREFUSED, errno.ECONNRESET)
    if lost and is_kind(_UNREACHABLE) and not is_kind(_HTTP_ERRORS):
        return ConnectionLostError(
            f"cannot {doing} {url}: the store cannot be reached ({_reason(error)}). Check the network and the endpoint"
        )
    kind = DestinationError if doing == "write" else SourceError
    return kind(f"cannot {doing} {url}: {_reason(error)}")


def _http_status(error: BaseException) -> int:
    """HTTP status of an error of gcsfs or huggingface_hub; 0 if it has none."""
    if isinstance(error, OSError) and str(error).startswith("Forbidden: "):  # how gcsfs reports status 403
        return 403
    code = str(getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None))
    return int(code) if code.isdecimal() else 0


def missing_library_error(scheme: str) -> MissingLibraryError:
    """The error for a store whose library is not installed."""
    package, extra = EXTRAS[scheme]
    return MissingLibraryError(
        f"{scheme}:// is read by {package}, which is not installed: pip install 'universal-checkpoint[{extra}]'"
    )


def changed_error(url: str) -> ChangedError:
    """The error for an object that was replaced after its index was read."""
    return ChangedError(
        f"{url} was replaced while it was read. Wait until whoever writes there is done, then begin again"
    )


def _reason(error: BaseException) -> str:
    text = " ".join(redact(str(error)).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
