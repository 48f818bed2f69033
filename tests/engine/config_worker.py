"""Asks vLLM's own config code about command lines: one JSON list of arguments a line in, one answer a line out.

No engine starts and no weights are read. Answers go to the file descriptor given as first argument, since vLLM logs
to standard output.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(
        FlexibleArgumentParser()
    )  # the server's own flags are not looked at
    for line in sys.stdin:
        error = None
        try:
            AsyncEngineArgs.from_cli_args(
                parser.parse_known_args(json.loads(line))[0]
            ).create_engine_config()
        except (Exception, SystemExit) as e:  # noqa: BLE001 - whatever it refuses with
            error = f"{type(e).__name__}: {e}"
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    main()
