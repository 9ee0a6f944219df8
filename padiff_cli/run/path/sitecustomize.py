"""Start-up module of processes below ``padiff run``, where padiff was not installed with its ``.pth`` file.

``padiff run`` puts this folder first on ``PYTHONPATH``. Python then imports this module as it starts. The module takes
its folder from ``sys.path`` again, and runs the ``sitecustomize`` that Python would have imported.
"""

import os
import sys
from importlib.machinery import PathFinder

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [place for place in sys.path if os.path.abspath(place) != _here]
if os.environ.get("PADIFF_RUN_PROCESSES"):
    try:
        if PathFinder.find_spec("padiff_cli") is None:
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_here))))
        import padiff_cli.run.startup

        padiff_cli.run.startup.begin()
    except Exception as error:
        print(f"padiff: this process is not recorded: {type(error).__name__}: {error}", file=sys.stderr)
_users = PathFinder.find_spec("sitecustomize")
if _users is not None and _users.loader is not None:
    from importlib.util import module_from_spec

    sys.modules[__name__] = _module = module_from_spec(_users)
    _users.loader.exec_module(_module)
