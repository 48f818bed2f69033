"""``python -m specserve`` is the same program as the console script."""

from specserve.cli import main

if __name__ == "__main__":
    main()
