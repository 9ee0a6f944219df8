"""``python -m padiff`` is ``padiff``."""

import importlib
import sys

if __name__ == "__main__":
    # By name: the commands stand on the hooks, which stand on this package; nothing in it imports them.
    sys.exit(importlib.import_module("padiff_cli.main").main())
