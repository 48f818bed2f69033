"""The middleware that refuses new requests while vLLM drains, in an event loop that has its own signal handlers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specserve

INSIDE = [
    path.stem
    for path in sorted((Path(specserve.__file__).parent / "engine" / "inside").glob("*.py"))
    # The load generator imports vLLM's client itself, in a process of its own.
    if path.stem not in ("__init__", "client_worker")
]
SCRIPT = """
import asyncio, json, os, signal, sys
from specserve.engine.inside.draining import RefuseWhileDraining

async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})

async def ask(served, method, path="/v1/completions"):
    sent = []
    async def send(message): sent.append(message)
    await served({"type": "http", "method": method, "path": path}, None, send)
    return [sent[0]["status"], dict((k.decode(), v.decode()) for k, v in sent[0]["headers"])]

async def main(number):
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(number, heard.set)  # as vLLM does
    served = RefuseWhileDraining(app)
    await served({"type": "lifespan"}, None, None)
    answers = [await ask(served, "POST"), await ask(served, "GET", "/health")]
    os.kill(os.getpid(), number)
    await asyncio.wait_for(heard.wait(), 5)
    answers += [await ask(served, "POST"), await ask(served, "GET")]
    print(json.dumps(answers))

run = asyncio.run
if sys.argv[1] == "uvloop":
    import uvloop
    run = uvloop.run
run(main(int(sys.argv[2])))
"""


@pytest.mark.parametrize("number", [15, 2], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_after_the_signal_posts_get_503_and_the_loop_hears_it_too(loop, number):
    """200 before; afterwards 503 with Retry-After for a POST, 200 for a GET, and vLLM's own handler ran."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, loop, str(number)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env={**os.environ, "SPECSERVE_RUN": "3f"},
    )
    assert done.stderr == ""
    before, health, refused, read = json.loads(done.stdout)
    assert before == read == [200, {}]
    assert health == [200, {"x-specserve-run": "3f"}]  # which start of an engine it is
    assert refused == [
        503,
        {"content-type": "application/json", "retry-after": "5", "connection": "close"},
    ]


@pytest.mark.parametrize("module", INSIDE)
def test_it_loads_nothing_heavy(module):
    """Each module for vLLM's interpreter loads the standard library, and of ours the names of our
    environment variables with what those load: it is imported in the engine's processes at each start."""
    code = f"""
import importlib, sys
before = set(sys.modules)
importlib.import_module("specserve.engine.inside.{module}")
new = {{name for name in sys.modules if name not in before}}
foreign = {{name.partition(".")[0] for name in new}} - set(sys.stdlib_module_names) - {{"specserve"}}
ours = {{name for name in new if name.startswith("specserve.") and ".inside" not in name}}
print(sorted(foreign), sorted(ours))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    foreign, ours = done.stdout.split("] [")
    assert foreign == "["
    assert set(re.findall(r"[\w.]+", ours)) <= {
        "specserve.engine",
        "specserve.engine.command",
        "specserve.engine.command.environment",
        "specserve.errors",
        "specserve.units",
    }
