"""The text of a script, and the check that it holds no foreign code."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import lru_cache

from padiff.records import printable
from padiff.repro.case import Case, comment
from padiff.repro.languages import LANGUAGES
from padiff.repro.vocabulary import LITERALS, vocabulary_of
from padiff.system.code import ForeignCodeError, literal, parsed

_TEMPLATE = '''"""{title}

{verdict}

Needs {packages}. Exit code: 1 it differs as the runs did, 0 it does not.
"""

import sys
from pathlib import Path

import numpy as np
{imports}
from safetensors.numpy import load_file

TENSORS = load_file(Path(__file__).with_name({tensors}))
#: What each tensor is in the run.
DTYPES = {dtypes}
#: What a gradient is asked of.
LEARNS = {learns}
#: Relative L2 error that rounding explains.
LIMIT = {limit}


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
print({headline})
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
    """Return the text of a case's script.

    Args:
        case: the computation.
        verdict: message of the report about the first diff; may have several lines.
        tensors: name of the script's file of tensors.
        versions: framework and version of the run.

    Raises:
        ForeignCodeError: the script would use a name from the run that is not in the vocabulary.
    """
    text = _text(case, verdict, tensors, versions)
    check_script(text, case)
    return text


def _text(case: Case, verdict: str, tensors: str, versions: str) -> str:
    language = LANGUAGES[case.framework]
    for name in case.given:
        case.dtypes.setdefault(name, "float32")
    gives = [
        f"{name} = given({literal(name)}, dtype){_comment(case.origins.get(name, ''))}"
        for name in case.given
        if _is_used(name, case.lines)
    ]
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
        tensors=literal(tensors),
        dtypes=_wrapped(case.dtypes),
        learns=literal(sorted(case.learns)),
        limit=literal(float(case.limit)),
        prelude=language.prelude,
        lines="\n".join(f"    {line}" for line in (*gives, *lines)),
        headline=literal(headline),
    )


def _is_used(name: str, lines: list[str]) -> bool:
    """Return True if the lines use a variable; a name in quotes, which a loop reads itself, does not count."""
    return any(re.search(rf"(?<!['\w]){re.escape(name)}\b", line) for line in lines)


def _wrapped(mapping: dict[str, str]) -> str:
    inner = "".join(f"    {literal(name)}: {literal(value)},\n" for name, value in mapping.items())
    return f"{{\n{inner}}}"


def _plain(text: str) -> str:
    return printable(text)


def _doc(text: str) -> str:
    """Return a text for the inside of a docstring, without quotes or escapes that could end it."""
    return printable(text, lines=True).replace("\\", "\\\\").replace('"', "'")


def _comment(text: str) -> str:
    """Return a text of a run as a comment at the end of a line; empty for an empty text."""
    return f"  # {comment(text)}" if text else ""


# -- the check ---------------------------------------------------------------------------------------------------------


def check_script(text: str, case: Case) -> None:
    """Check that a script equals the template outside of `compute`, and that `compute` uses only the vocabulary.

    This is the second line of defence: the code that writes the lines already uses names of the catalog only.

    Raises:
        ForeignCodeError: the script has any other code.
    """
    frame, lines = _taken_apart(text)
    words = {node.id for line in lines for node in ast.walk(line) if isinstance(node, ast.Name)}
    numbered = {word for word in words if re.fullmatch("t[0-9]+", word)}
    vocabulary_of(case.framework).with_variables(numbered.union(case.given)).check_tree(ast.Module(lines, []))
    if frame != _frame(case.framework):
        raise ForeignCodeError("the script has code outside of its template: do not trust this run")


@lru_cache(maxsize=8)
def _frame(framework: str) -> str:
    return _taken_apart(_text(Case(framework, ""), "", "", ""))[0]


def _taken_apart(text: str) -> tuple[str, list[ast.stmt]]:
    """Return a script's frame (the code around `compute`, without texts and tables), and the lines of `compute`."""
    tree = parsed(text)
    lines: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "compute":
            lines += node.body[1:-1]  # between the docstring and the return
            del node.body[1:-1]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("DTYPES", "LEARNS", "LIMIT"):
            LITERALS.check_tree(node.value)
            node.value = ast.Constant(None)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            inner.value = ""
    return ast.dump(tree), lines
