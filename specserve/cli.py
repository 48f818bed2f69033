"""The commands: parse, one call, print. The only place that prints or exits."""

from __future__ import annotations

import click

from specserve import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specserve")
def main() -> None:
    """Speculative decoding on vLLM that is safe to run in production."""
