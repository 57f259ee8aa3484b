"""Entry point of `python -m foretell`."""

from foretell.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
