"""``specserve gpus``: the GPUs whose memory is known by name, and those of this machine."""

from __future__ import annotations

import click

from specserve.commands.options import answer, follows, format_option


@click.command("gpus")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@format_option
def gpus(names: tuple[str, ...], output: str) -> None:
    """List the names that hardware.gpu_name takes.

    With NAMEs: what each of them is understood as.
    """
    from specserve.errors import ConfigError, Problem
    from specserve.gpu.names import KNOWN, read

    boards, problems = list(KNOWN), []
    if names:
        readings = {name: read(name) for name in names}
        boards = [r.capacity for r in readings.values() if r.capacity is not None]
        problems = [
            Problem(r.problem or "is not known", name, fix=r.fix)
            for name, r in readings.items()
            if r.capacity is None
        ]
    unknown = None
    if problems:
        unknown = ConfigError(problems)
    if output == "json":
        answer(
            {
                "gpus": [
                    {"name": b.name, "maker": b.maker, "vendor_gb": b.vendor_gb, "gib": b.cuda_gib}
                    for b in boards
                ]
            },
            unknown,
        )
        return
    width = max((len(b.name) for b in boards), default=0)
    for board in boards:
        click.echo(
            f"{board.name:{width}}  {board.vendor_gb:4} GB  {board.cuda_gib:7.2f} GiB usable"
        )
    if unknown is not None:
        raise unknown
    follows(f"specserve plan CONFIG --set hardware.gpu_name='{boards[0].name}'")
