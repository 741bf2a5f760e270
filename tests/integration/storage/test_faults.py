"""What goes wrong between here and a store: tried again where that helps, told in one line where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
import warnings
from collections import Counter

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ucp
from tests.integration.storage.servers import SERVERS
from ucp.errors import AccessError, ChangedError, ConnectionLostError, UcpError, UnknownFormatError

pytestmark = pytest.mark.integration

SECRETS = [own for kind in SERVERS.values() for own in kind.secrets.values()]
LIBRARIES = ("botocore", "gcsfs", "aiohttp")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """8 MB in one file of DCP."""
    folder = tmp_path_factory.mktemp("faults") / "checkpoint"
    torch.manual_seed(0)
    state = {f"layers.{n}.weight": torch.randn(512, 1 << 10) for n in range(4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.fixture
def url(source, bucket, proxy):
    return bucket.put(source, "runs/faults")


def is_of_tensors(request):
    """Whether a request is for more than the ends of a file."""
    first, _, last = request.headers.get("range", "bytes=0-0").removeprefix("bytes=").partition("-")
    return request.is_read and int(last) - int(first) > 1 << 20


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Time-outs of a second, not of fifteen or thirty."""
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr("ucp.io.remote.stores._SILENCE", 1.0)
    from ucp.io.files import close_connections

    close_connections()


def some(kind, *, times):
    """The first requests for bytes of each object go wrong."""
    seen = Counter()

    def fault(request):
        if not request.is_read:
            return ""
        seen[request.key] += 1
        return kind if seen[request.key] <= times else ""

    return fault


def refused(call, kind):
    """The message of the one error of ours that `call` raises; nothing of it or of its traceback is secret."""
    with pytest.raises(kind) as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value))
    assert not any(secret in shown for secret in SECRETS)
    assert not any(own in shown for own in LIBRARIES), "errors of libraries are not chained: they would show requests"
    return str(caught.value)


@pytest.mark.parametrize("kind", ["500", "503", "cut"])
def test_what_passes_is_tried_again(url, source, proxy, tmp_path, kind):
    proxy.behaviour.fault = some(kind, times=1)
    ucp.convert(url, tmp_path / "out", workers=1, fsync=False)
    assert ucp.diff(tmp_path / "out", source, extras=True).equal


def test_a_request_that_hangs_is_tried_again(url, source, proxy, tmp_path):
    proxy.behaviour.fault = some("hang", times=1)
    ucp.convert(url, tmp_path / "out", workers=1, fsync=False)
    assert ucp.diff(tmp_path / "out", source, extras=True).equal


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        ("500", UcpError, "cannot read "),
        ("cut", ConnectionLostError, "answers were cut off"),
        ("hang", ConnectionLostError, "did not answer in time"),
        ("403", AccessError, "access was denied"),
    ],
)
def test_what_does_not_pass_is_one_line(url, proxy, kind, error, told):
    from ucp.io.remote import ends

    index = ucp.open(url)
    ends.clear()
    proxy.behaviour.fault = some(kind, times=1 << 30)
    text = refused(lambda: index.read("layers.0.weight", "weight"), error)
    assert told in text
    assert "\n" not in text


def test_a_worker_that_fails_fails_the_run_and_resume_goes_on(url, source, proxy, tmp_path):
    seen = Counter()

    def fault(request):
        seen["reads"] += is_of_tensors(request)
        return "403" if seen["reads"] > 1 and is_of_tensors(request) else ""

    proxy.behaviour.fault = fault
    refused(lambda: ucp.convert(url, tmp_path / "out", workers=2, fsync=False), AccessError)
    assert not (tmp_path / "out").exists()
    proxy.reset()
    ucp.convert(url, tmp_path / "out", workers=2, fsync=False, resume=True)
    assert ucp.diff(tmp_path / "out", source, extras=True).equal


@pytest.mark.parametrize("workers", [1, 2])
def test_an_object_that_changes_mid_read_is_refused(url, bucket, proxy, tmp_path, workers):
    file = f"{url}/__0_0.distcp"
    seen = Counter()

    def change(request):
        seen["reads"] += is_of_tensors(request)
        if seen["reads"] == 2 and not seen["changed"]:
            seen["changed"] += 1
            bucket.change(file)

    proxy.behaviour.before = change
    text = refused(lambda: ucp.convert(url, tmp_path / "out", workers=workers, fsync=False), ChangedError)
    assert seen["changed"]
    assert file in text
    assert "replaced" in text
    assert list(tmp_path.iterdir()) == [], "what was read of two states is no beginning of anything"


def test_reads_ask_for_the_version_that_was_listed(url, proxy):
    ucp.verify(url)
    reads = [request for request in proxy.behaviour.seen if request.is_read]
    assert reads
    assert all(request.version for request in reads)
    asked = [request for request in proxy.behaviour.seen if request.key.endswith(".distcp") and not request.is_read]
    assert not asked, "nothing is asked of an object by itself"


def test_no_bucket_and_nothing_there(bucket, proxy):
    nowhere = f"{bucket.scheme}://no-such-bucket/x"
    assert "there is no bucket 'no-such-bucket'" in refused(lambda: ucp.inspect(nowhere), UcpError)
    assert "nothing is there. Check the URL" in refused(
        lambda: ucp.inspect(bucket.url("no/such/run")), UnknownFormatError
    )


@pytest.mark.store("s3")  # gcsfs tries it without any
def test_no_credentials(url, tmp_path):
    env = {name: own for name, own in os.environ.items() if not name.startswith("AWS_") or name == "AWS_ENDPOINT_URL"}
    env |= {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1"}
    done = subprocess.run(
        [sys.executable, "-m", "ucp", "inspect", url], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "there are no credentials" in done.stderr
    assert "AWS_ACCESS_KEY_ID" in done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_listens(url, bucket, monkeypatch):
    from ucp.io.files import close_connections

    close_connections()
    monkeypatch.setenv(bucket.variable, "http://127.0.0.1:9")
    assert "cannot be reached" in refused(lambda: ucp.inspect(url), ConnectionLostError)
    close_connections()
    monkeypatch.setenv(bucket.variable, "http://user:hiddenpassword@127.0.0.1:9")
    assert "hiddenpassword" not in refused(lambda: ucp.inspect(url), UcpError)
