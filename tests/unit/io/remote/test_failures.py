"""What libraries of stores raise becomes one line of ours, without what is nobody's business."""

from __future__ import annotations

import traceback

import pytest

from ucp import inspect
from ucp.errors import (
    AccessError,
    ChangedError,
    ConnectionLostError,
    MissingFileError,
    MissingLibraryError,
    SourceError,
    UsageError,
)
from ucp.io.remote.failures import translate_errors
from ucp.io.remote.url import EXTRAS, check_url, redact

SECRET = "wJalrXUtnFEMI/K7MDENG"


def of(library, name, text="", base=Exception):
    """An error of a library, by its name."""
    return type(name, (base,), {"__module__": f"{library}.exceptions"})(text)


def coded(library, name, status):
    error = of(library, name, "x")
    error.code = status
    return error


@pytest.mark.parametrize(
    ("error", "kind", "facts"),
    [
        (of("botocore", "NoCredentialsError"), AccessError, r"no credentials \(NoCredentialsError\)"),
        (of("botocore", "TokenRetrievalError"), AccessError, r"no credentials \(TokenRetrievalError\)"),
        (of("botocore", "ProfileNotFound", "no profile x"), AccessError, r"\(ProfileNotFound: no profile x\)"),
        (PermissionError("Forbidden"), AccessError, r"denied \(PermissionError: Forbidden\)"),
        (of("huggingface_hub", "GatedRepoError", "gated"), AccessError, r"denied \(GatedRepoError: gated\)"),
        (FileNotFoundError("x"), MissingFileError, "s3://bucket/x; "),
        (of("fsspec", "FSTimeoutError", base=TimeoutError), ConnectionLostError, "in time"),
        (of("botocore", "ReadTimeoutError"), ConnectionLostError, "in time"),
        (of("aiohttp", "ClientPayloadError", "half"), ConnectionLostError, "cut off"),
        (
            of("botocore", "EndpointConnectionError", "no route"),
            ConnectionLostError,
            "EndpointConnectionError: no route",
        ),
        (ConnectionRefusedError(111, "denied"), ConnectionLostError, "ConnectionRefusedError: .*denied"),
        (of("s3fs", "FileExpired", base=OSError), ChangedError, "s3://bucket/x "),
        (ImportError("s3fs"), MissingLibraryError, r"universal-checkpoint\[s3\]"),
        (OSError(121, "InternalError"), SourceError, "InternalError"),
        (OSError("Forbidden: b/bucket/o\nno access"), AccessError, r"denied \(OSError: "),  # as gcsfs tells of 403
        (coded("gcsfs", "HttpError", 401), AccessError, r"denied \(HttpError"),
        (coded("gcsfs", "HttpError", 500), SourceError, "HttpError"),
        (of("huggingface_hub", "HfHubHTTPError", "500", base=OSError), SourceError, "HfHubHTTPError: 500"),
        (of("httpx2", "ConnectError", "no route"), ConnectionLostError, "ConnectError: no route"),
    ],
)
def test_each_failure_is_told(error, kind, facts):
    with pytest.raises(kind, match=facts) as caught, translate_errors("s3://bucket/x"):
        raise error
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", EXTRAS)
def test_every_scheme_says_where_its_credentials_come_from(scheme):
    with pytest.raises(AccessError, match=r"environment: [a-zA-Z]"), translate_errors(f"{scheme}://bucket/x"):
        raise PermissionError("no")


def test_mistakes_of_this_program_stay_mistakes():
    with pytest.raises(TypeError), translate_errors("s3://bucket/x"):
        raise TypeError("len() of None")


def test_what_a_library_says_of_a_name_is_no_mistake_of_this_program():
    said = {"__name__": "huggingface_hub.hf_file_system"}
    exec("def resolve(): raise ValueError('expected namespace/name')", said)
    with pytest.raises(SourceError, match="namespace/name"), translate_errors("hf://gpt2"):
        said["resolve"]()
    with pytest.raises(ValueError, match="ours"), translate_errors("hf://gpt2"):
        raise ValueError("ours")


def test_an_endpoint_without_a_scheme_is_told_in_one_line(monkeypatch):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:5555")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(SourceError, match=r"s3://bucket/run.* 127\.0\.0\.1:5555"):
        inspect("s3://bucket/run")


@pytest.mark.parametrize("url", ["s3://", "s3:///", "memory://"])
def test_a_url_of_no_bucket_is_refused(url):
    with pytest.raises(UsageError, match=rf"s3://bucket/run; got {url}$"):
        check_url(url)


def test_no_secret_is_told(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    text = f"{SECRET} of http://me:{SECRET}@host/x?X-Amz-Credential={SECRET}&X-Amz-Signature=deadbeef is wrong"
    try:
        with translate_errors("s3://bucket/x"):
            raise PermissionError(text)
    except AccessError as error:
        shown = "".join(traceback.format_exception(error))
    assert "is wrong" in shown
    assert SECRET not in shown.replace("raise PermissionError(text)", "")
    assert "deadbeef" not in shown


def test_what_is_no_secret_stays(monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS_FILE", "/home/me/key.json")
    assert redact("no such file: /home/me/key.json?") == "no such file: /home/me/key.json?"
    assert redact("s3://bucket/run@2/x") == "s3://bucket/run@2/x"
