"""``python -m ckptsync``."""

from ckptsync.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
