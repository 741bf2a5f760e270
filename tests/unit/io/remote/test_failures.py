"""What libraries of stores raise becomes one line of ours, without what is nobody's business."""

from __future__ import annotations

import traceback

import pytest

from ucp.errors import (
    AccessError,
    ChangedError,
    ConnectionLostError,
    MissingFileError,
    MissingLibraryError,
    SourceError,
)
from ucp.io.remote.failures import told
from ucp.io.remote.url import EXTRAS, redacted

SECRET = "wJalrXUtnFEMI/K7MDENG"


def of(library, name, text="", base=Exception):
    """An error of a library, by its name."""
    return type(name, (base,), {"__module__": f"{library}.exceptions"})(text)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (of("botocore", "NoCredentialsError"), AccessError, "there are no credentials"),
        (of("botocore", "TokenRetrievalError"), AccessError, "there are no credentials"),
        (PermissionError("Forbidden"), AccessError, r"refused \(PermissionError: Forbidden\)"),
        (of("huggingface_hub", "GatedRepoError", "gated"), AccessError, "refused"),
        (FileNotFoundError("x"), MissingFileError, "nothing is there"),
        (of("fsspec", "FSTimeoutError", base=TimeoutError), ConnectionLostError, "did not answer in time"),
        (of("botocore", "ReadTimeoutError"), ConnectionLostError, "did not answer in time"),
        (of("aiohttp", "ClientPayloadError", "half"), ConnectionLostError, "broke off before their end"),
        (of("botocore", "EndpointConnectionError", "no route"), ConnectionLostError, "cannot be reached"),
        (ConnectionRefusedError(111, "refused"), ConnectionLostError, "cannot be reached"),
        (of("s3fs", "FileExpired", base=OSError), ChangedError, "was replaced while it was read"),
        (ImportError("s3fs"), MissingLibraryError, r"universal-checkpoint\[s3\]"),
        (OSError(121, "InternalError"), SourceError, "InternalError"),
        (ValueError("Invalid endpoint: nonsense"), SourceError, "Invalid endpoint: nonsense"),
    ],
)
def test_each_failure_is_told(error, kind, said):
    with pytest.raises(kind, match=said) as caught, told("s3://bucket/x"):
        raise error
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", EXTRAS)
def test_every_scheme_says_where_its_credentials_come_from(scheme):
    with pytest.raises(AccessError, match=r"from the environment: [a-zA-Z]"), told(f"{scheme}://bucket/x"):
        raise PermissionError("no")


def test_mistakes_of_this_program_stay_mistakes():
    with pytest.raises(TypeError), told("s3://bucket/x"):
        raise TypeError("len() of None")


def test_no_secret_is_told(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    text = f"{SECRET} of http://me:{SECRET}@host/x?X-Amz-Credential={SECRET}&X-Amz-Signature=deadbeef is wrong"
    try:
        with told("s3://bucket/x"):
            raise PermissionError(text)
    except AccessError as error:
        shown = "".join(traceback.format_exception(error))
    assert "is wrong" in shown
    assert SECRET not in shown.replace("raise PermissionError(text)", "")
    assert "deadbeef" not in shown


def test_what_is_no_secret_stays(monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS_FILE", "/home/me/key.json")
    assert redacted("no such file: /home/me/key.json?") == "no such file: /home/me/key.json?"
    assert redacted("s3://bucket/run@2/x") == "s3://bucket/run@2/x"
