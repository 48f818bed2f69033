"""`specserve batch` through a stub engine that restarts, refuses, slows, and is killed under it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import Program, start, wait_until


def write(path: Path, count: int, broken: int | None = None) -> Path:
    """An OpenAI batch file; line ``broken`` is none."""
    lines = []
    for i in range(count):
        body = {"messages": [{"role": "user", "content": f"request {i}"}], "max_tokens": 3 + i % 9}
        line = json.dumps(
            {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        )
        lines.append("{broken" if i == broken else line)
    path.write_text("\n".join(lines) + "\n")
    return path


def argv(*words: object) -> list[str]:
    return [sys.executable, "-m", "specserve", "batch", *map(str, words)]


def batch(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv(*words), capture_output=True, text=True, check=False, timeout=100, **options
    )


def answers(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def require_each_once(path: Path, count: int, *, ordered: bool = True) -> None:
    names = [line["custom_id"] for line in answers(path)]
    if not ordered:
        names.sort(key=lambda name: int(name[1:]))
    assert names == [f"r{i}" for i in range(count)]
    assert all(line["response"]["status_code"] == 200 for line in answers(path))
    assert [p.name for p in path.parent.glob(f"{path.name}.waiting-*")] == []


@pytest.mark.parametrize("ordered", [True, False])
def test_kills_at_any_moment_lose_nothing_and_double_nothing(stub, tmp_path, ordered):
    """KILL at random moments, then --resume until it is done: exactly one answer for each request."""
    engine = stub("--stub-step", "0.004")
    source, output = write(tmp_path / "in.jsonl", 600), tmp_path / "out.jsonl"
    words = [source, output, "--url", engine.url, "--resume", *([] if ordered else ["--unordered"])]
    draw = random.Random(17)
    killed = 0
    for _ in range(6):
        process = subprocess.Popen(
            argv(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        begun = output.stat().st_size if output.exists() else 0
        while process.poll() is None and not (output.exists() and output.stat().st_size > begun):
            time.sleep(0.01)
        time.sleep(draw.random() * 0.2)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
    done = batch(*words)
    assert done.returncode == 0, done.stderr
    assert "600 answered" in done.stdout
    assert killed >= 2
    require_each_once(output, 600, ordered=ordered)


def test_a_server_that_restarts_is_waited_for(stub, tmp_path):
    """What was in flight when the connection broke is asked again; nothing fails."""
    first = stub("--stub-step", "0.01")
    source, output = write(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl"
    program = start(argv(source, output, "--url", first.url), tmp_path / "said", first.port)
    wait_until(lambda: output.exists() and output.stat().st_size > 0)
    first.process.kill()
    first.process.wait()
    time.sleep(0.5)
    stub(port=first.port)
    assert program.ends() == 0, program.output
    require_each_once(output, 300)


def test_refusals_for_overload_are_waited_out(stub, tmp_path):
    """A server with few places answers 503; all is answered with fewer in flight, and 503 for a while does no harm."""
    engine = stub("--max-num-seqs", 2, "--max-num-queued-reqs", 4, "--stub-step", "0.002")
    source, output = write(tmp_path / "in.jsonl", 60), tmp_path / "out.jsonl"
    program = start(argv(source, output, "--url", engine.url), tmp_path / "said", engine.port)
    wait_until(lambda: output.exists() and output.stat().st_size > 0)
    engine.control(completion_status=503)
    time.sleep(0.5)
    engine.control(completion_status=200)
    assert program.ends() == 0, program.output
    require_each_once(output, 60)


def test_a_server_that_refuses_for_good_ends_it_to_be_resumed(stub, tmp_path):
    """After --patience: exit code 5, the command that goes on, and that command works."""
    engine = stub("--stub-completion-status", 503)
    source, output = write(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    ended = batch(source, output, "--url", engine.url, "--patience", 1)
    assert ended.returncode == 5
    assert "503" in ended.stderr
    (fix,) = [line for line in ended.stderr.splitlines() if line.startswith("Fix: ")]
    engine.control(completion_status=200)
    again = subprocess.run([sys.executable, "-m", *fix.split()[1:]], check=False, timeout=60)
    assert again.returncode == 0
    require_each_once(output, 5)


def test_a_broken_line_and_a_refused_request_stand_in_their_place(stub, tmp_path):
    """Exit code 2 names the line; a 4xx is kept in OpenAI's form, is not tried again, and alone gives 6."""
    engine = stub("--max-model-len", 50)
    source, output = write(tmp_path / "in.jsonl", 9, broken=4), tmp_path / "out.jsonl"
    ended = batch(source, output, "--url", engine.url)
    assert (ended.returncode, "line 5" in ended.stderr) == (2, True)
    lines = answers(output)
    assert [line["custom_id"] for line in lines] == [
        *[f"r{i}" for i in range(4)],
        None,
        *[f"r{i}" for i in range(5, 9)],
    ]
    assert lines[4]["error"]["code"] == "invalid_request"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("short\n" + "long " * 100 + "\nshort too\n")
    other = tmp_path / "other.jsonl"
    ended = batch(prompts, other, "--url", engine.url, "--format", "json")
    assert ended.returncode == 6
    told = json.loads(ended.stdout)
    assert (told["ok"], told["answered"], told["failed"]) == (False, 2, 1)
    refused = answers(other)[1]
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert refused["response"]["body"]["error"]["message"]


def test_a_full_disk_is_a_sentence_and_can_be_resumed(stub, tmp_path):
    """Where OUTPUT may grow no further: exit code 2, no traceback, and with room the rest follows."""
    engine = stub()
    source, output = write(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"
    limited = [
        "bash",
        "-c",
        'ulimit -f 40; exec "$@"',
        "-",
        *argv(source, output, "--url", engine.url),
    ]
    ended = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert "out.jsonl: cannot be written: File too large" in ended.stderr
    assert "--resume" in ended.stderr
    assert "Traceback" not in ended.stderr
    full = batch(source, "/dev/full", "--url", engine.url)
    assert (full.returncode, "No space left" in full.stderr) == (2, True)
    assert batch(source, output, "--url", engine.url, "--resume").returncode == 0
    require_each_once(output, 400)


def test_an_interrupt_says_how_to_go_on(stub, tmp_path):
    """Ctrl-C and TERM: exit code 130 and the same command with --resume."""
    engine = stub("--stub-step", "0.05")
    source, output = write(tmp_path / "in.jsonl", 2000), tmp_path / "out.jsonl"
    for number in (signal.SIGINT, signal.SIGTERM):
        words = [source, output, "--url", engine.url, "--resume", "--body", '{"seed": 1}']
        program = start(argv(*words), tmp_path / f"said-{number}", engine.port)
        before = output.stat().st_size if output.exists() else 0
        wait_until(lambda: output.exists() and output.stat().st_size > before)  # noqa: B023
        program.signal(number)
        assert program.ends() == 130
        assert f"Fix: specserve batch {source} {output} --url {engine.url}" in program.output
        assert program.output.rstrip().endswith("--resume")
        assert "Traceback" not in program.output


def test_prompts_stream_through_a_pipe(stub):
    """`-` and `-`: answers on standard output, the last line on stderr; --resume is refused."""
    engine = stub()
    ended = batch("-", "-", "--url", engine.url, "--completions", input="one\n\ntwo\n")
    assert ended.returncode == 0, ended.stderr
    assert [json.loads(line)["custom_id"] for line in ended.stdout.splitlines()] == [
        "line-1",
        "line-3",
    ]
    assert "2 answered" in ended.stderr
    assert batch("-", "-", "--url", engine.url, "--resume", input="one\n").returncode == 2


def test_a_column_of_csv_with_a_template(stub, tmp_path):
    """Each row is one request, its columns by name in the text."""
    engine = stub()
    source, output = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text('name,text\na,"first\nline"\nb,second\n')
    words = [
        source,
        output,
        "--url",
        engine.url,
        "--csv-column",
        "text",
        "--template",
        "{name}: {text}",
    ]
    assert batch(*words).returncode == 0
    import requests

    seen = [
        one["prompt"] for one in requests.get(f"{engine.url}/__seen", timeout=20).json()["seen"]
    ]
    assert sorted(seen) == ["a: first\nline", "b: second"]
    assert [line["custom_id"] for line in answers(output)] == ["row-1", "row-2"]


def test_a_wrong_key_ends_it_at_once(stub, tmp_path):
    """401 is not a thousand failed requests."""
    engine = stub("--api-key", "right")
    source, output = write(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    key = tmp_path / "key"
    key.write_text("right\n")
    wrong = batch(source, output, "--url", engine.url)
    assert wrong.returncode in (2, 5)
    assert "401" in wrong.stderr
    right = batch(source, output, "--url", engine.url, "--api-key-file", key, "--resume")
    assert right.returncode == 0, right.stderr


def test_it_yields_while_others_wait(stub, tmp_path):
    """With --yield nothing new is sent while the server has others waiting; then it goes on."""
    engine: Program = stub("--stub-step", "0.01", "--stub-running", 30, "--stub-waiting", 9)
    source, output = write(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"
    words = argv(source, output, "--url", engine.url, "--yield", "--concurrency", 4)
    program = start(words, tmp_path / "said", engine.port)

    def idle() -> bool:
        return bool(output.exists()) and engine.control()["in_flight"] == 0

    wait_until(lambda: output.exists() and output.stat().st_size > 0)
    wait_until(idle)
    time.sleep(1.5)
    assert idle()
    assert program.process.poll() is None
    engine.control(running=-1, waiting=-1)
    assert program.ends(80) == 0, program.output
    require_each_once(output, 400)


def test_two_of_them_do_not_write_one_file(stub, tmp_path):
    """The second is refused while the first runs."""
    engine = stub("--stub-step", "0.05")
    source, output = write(tmp_path / "in.jsonl", 2000), tmp_path / "out.jsonl"
    program = start(argv(source, output, "--url", engine.url), tmp_path / "said", engine.port)
    wait_until(lambda: output.exists() and output.stat().st_size > 0)
    second = batch(source, output, "--url", engine.url, "--resume")
    assert (second.returncode, "another specserve batch" in second.stderr) == (2, True)
    program.signal(signal.SIGINT)
    assert program.ends() == 130


def test_progress_is_plain_lines_where_nobody_watches(stub, tmp_path):
    """On stderr: how far, how fast, how long; no escape sequences."""
    engine = stub("--stub-step", "0.05")
    source, output = write(tmp_path / "in.jsonl", 1500), tmp_path / "out.jsonl"
    program = start(
        argv(source, output, "--url", engine.url, "--concurrency", 8),
        tmp_path / "said",
        engine.port,
    )
    program.says("in flight", 60)
    program.signal(signal.SIGINT)
    program.ends()
    assert "requests/s" in program.output
    assert " left" in program.output
    assert "\x1b" not in program.output
