"""Clients that keep an engine busy. What becomes of their requests is their own problem."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import requests


@contextlib.contextmanager
def traffic(
    url: str,
    model: str,
    *,
    clients: int = 4,
    tokens: int = 50,
    prompt: str = "a b c",
    timeout: float = 1.0,
) -> Iterator[None]:
    """Greedy completions of full length, one after the other from each client, while the block runs."""
    enough = threading.Event()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }

    def client() -> None:
        while not enough.is_set():
            with contextlib.suppress(requests.RequestException):
                requests.post(f"{url}/v1/completions", json=body, timeout=timeout)
            time.sleep(0.01)  # a refusal comes at once

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join()
