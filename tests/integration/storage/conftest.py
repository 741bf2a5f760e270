"""A real S3 server (that of moto), and a proxy in front of it that misbehaves as it is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.storage.proxy import Proxy

BUCKET = "checkpoints"
SECRETS = {"AWS_ACCESS_KEY_ID": "AKIDneverprinted", "AWS_SECRET_ACCESS_KEY": "s3cr3t/never+printed"}


class Bucket:
    """The bucket that tests put checkpoints into."""

    def __init__(self, endpoint: str) -> None:
        import boto3

        self.client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        self.client.create_bucket(Bucket=BUCKET)

    def put(self, folder: Path, key: str) -> str:
        """Copy a folder, or a file; its URL."""
        files = [own for own in folder.rglob("*") if own.is_file()] if folder.is_dir() else [folder]
        for file in files:
            name = f"{key}/{file.relative_to(folder)}" if folder.is_dir() else key
            self.client.put_object(Bucket=BUCKET, Key=name, Body=file.read_bytes())
        return f"s3://{BUCKET}/{key}"

    def objects(self, key: str) -> dict[str, tuple[bytes, str]]:
        """Objects below a key, as the proxy answers for them itself: path to bytes and ETag."""
        found = {}
        for item in self.client.list_objects_v2(Bucket=BUCKET, Prefix=key)["Contents"]:
            body = self.client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read()
            found[f"/{BUCKET}/{item['Key']}"] = (body, item["ETag"])
        return found

    def change(self, url: str, *, at: int = -1) -> None:
        """Flip a bit of an object."""
        key = url.removeprefix(f"s3://{BUCKET}/")
        data = bytearray(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        data[at] ^= 1
        self.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))


@contextmanager
def running() -> Iterator[int]:
    """A server, while this lasts; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = "import logging; logging.getLogger('werkzeug').setLevel(logging.ERROR)"
    code = f"{quiet}; from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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


@pytest.fixture(scope="session")
def server() -> Iterator[int]:
    """Port of the server."""
    pytest.importorskip("moto", reason="make integration installs it")
    pytest.importorskip("s3fs", reason="make integration installs it")
    with running() as port:
        yield port


@pytest.fixture(scope="session")
def bucket(server: int) -> Bucket:
    """The bucket, reached without the proxy."""
    os.environ.update(SECRETS, AWS_DEFAULT_REGION="us-east-1")
    return Bucket(f"http://127.0.0.1:{server}")


@pytest.fixture(scope="session")
def line(server: int) -> Iterator[Proxy]:
    """The proxy, one for all tests: connections to it are kept."""
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(line: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy, well-behaved, between the process and the store."""
    from ucp.io.files import let_go

    monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
    line.reset()
    yield line
    line.reset()
    let_go()
