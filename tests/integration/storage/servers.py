"""Servers of stores, and how a test puts objects there: around what is tested, not by it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import quote

import pytest

BUCKET = "checkpoints"


class Bucket:
    """The bucket that tests put checkpoints into; `scheme` is that of its URLs."""

    scheme = ""
    variable = ""
    """Environment variable that names the server."""
    secrets: ClassVar[dict[str, str]] = {}
    """Environment variables with credentials."""
    has_conditions = True
    """Whether the server knows of conditions on requests."""

    def url(self, key: str) -> str:
        """URL of a key."""
        return f"{self.scheme}://{BUCKET}/{key}"

    def put(self, folder: Path, key: str) -> str:
        """Copy a folder, or a file; its URL."""
        files = [own for own in folder.rglob("*") if own.is_file()] if folder.is_dir() else [folder]
        for file in files:
            self.write(f"{key}/{file.relative_to(folder)}" if folder.is_dir() else key, file.read_bytes())
        return self.url(key)

    def change(self, url: str, *, at: int = -1) -> None:
        """Flip a bit of an object."""
        key = url.removeprefix(self.url(""))
        data = bytearray(self.read(key))
        data[at] ^= 1
        self.write(key, bytes(data))

    def keys(self, prefix: str) -> list[str]:
        """Keys that begin with a prefix."""
        return list(self.versions(prefix))

    def objects(self, prefix: str) -> dict[str, tuple[bytes, str]]:
        """Objects whose keys begin with a prefix: bytes and version."""
        return {key: (self.read(key), version) for key, version in self.versions(prefix).items()}

    def hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the library pause shortly before it tries again."""

    def write(self, key: str, data: bytes) -> None:
        """Write an object."""
        raise NotImplementedError

    def read(self, key: str) -> bytes:
        """Bytes of an object."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        """Remove an object."""
        raise NotImplementedError

    def versions(self, prefix: str) -> dict[str, str]:
        """Keys that begin with a prefix, and what tells versions of them apart."""
        raise NotImplementedError


class S3(Bucket):
    """One of moto's server, which speaks S3."""

    scheme = "s3"
    variable = "AWS_ENDPOINT_URL"
    secrets: ClassVar[dict[str, str]] = {
        "AWS_ACCESS_KEY_ID": "AKIDneverprinted",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t/never+printed",
    }

    def __init__(self, endpoint: str) -> None:
        import boto3

        os.environ.update(self.secrets, AWS_DEFAULT_REGION="us-east-1")
        self.client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        self.client.create_bucket(Bucket=BUCKET)

    @staticmethod
    def command(port: int) -> list[str]:
        pytest.importorskip("moto", reason="make integration installs it")
        pytest.importorskip("s3fs", reason="make integration installs it")
        quiet = "import logging; logging.getLogger('werkzeug').setLevel(logging.ERROR)"
        code = f"{quiet}; from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
        return [sys.executable, "-c", code]

    def write(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def read(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def versions(self, prefix: str) -> dict[str, str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {own["Key"]: own["ETag"].strip('"') for page in pages for own in page.get("Contents", ())}


class Gcs(Bucket):
    """One of gcp-storage-emulator, or of the server of Google's store that `UCP_TEST_GCS` names."""

    scheme = "gs"
    variable = "STORAGE_EMULATOR_HOST"
    secrets: ClassVar[dict[str, str]] = {"FSSPEC_GS_TOKEN": "ya29.never-printed"}
    has_conditions = "UCP_TEST_GCS" in os.environ

    def __init__(self, endpoint: str) -> None:
        import requests
        from fsspec.config import conf

        os.environ.update(self.secrets, FETCH_RAW_TOKEN_EXPIRY="false")
        conf["gs"] = {"token": self.secrets["FSSPEC_GS_TOKEN"]}  # what fsspec makes of it when it is imported
        self._endpoint = endpoint
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.post(f"{endpoint}/storage/v1/b?project=test", json={"name": BUCKET})

    @staticmethod
    def command(port: int) -> list[str]:
        pytest.importorskip("gcp_storage_emulator", reason="make integration installs it")
        pytest.importorskip("gcsfs", reason="make integration installs it")
        asked = ["start", "--host", "127.0.0.1", "--port", str(port), "--in-memory", "--quiet"]
        return [sys.executable, "-m", "gcp_storage_emulator", *asked]

    def write(self, key: str, data: bytes) -> None:
        url = f"{self._endpoint}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(key, safe='')}"
        self._session.post(url, data=data).raise_for_status()

    def read(self, key: str) -> bytes:
        return self._asked("GET", f"/{quote(key, safe='')}?alt=media").content

    def delete(self, key: str) -> None:
        self._asked("DELETE", f"/{quote(key, safe='')}")

    def versions(self, prefix: str) -> dict[str, str]:
        found: dict[str, str] = {}
        page = ""
        while True:
            answer = self._asked("GET", f"?prefix={quote(prefix, safe='')}&pageToken={page}").json()
            found |= {own["name"]: own["generation"] for own in answer.get("items", ())}
            if not (page := answer.get("nextPageToken", "")):
                return found

    def hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from gcsfs import retry

        monkeypatch.setattr(retry, "asyncio", SimpleNamespace(sleep=lambda _: asyncio.sleep(0.1)))

    def _asked(self, method: str, what: str) -> Any:
        answer = self._session.request(method, f"{self._endpoint}/storage/v1/b/{BUCKET}/o{what}")
        answer.raise_for_status()
        return answer


SERVERS: dict[str, type[S3 | Gcs]] = {"s3": S3, "gs": Gcs}


@contextmanager
def running(kind: type[S3 | Gcs]) -> Iterator[int]:
    """A server, while this lasts; its port."""
    if kind is Gcs and "UCP_TEST_GCS" in os.environ:
        yield int(os.environ["UCP_TEST_GCS"].rpartition(":")[2])
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(kind.command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()
