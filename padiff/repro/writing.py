"""Writing and checking of the scripts that reproduce the first diff of two runs."""

from __future__ import annotations

import ast
import json
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from padiff.compare import Policy, RunComparison
from padiff.compare.declared.layers import optimizer_call
from padiff.compare.declared.optimizers import Optimizers
from padiff.compare.diagnose.first import scene_of
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.place import place_of_diff
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import allowed
from padiff.compare.judge.policy import NoisePolicy
from padiff.dump.read import opened
from padiff.dump.safetensors import write_safetensors
from padiff.errors import NothingToCompareError, UsageError
from padiff.frameworks.catalog import ARGUMENTS, FIXES
from padiff.model import equivalents
from padiff.model.given_map import GivenMap
from padiff.pair.joined_calls import layout_between
from padiff.records import (
    LOOP,
    SIDES,
    Both,
    Diff,
    Figure,
    FirstDiff,
    Layout,
    Pair,
    Record,
    Run,
    RunInfo,
    Step,
    printable,
)
from padiff.repro.computing import Side, gradient_cases, loss_cases, output_cases
from padiff.repro.expressions import LAYER_ARGUMENTS, LAYER_FUNCTIONS, language_of, layer_text
from padiff.repro.languages import LANGUAGES, CannotWriteError, Case, comment, tensors_of, values_of
from padiff.system.code import ForeignCodeError, Vocabulary, literal, parsed

#: Largest number of steps in a script.
MOST_STEPS = 64


def update_cases(scene: DiffContext, sides: Both[Side]) -> Both[Case | CannotWriteError]:
    """Return the scripts' cases for an update that differs: the optimizer over all steps so far, on recorded weights.

    Raises:
        CannotWriteError: neither side can have a script.
    """
    pair = scene.diff.pair
    if pair.anchor.layer == LOOP:
        raise CannotWriteError(
            "the learning rates differ, which the loops or their schedules set: nothing of a framework to show"
        )
    numbers = scene.numbers
    last = scene.number
    if numbers[: last + 1] != list(range(last + 1)) or last >= MOST_STEPS:
        raise CannotWriteError(
            f"what an optimizer does in step {last} depends on all steps before, of which both runs have "
            f"{sum(n < last for n in numbers)}. Record every step from the first one on (every_n_steps=1), "
            f"for {MOST_STEPS} steps at most"
        )
    return _each_side(pair, sides, lambda side, record: _update(scene, side, record))


def _each_side(pair: Pair, sides: Both[Side], write) -> Both[Case | CannotWriteError]:  # type: ignore[no-untyped-def]
    cases: list[Case | CannotWriteError] = []
    for side, record, counterpart in ((sides.reference, *pair.sides), (sides.candidate, *pair.sides.swapped())):
        assert record is not None and counterpart is not None
        try:
            case = write(side, record)
            case.own, case.other = (values_of(tensor.source, tensor.site) for tensor in (record, counterpart))
            cases.append(case)
        except CannotWriteError as error:
            cases.append(error)
    return Both(*cases)


def _update(scene: DiffContext, side: Side, record: Record) -> Case:
    site = f"{record.layer}/{record.slot}"
    optimizers = Optimizers.from_settings(side.settings)
    group = optimizers.by_site.get(site)
    if group is None or optimizers.count != 1:
        raise CannotWriteError(
            f"the {side.name} does not say what its optimizer of {site} is set to"
            + (f": it has {optimizers.count} optimizers" if optimizers.count > 1 else "")
        )
    framework = side.info.framework
    language = language_of(framework)
    call = optimizer_call(framework, group.rule, group.values, "RATES[0]", "weight") if group.known else ""
    if not call:
        raise CannotWriteError(f"the {side.name}'s optimizer is {group.rule}: not one that is known here")
    case = side.case(f"{group.rule}, the update of {site}")
    rates: list[float] = []
    place = group.values.get("rate", 0)
    for number in range(scene.number + 1):
        steps, step_rates = scene.sides(number), getattr(scene.rates(number), side.name)
        if steps is None or not isinstance(place, int) or place >= len(step_rates):
            raise CannotWriteError(f"the learning rate of step {number} of the {side.name} was not recorded")
        rates.append(step_rates[place] * group.setting("lr_factor", 1.0))
        records = {(r.layer, r.stage, r.slot): r for r in getattr(steps, side.name).records}
        for stage, name in (("weight", "weight"), ("grad", "gradient")):
            tensor = records.get((record.layer, stage, record.slot))
            what = f"the {name} of {site} of the {side.name} in step {number}"
            if tensor is None:
                raise CannotWriteError(f"{what} was not recorded")
            array = values_of(tensor.source, what)
            case.give_array(f"{name}_{number}", array, tensor.dtype, what)
    case.lines += [f"RATES = {literal(rates)}", *(line.format(call=call) for line in language.optimizer)]
    return case


def statistics_cases(scene: DiffContext, sides_at) -> Both[Case | CannotWriteError]:  # type: ignore[no-untyped-def]
    """Return the scripts' cases for running statistics that differ: the normalization layer in the step before.

    Args:
        scene: the context of the first diff.
        sides_at: returns both sides of a step, given its number, or `None`.

    Raises:
        CannotWriteError: neither side can have a script, as for weights that are no running statistics.
    """
    pair, number = scene.diff.pair, scene.number
    assert pair.reference is not None
    slot = equivalents.slot(pair.reference.slot)
    if number == 0:
        raise CannotWriteError(
            "the runs start from other weights: nothing of a framework to show. `padiff.start_from` gives the "
            "candidate the reference's"
        )
    if slot not in ("running_mean", "running_var"):
        raise CannotWriteError(
            "a weight differs though the updates that were recorded do not: something besides the optimizer changes it "
            "(a load, a clamp, an average), or a step between was not recorded"
        )
    before = sides_at(number - 1) if number - 1 in scene.numbers else None
    if before is None:
        raise CannotWriteError(
            f"step {number - 1} was not recorded, in which the statistics became what they are in step {number}: "
            "record every step (every_n_steps=1)"
        )
    return _each_side(pair, before, lambda side, record: _statistic(side, record, slot))


def _statistic(side: Side, record: Record, slot: str) -> Case:
    layer = side.layers[record.layer]
    calls = [call for call in side.graph.trace.calls if call.layer == layer.path and not call.function]
    if len(calls) != 1 or len(calls[0].inputs) != 1 or not equivalents.kind(layer).startswith("batchnorm"):
        raise CannotWriteError(
            f"`{layer.path}` ({layer.type}) is called {len(calls)} times in a step, or is no BatchNorm"
        )
    case = side.case(f"{layer.type}, {record.slot} after one step")
    traced = side.graph.trace.tensors[calls[0].inputs[0].tensor]
    x = case.give("x", traced.source, traced.dtype, f"what goes into `{layer.path}` of the {side.name}")
    tensors = {}
    for parameter in layer.parameters:
        slot_name = equivalents.slot(parameter.slot)
        if slot_name not in equivalents.ONE_SIDED:
            weight = side.weight(f"{layer.path}/{parameter.slot}")
            tensors[slot_name] = case.give(slot_name, weight.source, weight.dtype, weight.site)
    if side.training(layer) is not True:
        raise CannotWriteError(
            f"`{layer.path}` of the {side.name} does not train, or it is not recorded whether it does"
        )
    shape = tuple(np.shape(case.given[x]))
    text = layer_text(side.info.framework, layer, x, tensors, True, shape)
    case.lines += [text, f"made = {tensors[slot]}"]
    return case


#: The vocabulary of tables of values.
LITERALS = Vocabulary(functions=frozenset({"float"}))

# Names in the lines that call an optimizer or open an autocast.
_VARIABLES = "made loss dtype weight optimizer step rate before group RATES TENSORS DTYPES"
_CHAINS = {
    "torch": "torch.nn.Parameter torch.no_grad torch.autocast torch.float16 torch.bfloat16",
    "paddle": "paddle.create_parameter paddle.amp.auto_cast",
}
_MEMBERS = "T reshape shape sum backward step clear_grad set_lr set_value param_groups grad copy_"


@lru_cache(maxsize=8)
def vocabulary_of(framework: str) -> Vocabulary:
    """Return the vocabulary of a framework's scripts, without the variables of their tensors."""
    language, fixes = LANGUAGES[framework], FIXES[framework]
    functions = (language.layers.get(name, name) for name in LAYER_FUNCTIONS)
    return Vocabulary(
        variables=frozenset(_VARIABLES.split()),
        functions=frozenset({"given", "cast", "gradient", "float", "enumerate"}),
        chains=fixes.chains.union(
            _CHAINS[framework].split(),
            language.calls.values(),
            (f"{language.functional}.{name}" for name in functions),
        ),
        members=frozenset({*_MEMBERS.split(), *language.methods.values()}),
        keywords=fixes.keywords.union(
            ARGUMENTS, LAYER_ARGUMENTS, language.arguments.values(), ("dtype", "enable", "enabled", "level")
        ),
    )


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


# Beginnings of the environment entries that issue templates of the frameworks ask for.
_ASKED = ("framework.", "device", "cpu", "python", "platform", "threads", "tf32", "autocast", "matmul", "deterministic",
          "onednn", "cudnn", "numpy", "dtype", "attention")  # fmt: skip
_README, _ENVIRONMENT = "README.md", "environment.json"


@dataclass(frozen=True)
class Repro:
    """The written scripts.

    Attributes:
        folder: the folder of the scripts.
        first: the first diff.
        scripts: side -> path of its script.
        reasons: side -> reason why it has no script.
    """

    folder: Path
    first: FirstDiff
    scripts: Mapping[str, Path]
    reasons: Mapping[str, str]


def write_repro(
    reference: str | Path | Run,
    candidate: str | Path | Run,
    out: str | Path,
    layer_map: Any = None,
    policy: Policy | None = None,
    overwrite: bool = False,
) -> Repro | None:
    """Write the first diff of two runs as two short scripts, with the tensors that they need and the environments.

    Each script repeats the computation that differs, from the inputs that its run recorded, and exits with 1 if the
    result differs from the one that the other run recorded. A script needs the framework, numpy and safetensors.

    Args:
        reference, candidate: run folders, or runs in memory.
        out: the folder to write; it must be new or empty.
        layer_map, policy: see `padiff.compare_runs`.
        overwrite: replace the scripts in an existing folder of scripts.

    Returns:
        The written scripts; `None` if the runs match.

    Raises:
        UsageError: neither side's script can be written (the error gives the reason), or the folder is not empty.
    """
    folder = Path(out)
    _check(folder, overwrite)
    runs = Both(reference, candidate).map(opened)
    used = policy if policy is not None else NoisePolicy()
    comparison = RunComparison(runs.reference, runs.candidate, GivenMap.from_value(layer_map), used)
    numbers = comparison.common()
    if not numbers:
        raise NothingToCompareError("the runs have no common step")
    for number in numbers:
        diffs = comparison.diffs(number)
        first = comparison.first(diffs)
        if first is not None:
            break
    else:
        declared = comparison.report([], numbers).first_diff
        if declared is None:
            return None
        raise CannotWriteError(
            f"no tensor differs that was recorded, so there is nothing to compute. {declared.message}"
        )
    failed = next(diff for diff in diffs if not diff.passed)
    try:
        cases = _cases(failed, diffs, comparison, used)
    except CannotWriteError as error:
        raise CannotWriteError(f"{_place(first)}: there is no script for it: {error}") from None
    return _written(folder, first, cases, runs, failed, overwrite)


def _place(first: FirstDiff) -> str:
    return printable(f"The runs differ first at {first.where}")


def _cases(
    failed: Diff, diffs: Sequence[Diff], comparison: RunComparison, policy: Policy
) -> Both[Case | CannotWriteError]:
    """Return the case of each side, or the reason why a side has none.

    Raises:
        CannotWriteError: neither side can have a script.
    """
    pair = failed.pair
    if not pair.complete:
        raise CannotWriteError(f"it is {failed.problem}: there is nothing to hold a tensor against")
    if pair.stage == "input":
        raise CannotWriteError(
            "the batches differ already, which the loops give to the models: nothing of a framework to show. "
            "`padiff.batches` gives the candidate the reference's"
        )
    scene = scene_of(failed, diffs, comparison.alignment, comparison.runs)
    infos = comparison.runs.map(lambda run: run.info)
    steps = scene.sides(scene.number)
    if steps is None:
        raise CannotWriteError(f"step {scene.number} can't be read any more")
    sides = _sides(infos, steps)
    if pair.stage == "loss":
        return loss_cases(failed, sides)
    if pair.stage == "update":
        return update_cases(scene, sides)
    if pair.stage == "weight":
        return statistics_cases(scene, lambda number: _at(scene, number, infos))
    if pair.stage in ("backward", "grad"):
        return gradient_cases(failed, sides, _agreeing_gradients(scene, sides))
    place = place_of_diff(failed, scene.step, steps, infos, policy)
    return output_cases(failed, place, sides, list(scene.step), policy)


def _sides(infos: Both[RunInfo], steps: Both[Step]) -> Both[Side]:
    named = SIDES.zip(infos.zip(steps))
    return named.map(lambda one: Side(one[1][1], one[1][0], Graph(one[1][1].trace, one[1][0].layers), one[0]))


def _at(scene: DiffContext, number: int, infos: Both[RunInfo]) -> Both[Side] | None:
    steps = scene.sides(number)
    return None if steps is None else _sides(infos, steps)


def _agreeing_gradients(scene: DiffContext, sides: Both[Side]) -> Both[set[int]]:
    """Return the numbers of the tensors whose gradients agree, for each side."""
    agreeing: Both[set[int]] = Both(set(), set())
    for diff in scene.step:
        if diff.pair.stage == "backward" and diff.passed and diff.compared:
            for numbers, side, record in zip(agreeing, sides, diff.pair.sides):
                tensor = side.graph.tensor_of(record) if record is not None else None
                if tensor is not None:
                    numbers.add(tensor)
    return agreeing


# -- files -------------------------------------------------------------------------------------------------------------


def _written(
    folder: Path, first: FirstDiff, cases: Both[Case | CannotWriteError], runs: Both[Run], failed: Diff, overwrite: bool
) -> Repro:
    reasons = {name: str(case) for name, case in zip(SIDES, cases) if isinstance(case, CannotWriteError)}
    if len(reasons) == 2:
        why = " ".join(dict.fromkeys(reasons.values()))
        raise CannotWriteError(f"{_place(first)}: there is no script for it: {why}")
    scripts: dict[str, Path] = {}
    texts: dict[str, tuple[str, Case]] = {}
    verdict = textwrap.fill(printable(first.message), 118, break_long_words=False, break_on_hyphens=False)
    for is_reference, name, case, run in zip((True, False), SIDES, cases, runs):
        if isinstance(case, CannotWriteError):
            continue
        case.limit = _limit(failed)
        case.other = _in_own_order(case, failed, is_reference)
        file = folder / f"{name}_{case.framework}.py"
        tensors = file.with_suffix(".safetensors")
        versions = f"{run.info.framework} {run.info.framework_version}"
        texts[name] = script_text(case, verdict, tensors.name, versions), case
        scripts[name] = file
    # Both scripts are checked before anything is written or replaced.
    if overwrite and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (script, case) in texts.items():
        file = scripts[name]
        about = {"made by": "padiff repro", "step": str(first.step)}
        write_safetensors(file.with_suffix(".safetensors"), tensors_of(case), about)
        file.write_text(script, encoding="utf-8", errors="backslashreplace")
    environments = dict(SIDES.zip(runs.map(lambda run: _environment(run.info))))
    (folder / _ENVIRONMENT).write_text(json.dumps(environments, indent=1), encoding="utf-8")
    text = _readme(verdict, scripts, reasons, environments)
    (folder / _README).write_text(text, encoding="utf-8", errors="backslashreplace")
    return Repro(folder, first, scripts, reasons)


def _check(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    is_repro = (folder / _ENVIRONMENT).exists() and (folder / _README).exists()
    if not folder.is_dir() or (any(folder.iterdir()) and not (is_repro and overwrite)):
        hint = "--overwrite replaces them" if is_repro else "give another one"
        raise UsageError(f"{folder} holds {'scripts' if is_repro else 'something'} already: {hint}")


def _limit(failed: Diff) -> float:
    judged = failed.judgement
    if judged is not None and judged.figure is Figure.REL_L2 and judged.limit > 0:
        return judged.limit
    return allowed(failed.pair.anchor.dtype, failed.pair.stage)


def _in_own_order(case: Case, failed: Diff, is_reference: bool) -> np.ndarray:
    """Return the other side's tensor in the layout of this side; unchanged if the sizes differ."""
    recorded, counterpart = case.own, case.other
    assert recorded is not None and counterpart is not None
    pair = failed.pair
    layout: Layout = pair.layout
    shapes = pair.sides.map(lambda record: record.shape if record is not None else ())
    shapes = shapes if is_reference else shapes.swapped()
    if (recorded.shape, counterpart.shape) == (shapes.reference, shapes.candidate):
        counterpart = (
            layout.apply(counterpart, recorded.shape) if is_reference else layout.undo(counterpart, recorded.shape)
        )
    elif counterpart.shape != recorded.shape:
        between = layout_between(recorded.shape, counterpart.shape)
        counterpart = between.apply(counterpart, recorded.shape) if between else counterpart
    if counterpart.shape != recorded.shape and counterpart.size == recorded.size:
        counterpart = counterpart.reshape(recorded.shape)
    return np.ascontiguousarray(counterpart)


def _environment(info: RunInfo) -> dict[str, Any]:
    return {"framework": f"{info.framework} {info.framework_version}", **dict(sorted(info.environment.items()))}


def _readme(
    verdict: str, scripts: Mapping[str, Path], reasons: Mapping[str, str], environments: Mapping[str, Mapping[str, Any]]
) -> str:
    lines = ["# A minimal reproduction", "", "```text", verdict.replace("```", "'''"), "```", "", "Run:", "", "```"]
    lines += [f"python {path.name}" for path in scripts.values()] + ["```", ""]
    lines += [
        "Each script computes what differs as its run did, from what that run recorded. It prints how far that is from "
        "what the other run recorded, and from the same in float64, and exits with 1 if they differ. It needs the "
        "framework, numpy and safetensors.",
        "",
    ]
    lines += [f"There is no script of the {name}: {printable(why)}\n" for name, why in reasons.items()]
    for name, environment in environments.items():
        lines += [f"## Environment of the {name}", "", "```text"]
        lines += [
            printable(f"{key}: {value}") for key, value in environment.items() if key.startswith(("framework", *_ASKED))
        ]
        lines += ["```", ""]
    return "\n".join(lines)
