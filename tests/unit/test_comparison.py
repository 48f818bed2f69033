"""The comparison while serving: what it finds, what it must not claim, and how it is taken back."""
# ruff: noqa: F811

from __future__ import annotations

import math
import socket
import threading
import time
from dataclasses import asdict

from test_canary import check, engine, settings  # noqa: F401

from specserve.engine.client import EngineClient
from specserve.sidecar.canaries import Canaries, output_mismatch
from specserve.watch import Watch


def test_a_request_that_fails_proves_nothing_about_text(engine):
    """An engine that dies answers 500, twice if asked twice: that is no wrong text, and no alert says so."""
    engine.fails = True
    found = check(engine)
    assert (found.verdict, output_mismatch({"canary": asdict(found)})) == ("corrupt", None)
    client = EngineClient(f"http://127.0.0.1:{engine.server_address[1]}", model="m")
    canaries = Canaries(
        client,
        settings(sidecar={"comparison_interval_seconds": 1}),
        alone=True,
        clock=time.monotonic,
        late=lambda: None,
    )
    canaries.compare(math.inf)
    for thread in threading.enumerate():
        if thread.name == "sidecar-comparison":
            thread.join()
    assert canaries.facts() == {}


def test_readiness_comes_back_when_the_next_comparison_is_right(engine, tmp_path):
    """Wrong text keeps readiness away, and comparing goes on, or nothing but a restart could give it back."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    times = dict.fromkeys(("scrape_interval_seconds", "comparison_interval_seconds"), 0.05)
    config = settings(sidecar={"port": port, **times}, server={"served_model_name": "m"})
    url = f"http://127.0.0.1:{engine.server_address[1]}"
    watch = Watch(config, engine_url=url, state_dir=tmp_path).start()
    try:
        for garbage, mismatch in ((set(), 0), ({"sampled"}, 1), (set(), 0)):
            engine.garbage = garbage
            end = time.monotonic() + 60
            while watch.readings().get("specserve_output_mismatch") != mismatch or watch.probe("ready")["ok"] is bool(
                mismatch
            ):
                assert time.monotonic() < end, watch.status()["comparison"]
                time.sleep(0.02)
    finally:
        watch.stop()
