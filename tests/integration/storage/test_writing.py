"""What is written to a bucket equals what is written to a disk, whatever goes wrong on the way; on real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

import ucp
from tests.integration.storage.servers import BUCKET
from tests.integration.storage.test_faults import SECRETS, refused
from tests.unit.conftest import shrink
from ucp.errors import AccessError, DestinationError, IncompleteError, UcpError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),  # aiohttp, of the parts of gcsfs
]

FIXTURES = Path(__file__).parents[3] / "fixtures"
SOURCES = {
    "deepspeed": "deepspeed/z2-dp2-client-state/checkpoint",
    "megatron": "megatron/llama-tp2-pp2-dp2-full/checkpoint",
    "dcp": "torch/fsdp2-dp2-tp2/checkpoint",
    "huggingface": "huggingface/llama-sharded/model",
    "atoms": "",
}
TARGETS = {
    "ucp": {},
    "virtual": {"virtual": True},
    "compressed": {"compress": True},
    "deepspeed": {"to": "deepspeed", "topology": "dp=3,zero=2"},
    "deepspeed-universal": {"to": "deepspeed-universal"},
    "dcp": {"to": "dcp", "topology": "dp=2"},
    "torch": {"to": "torch"},
    "huggingface": {"to": "huggingface"},
    "megatron": {"to": "megatron", "topology": "tp=2"},
}


def tree(folder):
    return {str(own.relative_to(folder)): own.read_bytes() for own in sorted(folder.rglob("*")) if own.is_file()}


@pytest.fixture
def dst(bucket, proxy):
    """A prefix with nothing below it."""
    clear(bucket)
    return bucket.url("out/step1")


def clear(bucket):
    for key in bucket.keys("out/"):
        bucket.delete(key)


def keys(bucket):
    return bucket.keys("out/step1/")


def objects(bucket):
    """What is below the destination."""
    return {key.removeprefix("out/step1/"): data for key, (data, _) in bucket.objects("out/step1/").items()}


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def source():
    return FIXTURES / SOURCES["deepspeed"]


def command(*words, code=0):
    """What a command says, run as users run it; no secret is in it."""
    done = subprocess.run(
        [sys.executable, "-m", "ucp", *map(str, words)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == code, done.stderr
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS)
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", SOURCES)
def test_every_target_equals_what_is_written_to_a_disk(kind, bucket, dst, scratch, tmp_path, monkeypatch):
    shrink(monkeypatch, block=1024, task=4096)
    monkeypatch.setattr(import_module("ucp.transfer.plan.rounds"), "ROUND", 128 << 10)  # several, over forked processes
    src = FIXTURES / SOURCES[kind]
    if kind == "atoms":
        src = tmp_path / "atoms"
        ucp.convert(FIXTURES / SOURCES["deepspeed"], src, fsync=False)
    made = 0
    for target, asked in TARGETS.items():
        clear(bucket)
        try:
            ucp.convert(src, tmp_path / target, fsync=False, **asked)
        except UcpError:
            continue  # told on a disk in the same words: tests/unit
        ucp.convert(src, dst, scratch=scratch, verify=True, **asked)
        assert objects(bucket) == tree(tmp_path / target), target
        made += 1
    assert made >= 5
    assert not list(scratch.iterdir())


def test_the_command_line(bucket, dst, source, scratch, tmp_path):
    plan = command("plan", source, dst, "--scratch", scratch)
    assert "scratch" in plan
    said = command("convert", source, dst, "--scratch", scratch, "--verify")
    assert dst in said
    assert "nothing was written" in command("convert", source, dst, "--resume")
    assert "pass --overwrite" in command("convert", source, dst, "--to", "torch", code=1)
    command("convert", source, dst, "--to", "torch", "--overwrite", "--verify")
    command("convert", source, tmp_path / "torch", "--to", "torch")
    assert objects(bucket) == tree(tmp_path / "torch")
    for data in objects(bucket).values():
        assert not any(secret.encode() in data for secret in SECRETS)


@pytest.fixture
def large(tmp_path):
    """A checkpoint of some 100 MB, as a model that is published in two files."""
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path / "large"
    folder.mkdir()
    random = np.random.default_rng(0)
    names = {}
    for number in range(2):
        tensors = {f"layers.{number}.w{own}": random.random((1024, 3072), "float32") for own in range(4)}
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def is_data(request):
    """Whether it writes a file of the destination, or a part of one."""
    return request.is_write and ".ucp-partial" not in request.key


def test_uploads_are_made_side_by_side_and_told_of(bucket, dst, large, scratch, proxy):
    proxy.behaviour.before = lambda own: time.sleep(0.5) if is_data(own) else None
    told = command("convert", large, dst, "--layout", "per-parameter", "--scratch", scratch, "--progress", "log")
    assert "convert: done" in told
    assert "upload: done" in told
    puts = [own for own in proxy.behaviour.seen if is_data(own)]
    most = max(sum(other.began <= own.began < other.ended for other in puts) for own in puts)
    assert 3 <= most <= 12, "files side by side, and parts of them"


def test_killed_in_the_middle_and_resumed_elsewhere(bucket, dst, large, proxy, tmp_path):
    """kill -9 at some tenths of the run; another process with another scratch folder goes on."""
    asked = ("--layout", "per-parameter")
    command("convert", large, tmp_path / "disk", *asked)
    wanted = tree(tmp_path / "disk")
    proxy.behaviour.before = lambda own: time.sleep(0.7) if is_data(own) else None
    words = [sys.executable, "-m", "ucp", "convert", str(large), dst, *asked]
    other = tmp_path / "other"
    other.mkdir()
    run = subprocess.Popen([*words, "--scratch", str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and sum("/files/" in key for key in keys(bucket)) < 3:
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    time.sleep(0.5)
    uploaded = sum("/files/" in key for key in keys(bucket))
    assert 3 <= uploaded < len(wanted)
    assert "--resume" in command("inspect", dst, code=1)
    with pytest.raises(IncompleteError):
        ucp.convert(dst, tmp_path / "out")
    before = len(proxy.behaviour.seen)
    proxy.behaviour.before = lambda own: None
    said = command("convert", large, dst, *asked, "--scratch", other, "--resume", "--verify")
    assert "already there" in said
    again = {own.key for own in proxy.behaviour.seen[before:] if is_data(own)}
    assert len(again) <= len(wanted) - uploaded + 1, "what was uploaded is not uploaded again"
    assert objects(bucket) == wanted


def test_parts_are_uploaded_in_bounded_memory_and_scratch(bucket, dst, large, proxy, tmp_path, scratch):
    code = (
        "import sys, ucp, resource\n"
        "r = ucp.convert(sys.argv[1], sys.argv[2], scratch=sys.argv[3], workers=1, memory='256MiB')\n"
        "print(r.scratch_bytes, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(large), dst, str(scratch)], capture_output=True, text=True, check=True
    )
    taken, resident = map(int, done.stdout.split())
    print(f"peak scratch {taken / 1e6:.1f} MB, memory of the process that uploads {resident / 1e3:.0f} MB")
    assert taken <= sum(own.stat().st_size for own in large.iterdir()) + (1 << 20)
    assert any(own.is_part for own in proxy.behaviour.seen), "large files go in parts"
    ucp.convert(large, tmp_path / "disk", fsync=False)
    assert objects(bucket) == tree(tmp_path / "disk")


@pytest.mark.parametrize("kind", ["500", "503", "reset"])
def test_uploads_that_fail_are_tried_again(kind, bucket, dst, source, scratch, proxy, tmp_path):
    seen = Counter()

    def is_first(request):
        seen[request.key] += request.is_write
        return request.is_write and seen[request.key] == 1

    def reset(request):
        if is_first(request):
            raise ConnectionResetError  # the proxy hangs up without a word

    if kind == "reset":
        proxy.behaviour.before = reset
    else:
        proxy.behaviour.fault = lambda request: kind if is_first(request) else ""
    ucp.convert(source, dst, scratch=scratch)
    assert len(seen) > 5
    proxy.reset()
    ucp.convert(source, tmp_path / "disk", fsync=False)
    assert objects(bucket) == tree(tmp_path / "disk")


def test_a_store_that_is_read_only(bucket, dst, source, scratch, proxy):
    proxy.behaviour.fault = lambda request: "403" if request.method in ("PUT", "POST") else ""
    message = refused(lambda: ucp.convert(source, dst, scratch=scratch), AccessError)
    assert f"cannot write {bucket.scheme}://" in message
    assert "writing and deleting" in message
    assert not keys(bucket)


def test_an_upload_that_is_refused_is_resumed(bucket, dst, source, scratch, proxy, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    proxy.behaviour.fault = lambda own: "403" if own.is_write and own.key.endswith(".safetensors") else ""
    refused(lambda: ucp.convert(source, dst, scratch=scratch), AccessError)
    assert not list(scratch.iterdir())
    proxy.reset()
    with pytest.raises(IncompleteError):
        ucp.inspect(dst)
    ucp.convert(source, dst, scratch=scratch, resume=True)
    ucp.convert(source, tmp_path / "disk", fsync=False)
    assert objects(bucket) == tree(tmp_path / "disk")


def test_no_bucket(bucket, proxy, source, scratch):
    nowhere = f"{bucket.scheme}://no-such-bucket/run"
    message = refused(lambda: ucp.convert(source, nowhere, scratch=scratch), DestinationError)
    assert "there is no bucket 'no-such-bucket'" in message


@pytest.mark.store("s3")  # gcsfs tries it without any
def test_no_credentials(bucket, proxy, source, scratch, monkeypatch):
    from ucp.io.files import close_connections

    close_connections()
    for name in bucket.secrets:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    message = refused(lambda: ucp.convert(source, f"s3://{BUCKET}/none", scratch=scratch), AccessError)
    assert "Credentials come from the environment" in message


def test_only_one_of_two_begins(bucket, dst, source, scratch, monkeypatch):
    """The store refuses to create what is there: nobody has to look first."""
    if not bucket.has_conditions:
        pytest.skip("gcp-storage-emulator knows of no conditions")
    from ucp.io.remote.write import write_new

    assert write_new(f"{dst}/first", b"a")
    assert not write_new(f"{dst}/first", b"b")
    assert objects(bucket) == {"first": b"a"}


@pytest.mark.store("s3")  # of Google's store they are gone by themselves after a week, and nobody can list them
def test_parts_of_uploads_that_were_cut_off_are_removed(bucket, dst, source, scratch):
    bucket.client.create_multipart_upload(Bucket=BUCKET, Key="out/step1/big")
    bucket.client.create_multipart_upload(Bucket=BUCKET, Key="out/step10/other")
    from ucp.io.remote.connections import connect

    connect(dst).abort_uploads(dst)
    left = bucket.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [own["Key"] for own in left] == ["out/step10/other"]
    bucket.client.abort_multipart_upload(Bucket=BUCKET, Key="out/step10/other", UploadId=left[0]["UploadId"])


def test_conversions_of_several_threads_of_one_process(bucket, proxy, tmp_path, monkeypatch):
    """Each forks processes, before which the connections of all are closed: so they take turns."""
    clear(bucket)
    shrink(monkeypatch, block=1024, task=4096)
    source = FIXTURES / SOURCES["deepspeed"]
    ucp.convert(source, tmp_path / "disk", fsync=False)
    urls = [bucket.url(f"out/step{number}") for number in range(3)]

    def convert(url):
        scratch = tmp_path / url.rpartition("/")[2]
        scratch.mkdir()
        return ucp.convert(source, url, scratch=scratch, workers=2, verify=True)

    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(convert, urls))
    assert [report.nbytes_written for report in reports] == [reports[0].nbytes_written] * 3
    for url in urls:
        assert ucp.verify(url, against=source).ok
