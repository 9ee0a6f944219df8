"""The text of a script."""

from __future__ import annotations

import re
import textwrap

from padiff.records import printable
from padiff.repro.case import Case
from padiff.repro.languages import LANGUAGES

_TEMPLATE = '''"""{title}

{verdict}

Needs {packages}. Exit code: 1 it differs as the runs did, 0 it does not.
"""

import sys
from pathlib import Path

import numpy as np
{imports}
from safetensors.numpy import load_file

TENSORS = load_file(Path(__file__).with_name({tensors!r}))
#: What each tensor is in the run.
DTYPES = {dtypes}
#: What a gradient is asked of.
LEARNS = {learns}
#: Relative L2 error that rounding explains.
LIMIT = {limit!r}


{prelude}

def compute(dtype=None):
    """What differs; `dtype` is another one to compute in."""
{lines}
    return made


def off(made, recorded):
    """The relative L2 error."""
    if made.shape != recorded.shape:
        return float("inf")
    norm = np.linalg.norm(recorded)
    error = np.linalg.norm(made - recorded)
    return float(error / norm if norm else error)


here, there = (TENSORS[f"recorded.{{side}}"].astype(np.float64) for side in ("here", "there"))
made = array(compute())
made = made.reshape(here.shape) if made.size == here.size else made
try:
    exact = array(compute("float64")).reshape(made.shape)
except Exception as error:  # some functions know float32 only
    exact = None
    print(f"not computed in float64: {{type(error).__name__}}: {{error}}")
print({headline!r})
print(f"  against what this run recorded:      {{off(made, here):.3g}} (relative L2)")
print(f"  against what the other run recorded: {{off(made, there):.3g}}, allowed {{LIMIT:.2g}}")
if exact is not None:
    print(f"  against itself in float64:           {{off(made, exact):.3g}}")
    print(f"  the other run against that float64:  {{off(there, exact):.3g}}")
if made.shape == there.shape:
    worst = np.unravel_index(np.argmax(np.abs(made - there)), made.shape) if made.size else ()
    print(f"  worst at {{list(map(int, worst))}}: {{made[worst]:.7g}} here, {{there[worst]:.7g}} in the other run")
else:
    print(f"  shapes: {{made.shape}} here, {{there.shape}} in the other run")
if off(made, here) > LIMIT:
    print("  What this run recorded is not what these lines give: something else of the run (code of its own, another")
    print("  version, device or precision) has a part in it.")
differs = not off(made, there) <= LIMIT
print("DIFFERS" if differs else "agrees")
sys.exit(1 if differs else 0)
'''


def script_text(case: Case, verdict: str, tensors: str, versions: str) -> str:
    """The script of a case.

    Args:
        verdict: what the runs' report says, a text of its own lines.
        tensors: the name of its file of tensors.
        versions: what it was recorded with.
    """
    language = LANGUAGES[case.framework]
    for name in case.given:
        case.dtypes.setdefault(name, "float32")
    gives = [f"{name} = given({name!r}, dtype)" for name in case.given if _is_used(name, case.lines)]
    lines = case.lines
    if case.autocast is not None:
        lines = [language.autocast.format(*case.autocast), *(f"    {line}" for line in lines)]
    headline = f"{_plain(case.what)} ({versions})"
    remarks = "\n".join(_plain(remark) for remark in case.remarks)
    return _TEMPLATE.format(
        title=textwrap.fill(_doc(f"{case.what}: as {versions} computes it, against another run."), 115),
        verdict=_doc(verdict) + (f"\n\n{_doc(remarks)}" if remarks else ""),
        packages=", ".join((*language.packages, "numpy", "safetensors")),
        imports="\n".join(f"import {name}" for name in language.packages),
        tensors=tensors,
        dtypes=_wrapped(case.dtypes),
        learns=repr(sorted(case.learns)),
        limit=float(case.limit),
        prelude=language.prelude,
        lines="\n".join(f"    {line}" for line in (*gives, *lines)),
        headline=headline,
    )


def _is_used(name: str, lines: list[str]) -> bool:
    """Whether lines name it; what they ask for themselves, in a loop, they do not."""
    return any(re.search(rf"(?<!['\w]){re.escape(name)}\b", line) for line in lines)


def _wrapped(mapping: dict[str, str]) -> str:
    inner = "".join(f"    {name!r}: {value!r},\n" for name, value in mapping.items())
    return f"{{\n{inner}}}"


def _plain(text: str) -> str:
    return printable(text)


def _doc(text: str) -> str:
    """A text within a docstring: it ends nowhere but where this ends, and has no escapes."""
    return printable(text, lines=True).replace("\\", "\\\\").replace('"', "'")
