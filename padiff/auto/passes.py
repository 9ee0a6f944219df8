"""One recorded pass of one model, also layer by layer on the reference's values, and what ``auto_diff`` prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from traceback import StackSummary
from typing import Any

import numpy as np

from padiff.align import NOTHING_SEEN, Alignment, RuntimeEvidence, align
from padiff.auto.arguments import ModelSetup, Settings
from padiff.compare.judge.limits import UNRELATED
from padiff.compare.judge.site_facts import key_of, noted, rounding_gradients
from padiff.errors import UsageError
from padiff.frameworks.hooking import Handle
from padiff.model.nested import flatten, replace_tensors
from padiff.recorder.capture import Capture
from padiff.recorder.copying import own_calls
from padiff.recorder.layers import FixedLayers
from padiff.records import CANNOT_TELL, ROOT, Both, Diff, Report, Step, count_text, is_functional, verdict, zeros_text
from padiff.records.pair_table import Key
from padiff.records.report_text import tree_text
from padiff.records.step_diffs import StepDiffs
from padiff.system.frames import is_users
from padiff.system.terminal import first_few
from padiff.weights.assign import AssignError, Carried, Inputs, carry_over, run_once, success_text

#: A context that is active during a pass (hooks that replace outputs).
During = Callable[[], AbstractContextManager[Any]]


@dataclass
class Pass:
    """Results of a pass: the step's records, and the Python stack of each layer's call."""

    step: Step
    stacks: dict[tuple[str, int], StackSummary]


def run_pass(
    side: ModelSetup, number: int, backward: bool, during: During = nullcontext, around: During = nullcontext
) -> Pass:
    """Run a model once on its inputs and record it. Gradients are cleared before, and no optimizer steps.

    Args:
        number: number of the step.
        backward: True to run backward, too.
        during: hooks that replace a layer's output for later layers, after the output is recorded.
        around: hooks that replace a layer's output before it is recorded.

    Raises:
        UsageError: the model's forward, or the loss, failed on these inputs; the cause is attached.
    """
    framework, live = side.framework, side.live
    # Function calls are recorded in the first pass only, where the weights are equal.
    layers = FixedLayers(framework, live.nodes, side.chosen, side.owning)
    capture = Capture(number, layers, stacks=True, functions=number == 0)
    framework.layers.clear_gradients(live.model)
    with around():
        capture.attach()
        try:
            with during():
                output = _forward(side)
                if backward or side.loss_fn is not None:
                    loss = _loss(side, output)
                    capture.log_loss(loss)
                    if backward:
                        loss.backward()
            step = capture.finish(updates=False)
        finally:
            capture.detach()
    return Pass(step, capture.stacks)


def weights_after(side: ModelSetup, number: int) -> Step:
    """Return the current parameters as the initial weights of the step ``number``."""
    return Capture(number, FixedLayers(side.framework, side.live.nodes, side.chosen, side.owning)).weights()


def update(side: ModelSetup) -> None:
    """Step the side's optimizer and clear its gradients, or call the user's function, which does both."""
    if side.framework.optimizers.is_optimizer(side.optimizer):
        side.framework.optimizers.step(side.optimizer)
    elif side.optimizer is not None:
        side.optimizer()


def _forward(side: ModelSetup) -> Any:
    try:
        return side.live.model(*side.args, **side.kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        framework = side.framework
        shapes = {
            name: f"{framework.tensors.dtype(value)} {list(framework.tensors.shape(value))}"
            for name, value in (*enumerate(side.args), *side.kwargs.items())
            if framework.tensors.is_tensor(value)
        }
        owned = sorted({framework.tensors.dtype(tensor) for _, tensor in side.live.tensors()})
        raise UsageError(
            f"the {side.name} model's forward failed on its inputs {shapes} (its parameters are {', '.join(owned)}): "
            f"{error}"
        ) from error


def _loss(side: ModelSetup, output: Any) -> Any:
    framework = side.framework
    if side.loss_fn is None:
        return _mean_of_all(side, output)
    loss = side.loss_fn(output)
    if not framework.tensors.is_tensor(loss) or math.prod(framework.tensors.shape(loss)) != 1:
        got = list(framework.tensors.shape(loss)) if framework.tensors.is_tensor(loss) else type(loss).__name__
        raise UsageError(f"loss_fns: the {side.name} model's loss has to be a tensor of one element, got {got}")
    return loss


def _mean_of_all(side: ModelSetup, output: Any) -> Any:
    """Return the default loss: the sum of the means of all floating-point outputs."""
    framework = side.framework
    floating = [
        tensor
        for _, tensor in flatten(output, "output", framework.tensors.is_tensor)
        if framework.tensors.dtype(tensor).startswith(("float", "bfloat")) and framework.tensors.trainable(tensor)
    ]
    if not floating:
        raise UsageError(
            f"the {side.name} model's output holds no floating tensor with a gradient: give loss_fns, or "
            "diff_phase='forward'"
        )
    total = floating[0].mean()
    for tensor in floating[1:]:
        total = total + tensor.mean()
    return total


#: Values of the reference by layer path and call index, then by slot.
_Values = dict[tuple[str, int], dict[str, np.ndarray]]


@contextmanager
def outputs_of_reference(candidate: ModelSetup, reference: Step, alignment: Alignment) -> Iterator[None]:
    """Replace each paired layer's output, after it is recorded, by the reference's output."""
    values = _values(reference, "forward")

    def replaced(path: str, call: int, _: tuple[Any, ...], output: Any) -> Any:
        of_reference = _by_slot(values.get((path, call), {}), output, candidate)

        def new(slot: str, tensor: Any) -> Any:
            array = of_reference.get(slot)
            fits = array is not None and array.shape == candidate.framework.tensors.shape(tensor)
            return candidate.framework.tensors.like(tensor, array) if fits else tensor

        return replace_tensors(output, "output", candidate.framework.tensors.is_tensor, new)

    with hooked(candidate, _partners(alignment), replaced):
        yield


@contextmanager
def gradients_of_reference(candidate: ModelSetup, reference: Step, alignment: Alignment) -> Iterator[None]:
    """Replace the gradient of each paired layer's output, after it is recorded, by the reference's gradient."""
    values = _values(reference, "backward")
    hooked_ids: set[int] = set()
    alive: list[Any] = []  # an id identifies a tensor only as long as the tensor exists

    def catch(path: str, call: int, _: tuple[Any, ...], output: Any) -> None:
        of_reference = _by_slot(values.get((path, call), {}), output, candidate)
        for slot, tensor in flatten(output, "output", candidate.framework.tensors.is_tensor):
            array = of_reference.get(slot)
            if array is None or id(tensor) in hooked_ids or array.shape != candidate.framework.tensors.shape(tensor):
                continue
            hooked_ids.add(id(tensor))
            alive.append(tensor)
            candidate.framework.hooks.on_gradient(tensor, partial(_in_place_of, candidate, array))

    with hooked(candidate, _partners(alignment), catch):
        yield


def _in_place_of(candidate: ModelSetup, array: np.ndarray, gradient: Any) -> Any:
    return candidate.framework.tensors.like(gradient, array)


@contextmanager
def hooked(
    side: ModelSetup, partners: Mapping[str, str], replaced: Callable[[str, int, tuple[Any, ...], Any], Any]
) -> Iterator[None]:
    """Call ``replaced(partner, call, args, output)`` after each call of a side's layers; its result is the new output.

    Args:
        side: the model whose layers are hooked.
        partners: layer paths, each with the path that is passed to ``replaced``.
        replaced: the function to call.
    """
    handles: list[Handle] = []
    calls: Counter[str] = Counter()
    again: Counter[str] = Counter()

    def hook(path: str, args: tuple[Any, ...], output: Any) -> Any:
        # Recomputation during backward repeats the forward's calls in the same order.
        counter = again if side.framework.hooks.recomputing() else calls
        call = counter[path]
        counter[path] += 1
        with own_calls():
            return replaced(partners[path], call, args, output)

    try:
        for path in partners:
            handles.append(side.framework.hooks.on_outputs(side.live.layer(path), partial(hook, path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _partners(alignment: Alignment) -> dict[str, str]:
    return {pair.candidate.path: pair.reference.path for pair in alignment.pairs}


def _values(reference: Step, stage: str) -> _Values:
    values: _Values = {}
    for record in reference.records:
        if record.stage == stage:
            values.setdefault((record.layer, record.call), {})[record.slot] = record.value
    return values


def _by_slot(of_reference: Mapping[str, np.ndarray], output: Any, candidate: ModelSetup) -> Mapping[str, np.ndarray]:
    """Return the reference's values by the candidate's slots: by name, or by position if all names differ."""
    slots = [slot for slot, _ in flatten(output, "output", candidate.framework.tensors.is_tensor)]
    if len(slots) == len(of_reference) and not of_reference.keys() & set(slots):
        return dict(zip(slots, of_reference.values()))
    return of_reference


@dataclass
class NoiseDriven:
    """Parameters whose gradients are rounding noise, and a bound on the change that an optimizer made to them."""

    _keys: set[Key] = field(default_factory=set)
    _moved: float = 0.0
    #: Root mean square of the difference of such weights in the current step, by layer.
    _apart: dict[str, float] = field(default_factory=dict)

    def see(self, diffs: Sequence[Diff]) -> None:
        """Add the parameters whose gradients in this step are rounding noise."""
        step = StepDiffs.from_diffs(diffs)
        self._keys |= step.keys_of(step.figure_fact(rounding_gradients))

    def stepped(self, before: Step, after: Step) -> None:
        """Add the reference's largest update to the bound on changes by noise."""
        weights = {(r.layer, r.slot): r.value for r in before.records if r.stage == "weight"}
        updates = [
            np.square(np.asarray(r.value, np.float64) - np.asarray(weights[r.layer, r.slot], np.float64)).mean()
            for r in after.records
            if r.stage == "weight" and (r.layer, r.slot) in weights and r.value.size
        ]
        self._moved += math.sqrt(max(updates, default=0.0))

    def judge(self, diffs: Sequence[Diff]) -> list[Diff]:
        """Return the diffs of a step, in which differences that noise explains pass with a note.

        Noise explains differences of weights whose gradients are noise, and of the outputs that such weights shift. A
        bias with a zero gradient is cancelled by later layers, so only its own layer's output shows the bias.
        """
        self._apart.clear()
        return [self._judged(diff) for diff in diffs]

    def _judged(self, diff: Diff) -> Diff:
        figures, key = diff.figures, key_of(diff)
        if diff.problem or figures is None or not diff.compared or not figures.size:
            return diff
        rms = figures.l2 / math.sqrt(figures.size)
        if diff.pair.stage == "weight" and key in self._keys and rms <= UNRELATED * self._moved:
            self._apart[key[0]] = max(rms, self._apart.get(key[0], 0.0))
            return diff if diff.passed else noted(diff)
        # The tolerance is added: a limit on the mean absolute value, and 1.25 times that on the root mean square.
        shifted = diff.pair.stage == "forward" and key[0] in self._apart
        allowed = diff.judgement.limit if diff.judgement is not None else 0.0
        if shifted and not diff.passed and rms <= self._apart[key[0]] + 1.25 * allowed:
            return noted(diff)
        return diff


def carried_over(settings: Settings) -> Carried:
    """Copy the weights to the candidate; one run of both models helps to pair layers, and proves the result.

    Raises:
        AssignError: the weights can't be copied; nothing was changed.
    """
    base, raw = (side.model for side in settings.sides)
    try:
        return carry_over(base, raw, settings.layer_map, tuple(_inputs(settings)), may_stay=settings.mapped)
    except AssignError:
        raise
    except UsageError:
        # The models may fail in eval mode only; wrong inputs raise an error in the passes that follow.
        return carry_over(base, raw, settings.layer_map, may_stay=settings.mapped)


def aligned_as(carried: Carried | None, settings: Settings) -> Callable[..., Alignment]:
    """Return the function that aligns the models: `align` with the answers from the transfer of weights.

    If a rule of the user arranged a layer's parameters differently than the alignment does, the insides of this layer
    are not compared.
    """
    otherwise: set[tuple[str, str]] | None = None
    unseen: tuple[tuple[Any, ...], Alignment] | None = None
    answers: Mapping[str, str] = carried.choices if carried is not None else {}
    without = carried.without if carried is not None else ()

    def aligned(
        reference: Any,
        candidate: Any,
        layer_map: Any = None,
        seen: Both[RuntimeEvidence] = NOTHING_SEEN,
    ) -> Alignment:
        nonlocal otherwise, unseen
        arguments = reference, candidate, layer_map
        if seen is NOTHING_SEEN and unseen is not None and all(a is b for a, b in zip(arguments, unseen[0])):
            return unseen[1]  # called before the first step, and again if evidence from running is not needed
        alignment = align(reference, candidate, layer_map, seen, without=without).answered(answers)
        if otherwise is None:
            otherwise = {
                pair for pair in settings.ruled if pair in settings.mapped and _other(settings, pair, alignment)
            }
        alignment = replace(alignment, differ_inside=alignment.differ_inside | otherwise)
        if seen is NOTHING_SEEN:
            unseen = arguments, alignment
        return alignment

    return aligned


def _other(settings: Settings, pair: tuple[str, str], alignment: Alignment) -> bool:
    """Return True if two layers' initial values differ from the values that the alignment implies."""
    models = settings.sides.map(lambda side: side.live)
    within = {layer.path for layer in models.reference.below(pair[0])}
    for parameters in alignment.parameters:
        parts = Both(parameters.reference, parameters.candidate)
        if parts.reference[0].layer not in within or any(len(several) != 1 for several in parts):
            continue
        expected, actual = (
            part.read(model.value(part.layer, part.slot)).ravel() for model, (part,) in models.zip(parts)
        )
        if expected.size == actual.size and not np.allclose(expected, actual, rtol=1e-2, atol=1e-6):
            return True
    return False


@dataclass(frozen=True)
class ComparedWhole:
    """Two layers that are compared by their outputs only: their paths, and the parameters that are not compared."""

    paths: Both[str]
    parameters: Both[list[str]]


def compared_wholes(settings: Settings, alignment: Alignment) -> list[ComparedWhole]:
    """Return the mapped layers with sublayers, rules or parameters that are not compared."""
    layers = []
    for pair in settings.mapped:
        places, differ = list(zip(settings.sides, pair)), pair in alignment.differ_inside
        names = Both(*(_uncompared(side, path, differ) for side, path in places))
        more = any(len(side.live.below(path)) > 1 for side, path in places)
        if any(names) or more or pair in settings.ruled:
            layers.append(ComparedWhole(Both(*pair), names))
    return layers


def _uncompared(side: ModelSetup, path: str, differ: bool) -> list[str]:
    return [
        f"{layer.path}/{p.slot}"
        for layer in side.live.below(path)
        for p in layer.parameters
        if p.role == "parameter" and (differ or layer.path not in side.owning)
    ]


def seen_of(settings: Settings, carried: Carried | None) -> Both[RuntimeEvidence]:
    """Return evidence from running both models; no evidence if they do not run in eval mode."""
    if carried is not None and carried.seen.reference.order:
        return carried.seen
    with suppress(UsageError):
        return settings.sides.zip(_inputs(settings)).map(
            lambda run: RuntimeEvidence.from_step(run_once(run[0].live, run[1]))
        )
    return NOTHING_SEEN


def _inputs(settings: Settings) -> Both[Inputs]:
    return settings.sides.map(lambda side: Inputs(side.args, side.kwargs))


_STAGE_NAMES = {
    "input": "Input",
    "weight": "Weight",
    "forward": "Forward",
    "loss": "Loss",
    "backward": "Backward",
    "grad": "Weight Grad",
    "update": "Update",
}
#: Python stacks by layer path and index of the call.
Stacks = Mapping[tuple[str, int], StackSummary]


class Printer:
    """Printer of the progress of an ``auto_diff``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def print_options(self) -> None:
        self._say("Your options:")
        print("{")
        for name, value in self._settings.options().items():
            print(f"  {name}: `{value}`")
        print("}")
        for remark in self._settings.remarks:
            self._say(remark)

    def weights_assigned(self, carried: Carried) -> None:
        for line in (*carried.described(), success_text(carried)):
            self._say(line)

    def weights_failed(self, error: Exception) -> None:
        self._say("Assign weight Failed !!!")
        print(f"\n{error}\n")

    def wholes(self, pairs: Sequence[ComparedWhole]) -> None:
        """Print the layers that are compared by inputs and outputs only, with the parameters that are not compared."""
        for pair in pairs:
            few = " against ".join(_few(side) for side in pair.parameters)
            names = f" (parameters not compared: {few})" if any(pair.parameters) else ""
            self._say(f"Compared as a whole, not inside: {' and '.join(f'`{path}`' for path in pair.paths)}{names}")

    def step(self, number: int) -> None:
        self._say(f"=================Train Step {number}=================")

    def compared(self, diffs: Sequence[Diff], number: int) -> None:
        """Print the stages of the step that agree, and the largest difference of the outputs."""
        outputs = [
            d.figures.max_abs
            for d in diffs
            if d.pair.stage == "forward" and d.pair.anchor.layer == ROOT and d.pair.step == number and d.figures
        ]
        if outputs:
            self._say(f"Max elementwise output diff is {max(outputs)}")
        for stage in ("forward", "loss", "backward", "grad"):
            here = [d for d in diffs if d.pair.stage == stage and d.pair.step == number and d.compared]
            if here and all(d.passed for d in here):
                self._say(f"{_STAGE_NAMES[stage].lower()} stage compared.")
        after = [d for d in diffs if d.pair.stage == "weight" and d.pair.step == number + 1]
        if after and all(d.passed for d in after):
            self._say("weight after the optimizer compared.")

    def dumped(self, folders: Sequence[str]) -> None:
        """Print the folders of the dumps, if there are any."""
        if folders:
            self._say(f"Dumps of both models: {' and '.join(folders)}")

    def logged(self, files: Sequence[Path]) -> None:
        for file in files:
            self._say(f"Differences in weight or grad !!! Check reports at `{file}`")

    def verdict(self, report: Report, stacks: Both[Stacks]) -> None:
        zeros = report.coverage.zeros
        if zeros:
            self._say(f"{zeros_text(zeros)}, which no tolerance can judge: {_few(zeros)}")
        if report.first_diff is None:
            unpaired = (*report.coverage.reference_layers, *report.coverage.candidate_layers)
            if unpaired:
                self._say(f"Not compared, no partner: {', '.join(unpaired)}")
            if report.outcome == CANNOT_TELL:
                self._say("FAILED !!!")
                print(f"\n{verdict(report)}\n")
            else:
                self._say("SUCCESS !!!")
            return
        first = report.first_diff
        if not report.failed:
            self._say("FAILED !!!")
            print(f"\n{first.message}\n")
            return
        diff = report.failed[0]
        name = _STAGE_NAMES[first.stage]
        optimizer = " (after the optimizer's step)" if first.stage == "weight" and first.step > 0 else ""
        self._say("FAILED !!!")
        self._say(f"    Diff found in `{name} Stage`{optimizer} in step: {first.step}, slot `{first.slot}`")
        sides, paths = self._settings.sides, Both(first.reference, first.candidate)
        self._say(f"    Type of layer is: {' vs '.join(map(_type, sides, paths))}")
        self._say(f"    Path of layer is: {' vs '.join(f'`{path}`' for path in paths)}")
        print(f"\n{first.message}\n")
        print(f"{count_text(report)}.\n")
        self._say("Check model struct:")
        for side, path in sides.zip(paths):
            print(f"{side.name} model ({side.framework.name})\n=========================")
            print(tree_text(side.live.info.layers, path))
        for side, path, record, side_stacks in zip(sides, paths, (diff.pair.reference, diff.pair.candidate), stacks):
            call = record.call if record is not None else 0
            name = path or ""
            if record is not None and is_functional(record.slot):
                name = f"{path}/{record.slot.rpartition('.')[0]}"
            stack = side_stacks.get((name, call)) or side_stacks.get((path or "", 0))
            if stack is not None:
                print(f"\n{side.name} stacks ({side.framework.name}):\n=========================")
                print(stack_text(stack, self._settings.full_stacks))

    def _say(self, text: str) -> None:
        print(f"[AutoDiff] {text}")


def _few(names: Sequence[str]) -> str:
    return first_few(names, 4) or "none"


def _type(side: ModelSetup, path: str | None) -> str:
    if path is None or not any(node.path == path for node in side.live.nodes):
        return str(path)
    return str(type(side.live.layer(path)))


def stack_text(stack: StackSummary, full: bool) -> str:
    """Return a call stack as text; only the user's own lines unless `full` is True."""
    frames = [frame for frame in stack if full or is_users(frame.filename)]
    lines = [] if full else ["         ..."]
    for frame in frames or list(stack)[-3:]:
        lines.append(f"         File {frame.filename}: {frame.lineno}    {frame.name}")
        lines.append(f"                {frame.line}")
    return "\n".join(lines)
