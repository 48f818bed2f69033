"""``python -m specserve`` is the same program as the console script."""

import signal
import sys


def _hear(lost: "sys.UnraisableHookArgs") -> None:
    """A Ctrl-C that native code of a library has caught and cannot pass on is sent again."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    else:
        sys.__unraisablehook__(lost)


def main() -> None:
    """Run the program.

    Until its modules are loaded, a tenth of a second, Ctrl-C ends this process as it ends any
    program: without Python's traceback.
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.unraisablehook = _hear
    from specserve import cli

    try:
        signal.signal(signal.SIGINT, previous)
        cli.main()
    except KeyboardInterrupt:  # between two instructions that have an answer to it
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
