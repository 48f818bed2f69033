"""Wait until a launched server is ready, ask it one question, and say how fast the answer came.

python scripts/ask.py CONFIG [--launched-by PID] [--question TEXT]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import psutil
import requests

from specserve.config.load import load
from specserve.config.schema import Settings
from specserve.engine.http import metrics
from specserve.engine.http.client import Chunk, EngineClient
from specserve.errors import SpecserveError

QUESTION = """Proofread this text and write it again:

Speculative decoding makes a language model faster. A small draft proposes several tokens, and the large model checks \
them all in one step. When the draft is right, several tokens come out of one step. When it is wrong, nothing is lost \
but the work of the draft. The large model always has the last word, so the text is the same as without a draft.
"""


def wait_until_ready(settings: Settings, pid: int | None, *, seconds: float) -> str | None:
    """None when the server is ready, else why it is not."""
    sidecar = f"http://{settings.sidecar.host}:{settings.sidecar.port}/readyz"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if pid is not None and not _is_alive(pid):
            return "the server ended before it was ready"
        try:
            if requests.get(sidecar, timeout=5).status_code == 200:
                return None
        except requests.RequestException:
            pass  # not listening yet
        time.sleep(0.5)
    return f"the server was not ready after {seconds:.0f} s"


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ask(client: EngineClient, question: str) -> None:
    """Stream one answer to the terminal, then its speed and what became of the drafts."""
    before = metrics.parse(client.metrics_text(), at_seconds=time.monotonic())
    chunks: list[Chunk] = []
    print(flush=True)
    for chunk in client.stream(
        messages=[{"role": "user", "content": question}], max_tokens=200, temperature=0, timeout=120
    ):
        chunks.append(chunk)
        print(chunk.text, end="", flush=True)
    print("\n", flush=True)
    after = metrics.parse(client.metrics_text(), at_seconds=time.monotonic())
    print(speed(chunks))
    print(acceptance(before, after))


def speed(chunks: list[Chunk]) -> str:
    """Tokens per second from the request to the last chunk, and the time to the first."""
    tokens, seconds = chunks[-1].completion_tokens, chunks[-1].seconds
    if not tokens:
        return "no token came"
    first = next((chunk.seconds for chunk in chunks if chunk.text), seconds)
    return f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s, the first after {first * 1000:.0f} ms"


def acceptance(before: metrics.EngineSnapshot, after: metrics.EngineSnapshot) -> str:
    """What the engine counted between two reads of its metrics."""
    names = ("accepted_tokens", "draft_tokens")
    accepted, drafted = ((after.total(n) or 0) - (before.total(n) or 0) for n in names)
    if not drafted:
        return "acceptance rate: none, nothing was drafted"
    return (
        f"acceptance rate: {accepted / drafted:.0%} ({accepted:.0f} of {drafted:.0f} draft tokens)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument(
        "--launched-by", type=int, metavar="PID", help="give up when this process ends"
    )
    parser.add_argument("--question", default=QUESTION)
    args = parser.parse_args()
    try:
        settings = load(args.config, environ=os.environ).settings
        problem = wait_until_ready(
            settings, args.launched_by, seconds=settings.engine.startup_timeout_seconds
        )
        if problem:
            print(f"Error: {problem}", file=sys.stderr)
            return 1
        key = settings.server.api_key
        ask(EngineClient(settings.base_url, key.get_secret_value() if key else None), args.question)
    except SpecserveError as error:
        print(f"Error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
