"""Servers of S3 and of Google's store, and a proxy in front of each that misbehaves as it is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.storage.proxy import Proxy
from tests.integration.storage.servers import SERVERS, Bucket, running


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test runs on every server, or on those that its mark `store` names."""
    if "server" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("store")
        metafunc.parametrize("server", mark.args if mark else list(SERVERS), indirect=True, scope="session")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Scheme and port of a server."""
    with running(SERVERS[request.param]) as port:
        yield request.param, port


@pytest.fixture(scope="session")
def bucket(server: tuple[str, int]) -> Bucket:
    """The bucket, reached without the proxy."""
    scheme, port = server
    return SERVERS[scheme](f"http://127.0.0.1:{port}")


@pytest.fixture(scope="session")
def line(server: tuple[str, int]) -> Iterator[Proxy]:
    """The proxy, one for all tests: connections to it are kept."""
    proxy = Proxy(server[1])
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(line: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy, well-behaved, between the process and the store."""
    from ucp.io.files import close_connections

    bucket.hurry(monkeypatch)
    monkeypatch.setenv(bucket.variable, line.url)
    line.reset()
    yield line
    line.reset()
    close_connections()
