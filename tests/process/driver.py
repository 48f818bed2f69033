"""`specserve launch` with the stub engine in the engine's place: the same code from the checks' end to the exit code.

python driver.py CONFIG [--reap] [--ready-file FILE] [--stub-...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from specserve import cli
from specserve.app import serve
from specserve.app.launch import Launch
from specserve.app.preflight import PreflightReport
from specserve.commands.launch import owner_of, run
from specserve.commands.options import config_command
from specserve.engine.command.args import EngineCommand, build
from specserve.engine.installed.introspect import Installed
from specserve.supervise import leftovers

STUB = Path(__file__).parents[1] / "stub_engine.py"


@click.command(context_settings={"ignore_unknown_options": True})
@config_command
@click.option("--reap", is_flag=True)
@click.option(
    "--drain-margin", type=float, help="In place of the ten seconds that a real engine may need."
)
@click.option(
    "--calibrate", type=click.Path(path_type=Path), help="With a plan of the stub's memory."
)
@click.option("--ready-file", type=click.Path(path_type=Path))
@click.option("--engine-log", type=click.Path(path_type=Path))
@click.option("--repeat", type=int, default=1, help="Of the engine's command, to make it too long.")
@click.option("--owner", callback=owner_of)
@click.argument("stub", nargs=-1, type=click.UNPROCESSED)
def drive(loaded, reap, drain_margin, calibrate, *, ready_file, owner, engine_log, repeat, stub):
    """Launch the stub."""
    shows_engine = engine_log == Path("-")
    if shows_engine:
        engine_log = None
    if drain_margin is not None:
        serve.DRAIN_MARGIN_SECONDS = drain_margin
    argv = build(loaded.settings, installed=Installed("vllm", "0.32.0")).argv
    folder = leftovers.folders(os.environ).run
    command = EngineCommand((sys.executable, str(STUB), *argv[4:], *stub))
    command = EngineCommand(command.argv * repeat)
    report = None
    if calibrate:
        sys.path.append(str(Path(__file__).parents[2]))
        from tests import plans

        planned = plans.plan(target_weights_bytes=1, kv_cache_bytes=1, kv_cache_tokens=43_680)
        report = PreflightReport((), plan=planned)
    launch = Launch(
        loaded.settings,
        command,
        dict(os.environ),
        folder,
        engine_log or folder / "engine.log",
        report=report,
        calibrate=calibrate,
    )
    run(
        loaded,
        lambda _progress: launch,
        reap=reap,
        ready_file=ready_file,
        owner=owner,
        shows_engine=shows_engine,
    )


if __name__ == "__main__":
    cli.program.add_command(drive)
    cli.main(["drive", *sys.argv[1:]])
