"""The benchmark with vLLM's own client: servers of known speed first, then the real engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema  # comes with vLLM
import pytest
import requests

from specserve.bench import workload
from specserve.bench.load import LoadClient
from specserve.bench.result import Result, read
from tests.engine.conftest import HAS_AVX512, QUICKSTART

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "stub_engine.py"
CONFIG = "server: {served_model_name: stub}\nmodels: {target_model: {path: stub}}\nspeculative_decoding: {method: ngram}\n"

PROMPTS = {f"request {i}" for i in range(10)}

Start = Callable[..., str]


@pytest.fixture
def stub() -> Iterator[Start]:
    """Start a stub engine with flags; answers its URL."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*flags: str, ca: Path | None = None) -> str:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        argv = [
            sys.executable,
            str(STUB),
            "--port",
            str(port),
            "--served-model-name",
            "stub",
            *flags,
        ]
        running.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        url = f"{'https' if ca else 'http'}://127.0.0.1:{port}"
        wait_for(url, ca)
        return url

    yield start
    for process in running:
        process.kill()
        process.wait()


def wait_for(url: str, ca: Path | None = None) -> None:
    for _ in range(200):
        try:
            if requests.get(url + "/health", timeout=1, verify=str(ca) if ca else True).ok:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{url} does not answer")


def bench(folder: Path, off: str, on: str, *extra: str) -> subprocess.CompletedProcess[str]:
    """Run `specserve bench` on two servers that run."""
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    load = (
        extra
        if "--trace" in extra
        else ("--workload", "chat", "--max-tokens", "24", "--concurrency", "2", *extra)
    )
    argv = [
        sys.executable,
        "-m",
        "specserve",
        "bench",
        str(config),
        "--url-baseline",
        off,
        "--url-speculative",
        on,
    ]
    argv += ["--prompts", "12", "--out", str(folder / "out"), *load]
    return subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)


def cells(out: subprocess.CompletedProcess[str]) -> list[dict]:
    return json.loads(out.stdout)["cells"]


def test_a_server_of_known_speed(stub: Start, tmp_path: Path) -> None:
    """A server whose steps take two thirds of the time is 1.5 times faster; report, page and profile are written."""
    out = bench(
        tmp_path, stub("--stub-step", "0.018"), stub("--stub-step", "0.012"), "--format", "json"
    )
    assert out.returncode == 0, out.stderr
    (cell,) = cells(out)
    assert cell["verdict"] == "faster"
    assert cell["speedup"]["value"] == pytest.approx(1.5, rel=0.15)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Turn it on for chat up to 2 concurrent requests" in page
    assert "<svg" in page
    assert "src=" not in page
    found = read(tmp_path / "out" / "result.json")
    assert found.complete
    assert {c.arm: c.status for c in found.checks} == {"baseline": "PASS", "speculative": "PASS"}
    compared = {(a.arm, a.is_streaming): (a.compared, a.identical) for a in found.answers}
    on = {("speculative", True): (4, 4), ("speculative", False): (12, 12)}
    assert compared == {("baseline", True): (4, 4), **on}


def test_a_slower_server(stub: Start, tmp_path: Path) -> None:
    """A server at two thirds of the speed is called slower, and the advice is to leave it off."""
    out = bench(
        tmp_path, stub("--stub-step", "0.012"), stub("--stub-step", "0.018"), "--repeat", "2"
    )
    assert out.returncode == 0, out.stderr
    assert "Leave it off for chat: 0." in out.stdout


def test_corrupted_answers_fail_the_verdict(stub: Start, tmp_path: Path) -> None:
    """A fast server that streams nonsense is no gain, also by its own answers in one piece: exit code 6."""
    out = bench(
        tmp_path,
        stub("--stub-step", "0.012"),
        stub("--stub-step", "0.004", "--stub-corrupt", "streamed"),
    )
    assert out.returncode == 6
    assert "the arms do not give the same answers" in out.stderr
    said = (tmp_path / "out" / "report.md").read_text()
    assert "Do not turn it on for chat: 12 of 12 answers are not the target's." in said
    assert (
        "Do not turn it on for chat: 4 of 4 answers of 'speculative' change when they are streamed."
        in said
    )


def test_a_trace_is_replayed_at_its_times(stub: Start, tmp_path: Path) -> None:
    """Requests arrive at their recorded times with their lengths; one that is refused makes the cell unsound."""
    lengths = [
        5000 if i == 5 else 4 + i for i in range(10)
    ]  # the sixth is longer than the model's context
    lines = [
        {"prompt": f"request {i}", "timestamp": 100 + 0.3 * i, "max_tokens": n}
        for i, n in enumerate(lengths)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    off, on = stub("--stub-step", "0.005"), stub("--stub-step", "0.004")
    out = bench(tmp_path, off, on, "--trace", str(tmp_path / "trace.jsonl"), "--format", "json")
    assert out.returncode == 6
    (cell,) = cells(out)
    assert (cell["verdict"], cell["speedup"]) == ("unsound", None)
    assert "2 of 20 requests of 'speculative' failed" in " ".join(cell["warnings"])
    for url in (off, on):
        seen = [
            r
            for r in requests.get(url + "/__seen", timeout=5).json()["seen"]
            if r["prompt"] in PROMPTS
        ]
        replay = seen[
            -18:-8
        ]  # the last block; after it, four were asked again, in one piece and streamed
        assert [r["max_tokens"] for r in replay] == lengths
        assert all(
            r["at"] - replay[0]["at"] > 0.3 * i - 0.25 for i, r in enumerate(replay)
        )  # the first may be late
    blocks = read(tmp_path / "out" / "result.json").blocks
    assert [[s.ok for s in b.samples].index(False) for b in blocks] == [5] * 4
    assert all(
        s.output_tokens == n
        for b in blocks
        for s, n in zip(b.samples, lengths, strict=True)
        if s.ok
    )
    assert all(
        s.late_seconds is not None and s.late_seconds > -0.25 for b in blocks for s in b.samples
    )


def test_certificates_and_keys_are_those_of_the_arm(stub: Start, tmp_path: Path) -> None:
    """A launched server may have a self-signed certificate, elsewhere such a one is refused; each has its own key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-subj",
        "/CN=own",
        "-days",
        "1",
        "-nodes",
    ]
    argv += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(argv, check=True, capture_output=True)
    url = stub("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), ca=cert)
    short = workload.limit(workload.pick(workload.builtin("chat"), 2, seed=0), 4)
    locked = stub("--api-key", "k")
    with LoadClient(os.environ) as load:
        for key in ("k", "another", None):
            samples = load.run(locked, "stub", short, concurrency=2, api_key=key).samples
            assert [s.ok for s in samples] == [key == "k"] * 2
        for verify in (True, False):
            samples = load.run(url, "stub", short, concurrency=2, verify=verify).samples
            assert [s.ok for s in samples] == [not verify] * 2


def test_an_interrupted_bench_is_continued(stub: Start, tmp_path: Path) -> None:
    """Ctrl-C keeps what was measured; --resume measures the rest only, extends what is complete, and mixes nothing."""
    off, on = stub("--stub-step", "0.03"), stub("--stub-step", "0.02")
    (tmp_path / "config.yaml").write_text(CONFIG)
    argv = [
        sys.executable,
        "-m",
        "specserve",
        "bench",
        str(tmp_path / "config.yaml"),
        "--url-baseline",
        off,
    ]
    argv += ["--url-speculative", on, "--workload", "chat", "--concurrency", "2", "--prompts", "8"]
    argv += ["--max-tokens", "16", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*argv, "--repeat", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    path = tmp_path / "out" / "result.json"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and measured(path)):
        time.sleep(0.05)
    process.send_signal(2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    before = measured(path)
    assert 1 <= len(before) < 8
    least = (len(before) + 3) // 4  # four blocks a repeat
    for repeat in (least, least + 1):
        again = subprocess.run(
            [*argv, "--repeat", str(repeat), "--resume"],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert again.returncode == 0, again.stderr
        after = read(path)
        assert [b.started_seconds for b in after.blocks[: len(before)]] == before
        assert (len(after.blocks), after.complete) == (4 * repeat, True)
    other = subprocess.run(
        [*argv, "--seed", "1", "--resume"], capture_output=True, text=True, timeout=60, check=False
    )
    assert other.returncode == 2
    assert "holds another benchmark" in other.stderr
    assert "prompts of chat" in other.stderr


def measured(path: Path) -> list[float]:
    try:
        return [b.started_seconds for b in Result.model_validate_json(path.read_text()).blocks]
    except ValueError:
        return []


def run_bench(spec: str, out: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    """Run `specserve bench` with the real engine in both arms, on ports that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = min(probe.getsockname()[1], 65000)
    config, *overrides = spec.split()
    argv = [sys.executable, "-m", "specserve", "bench", f"configs/{config}", "--out", str(out)]
    argv += [part for key in (f"server.port={port}", *overrides) for part in ("--set", key)]
    argv += extra
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


FASTER = {"faster"} if HAS_AVX512 else {"faster", "no difference", "slower"}
"""Without AVX-512 checking five tokens costs nearly five times one token, and nothing can be gained."""


@pytest.mark.alone
@pytest.mark.timeout(1500)
def test_lookup_makes_code_edits_faster(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2 with n-gram lookup returns edited code faster than without, with the same answers."""
    load = [
        "--workload",
        "code-edit",
        "--concurrency",
        "1",
        "--prompts",
        "20",
        "--max-tokens",
        "48",
    ]
    for repeat in ("2", "4"):  # a busy machine is answered with "raise --repeat": do so, once
        folder = tmp_path / repeat
        out = run_bench(
            QUICKSTART, folder, *load, "--together", "--repeat", repeat, "--format", "json"
        )
        (cell,) = cells(out)
        if cell["verdict"] not in ("inconclusive", "unsound"):
            break
    assert cell["verdict"] in FASTER, (cell, out.stderr)
    assert out.returncode == 0
    assert cell["speculative"]["acceptance_rate"] > 0.3
    answers = read(folder / "result.json").answers
    assert {(a.arm, a.is_streaming, a.compared) for a in answers} == {
        ("baseline", True, 4),
        ("speculative", True, 4),
        ("speculative", False, 20),
    }
    assert all((a.divergent, a.unscored) == (0, 0) for a in answers)


def test_the_tiny_pair_from_end_to_end(
    engine_host, tiny_pair: dict[str, Path], tmp_path: Path
) -> None:
    """Three starts in the order off, on, off; every file is written, and the result is read back as it was."""
    engine_host.end()
    out = run_bench(
        "tiny-pair.yaml",
        tmp_path,
        "--workload",
        "conversion",
        "--concurrency",
        "1,4,16",
        "--completions",
    )
    assert out.returncode in (0, 6), out.stderr
    assert {p.name for p in tmp_path.iterdir()} >= {"result.json", "report.md", "report.html"}
    found = read(tmp_path / "result.json")
    assert [e for e in found.order if e.startswith(("start", "stop"))] == [
        "start baseline",
        "stop baseline",
        "start speculative",
        "stop speculative",
        "start baseline",
        "stop baseline",
    ]
    assert (len(found.blocks), found.complete) == (12, True)
    assert all(s.ok for b in found.blocks for s in b.samples)
    speculative = [b.speculation for b in found.blocks if b.arm == "speculative"]
    assert all(s is not None and s.accepted_tokens > 0 for s in speculative)
    assert all(b.speculation is None for b in found.blocks if b.arm == "baseline")
    assert all(a.divergent == 0 for a in found.answers)
    jsonschema.validate(
        json.loads((tmp_path / "result.json").read_text()),
        json.loads((ROOT / "docs" / "result.schema.json").read_text()),
    )
