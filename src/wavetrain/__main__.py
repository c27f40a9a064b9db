"""``python -m wavetrain`` is ``wavetrain``."""

from wavetrain.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
