"""Entry point of ``python -m padiff``, which runs the command ``padiff``."""

import importlib
import sys

if __name__ == "__main__":
    # Imported by name, because modules of padiff must not import the command line, which is built on them.
    sys.exit(importlib.import_module("padiff_cli.main").main())
