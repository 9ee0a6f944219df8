"""Proposals that change the training loop: the start, inputs, the calls of a step, the sum of the loss."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from itertools import permutations, product

from padiff.frameworks.catalog import number_text
from padiff.records.diagnostic import line_of_role
from padiff.records.recorded import ROOT
from padiff_cli.fix.drafts import CALLS, LINES, OTHERS, Drafts
from padiff_cli.fix.fault import parsed_call
from padiff_cli.fix.matching import Change, Match, UnwritableError, Writer
from padiff_cli.fix.source import (
    Edit,
    Proposal,
    Source,
    dotted,
    last_name,
    line_after,
    line_before,
    line_removed,
)
from padiff_cli.fix.vocabulary import (
    kind_of,
    number_of,
    value_text,
)

# Largest number of pairs of constants for means and scales. Each is a run.
_MOST_NORMALISED = 4
# Kinds of causes that moving or adding a call that zeroes gradients may mend, and its name.
_OF_ZEROING = frozenset(
    {"stale_gradient", "left_over", "gradients_cleared", "step_skipped", "no_gradient", "gradient_scale", "gradients"}
)
_ZEROING = {"torch": "zero_grad", "paddle": "clear_grad"}


class LoopRules(Drafts):
    """Writes proposals for the calls of a training loop, and for what its model is given."""

    def proposals(self) -> Iterator[Proposal]:
        """Yield the proposals."""
        for rule in (
            self._start,
            self._mode,
            self._zeroing,
            self._averaging,
            self._never_stepped,
            self._schedule,
            self._clipping,
            self._total,
            self._flipped,
            self._input,
        ):
            yield from rule()

    def _start(self) -> Iterator[Proposal]:
        """Yield the call that gives the candidate the reference's weights, after its model is made."""
        if self._fault.kind != "start_weights":
            return
        source, statement = self._project.statement_at(self._models.lines.candidate.get(ROOT))
        if source is None or not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            return
        call = f"padiff.start_from({_quoted(self._fault.reference_run)}, {statement.targets[0].id})"
        edits = [line_after(source, statement, call)]
        if not source.spelled("padiff"):
            edits.append(source.import_edit("padiff"))
        yield Proposal(tuple(edits), "the candidate starts from the reference's weights", CALLS)

    def _mode(self) -> Iterator[Proposal]:
        if self._fault.kind not in ("mode", "not_called", "dropout", "batch_norm") and "mode" not in self._fault.words:
            return
        for source, call in self._project.calls("eval"):
            if isinstance(call.func, ast.Attribute) and not call.args:
                end = source.span(call.func)[1]
                edit = Edit(source.file, end - len("eval"), end, "train")
                yield Proposal((edit,), "the model is set to train", CALLS)
        # A model that evaluates since a later step was not set back; one that never evaluates is set before the loop.
        set_by = re.fullmatch(r"model((?:\.\w+)*\.)(train|eval)\(\)", self._fault.fix)
        path, mode = ("", "") if set_by is None else set_by.groups()
        made = self._project.statement_at(self._models.lines.candidate.get(ROOT))[1]
        for source, step, _ in self._optimizer_steps() if mode == "eval" or (mode and self._first.step) else ():
            loop = source.parents.get(step)
            is_script = isinstance(loop, (ast.For, ast.While)) and source.function(loop) is None
            root = dotted(made.targets[0]) if isinstance(made, ast.Assign) and is_script else ""
            name = _model_of(source, step) if mode == "train" else root
            if isinstance(loop, (ast.For, ast.While)) and name:
                is_inner = mode == "eval" or not isinstance(source.parents.get(loop), ast.Module)
                edit = line_before(source, loop if is_inner else loop.body[0], f"{name}{path}{mode}()")
                words = "train before it trains on" if mode == "train" else "evaluate before the loop"
                yield Proposal((edit,), f"the model is set to {words}", CALLS - 0.1)

    def _zeroing(self) -> Iterator[Proposal]:
        """Yield moves and additions of the call that zeroes gradients."""
        if self._fault.kind not in _OF_ZEROING:
            return
        method = _ZEROING.get(self._framework, "zero_grad")
        for source, step, name in self._optimizer_steps():
            calls = [
                (call, statement)
                for call in source.calls("zero_grad", "clear_grad")
                if isinstance(statement := source.statement_around(call), ast.Expr) and statement.value is call
            ]
            near = [source.statement_around(call) for call in source.calls("backward") if _near(source, call, step)]
            passes = [each for each in near if each is not None and each.lineno < step.lineno]
            for call, statement in calls:
                backward = passes[0] if passes else None
                if backward is not None and backward.lineno < statement.lineno < step.lineno:
                    text = source.code(call)
                    edits = (line_removed(source, statement), line_before(source, backward, text))
                    yield Proposal(edits, "gradients are zeroed before the backward pass", CALLS)
                loop = source.parents.get(step)
                if isinstance(loop, (ast.For, ast.While)) and source.parents.get(statement) is not loop:
                    yield Proposal(_moved(source, statement, step), "gradients are zeroed after each step", CALLS)
            owners = [dotted(call.func.value) for call, _ in calls if isinstance(call.func, ast.Attribute)]
            if passes and owners and name not in owners:  # another optimizer's are zeroed
                edit = line_before(source, passes[-1], f"{name}.{method}()")
                yield Proposal((edit,), f"gradients of `{name}` are zeroed before the backward pass", CALLS - 0.1)
            if not source.calls("zero_grad", "clear_grad"):
                yield Proposal(
                    (line_after(source, step, f"{name}.{method}()"),), "gradients are zeroed after each step", CALLS
                )

    def _never_stepped(self) -> Iterator[Proposal]:
        """Yield the step of an optimizer that is cleared and never steps, after the backward pass that follows."""
        lines = self._models.lines.candidate
        source, clearing = self._project.statement_at(lines.get("@unstepped"))
        _, after = self._project.statement_at(lines.get("@unstepped:after"))
        if self._fault.kind != "never_stepped" or source is None or after is None or not isinstance(clearing, ast.Expr):
            return
        call = clearing.value
        name = dotted(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
        if name:
            add = line_after if after.lineno > clearing.lineno else line_before
            edit = add(source, after if after.lineno > clearing.lineno else clearing, f"{name}.step()")
            yield Proposal((edit,), f"`{name}` steps", CALLS)

    def _averaging(self) -> Iterator[Proposal]:
        """Yield the call that averages weights on the other side of the optimizer's step."""
        source, average = self._project.statement_at(self._models.lines.candidate.get("@average"))
        if self._fault.kind != "average_order" or source is None or not isinstance(average, ast.Expr):
            return
        for holder, step, _ in self._optimizer_steps():
            if holder is source and source.parents.get(step) is source.parents.get(average):
                edits = _moved(source, average, step)
                if average.lineno > step.lineno:
                    edits = edits[0], line_before(source, step, source.code(average))
                yield Proposal(edits, "the average comes on the other side of the optimizer's step", CALLS)

    def _schedule(self) -> Iterator[Proposal]:
        """Yield additions, moves and removals of the schedule's step."""
        if self._fault.kind != "learning_rate":
            return
        yield from self._first_rate()
        yield from self._callbacks()
        for source, step, _ in self._optimizer_steps():
            for name in _schedules(source):
                calls = [
                    statement
                    for call in source.calls("step")
                    if isinstance(call.func, ast.Attribute)
                    and last_name(call.func.value) == name.rpartition(".")[2]
                    and isinstance(statement := source.statement_around(call), ast.Expr)
                ]
                last, loop, function = _last_of_step(source, step), source.parents.get(step), source.function(step)
                epochs: list[ast.stmt] = (
                    [loop] if isinstance(loop, ast.For) and isinstance(source.parents.get(loop), ast.For) else []
                )
                if function is not None and name.startswith("self."):
                    epochs += _called_in_loops(source, function)
                beside = [each for each in calls if source.parents.get(each) is loop]
                for statement, epoch in product(beside if len(getattr(loop, "body", ())) > 1 else (), epochs):
                    yield Proposal(_moved(source, statement, epoch), "the schedule steps after each epoch", CALLS + 0.5)
                if not calls:
                    edit = line_after(source, last, f"{name}.step()")
                    yield Proposal((edit,), "the schedule steps with each step of the optimizer", CALLS)
                for statement in calls:
                    if statement not in beside or statement.lineno < step.lineno:
                        edits = _moved(source, statement, last)
                        yield Proposal(edits, "the schedule steps after each step of the optimizer", CALLS)
                    if len(calls) > 1:
                        yield Proposal((line_removed(source, statement),), "the schedule steps once", CALLS)

    def _callbacks(self) -> Iterator[Proposal]:
        """Yield the other pace of the callback by which paddle's `Model.fit` steps a schedule: each step, if none."""
        callbacks = self._project.calls("LRScheduler")
        for source, call in callbacks:
            flags = {each.arg: each.value for each in call.keywords if isinstance(each.value, ast.Constant)}
            edits = [Edit(source.file, *source.span(each), str(not each.value)) for each in flags.values()]
            by_epoch = (
                flags["by_epoch"].value if "by_epoch" in flags else not flags["by_step"].value if flags else False
            )
            if not edits:
                end = source.span(call)[1] - 1
                edits = [Edit(source.file, end, end, "by_step=False, by_epoch=True")]
            words = f"the schedule steps after each {'step' if by_epoch else 'epoch'}"
            yield Proposal(tuple(edits), words, CALLS - 0.3)
        fits = self._project.calls("fit") if self._framework == "paddle" and not callbacks else []
        for source, call in fits:
            if not self._project.calls("prepare") or any(each.arg is None for each in call.keywords):
                continue
            text = "paddle.callbacks.LRScheduler(by_step=False, by_epoch=True)"
            lists = [each.value for each in call.keywords if each.arg == "callbacks"]
            end = source.span(lists[0] if lists else call)[1] - 1
            edits = [Edit(source.file, end, end, f", {text}" if lists else f", callbacks=[{text}]")]
            if not source.spelled("paddle"):
                edits.append(source.import_edit("paddle"))
            if not lists or (isinstance(lists[0], ast.List) and lists[0].elts):
                yield Proposal(tuple(edits), "the schedule steps after each epoch", CALLS - 0.3)

    def _clipped_together(self) -> Iterator[Proposal]:
        """Yield the clipping of all gradients together, in the place of paddle's, which is of each group's own."""
        is_by_group = any(each.name == "clip by_group" and each.values.candidate for each in self._fault.settings)
        assignment = self._project.statement_at(self._models.lines.candidate.get(ROOT))[1]
        root = dotted(assignment.targets[0]) if isinstance(assignment, ast.Assign) else ""
        for source, call in self._project.catalog_calls("optimizer") if is_by_group else ():
            keyword = next((each for each in call.keywords if each.arg == "grad_clip"), None)
            value = None if keyword is None else keyword.value
            limit = next(iter([*value.args, *(each.value for each in value.keywords)]), None) if isinstance(
                value, ast.Call) else None  # fmt: skip
            for holder, step, _ in self._optimizer_steps():
                if (
                    keyword is not None
                    and limit is not None
                    and value_text(limit)
                    and (model := _model_of(holder, step) or root)
                ):
                    head = holder.spelled("paddle.nn.utils.clip_grad_norm_") or "paddle.nn.utils.clip_grad_norm_"
                    edits = Writer(source, self._framework, {}).edits(Change("remove", keyword, "grad_clip"))
                    text = f"{head}({model}.parameters(), {source.code(limit)})"
                    more = () if holder.spelled("paddle") else (holder.import_edit("paddle"),)
                    words = "gradients of all groups are clipped together"
                    yield Proposal((*edits, line_before(holder, step, text), *more), words, CALLS - 0.2)

    def _first_rate(self) -> Iterator[Proposal]:
        """Yield the reference's first learning rate for the number in the schedule that is the candidate's."""
        rates = self._fault.rates
        if rates.reference == rates.candidate:
            return
        first = number_text(float(f"{rates.reference:.9g}"))
        for source, call in self._project.catalog_calls("schedule"):
            for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
                places = [(source, value)] if number_of(value) is not None else self._project.definitions(source, value)
                for place, node in places:
                    number = number_of(node)
                    if number is not None and math.isclose(number, rates.candidate, rel_tol=1e-6):
                        edit = Edit(place.file, *place.span(node), first)
                        yield Proposal((edit,), f"the schedule begins with {first}", CALLS + 0.6)

    def _clipping(self) -> Iterator[Proposal]:
        kind = self._fault.kind
        if not kind.startswith("clip"):
            return
        yield from self._clipped_together()
        function, limit = self._fault.clipping
        own = [(source, call) for source, call in self._project.calls("clip_grad_norm_", "clip_grad_value_")]
        if function and not own and self._framework == "torch":
            name = "clip_grad_value_" if function == "clip_grad_value_" else "clip_grad_norm_"
            for source, step, _ in self._optimizer_steps():
                model = _model_of(source, step)
                head = source.spelled(f"torch.nn.utils.{name}")
                edits = [] if head or source.spelled("torch") else [source.import_edit("torch")]
                if model:
                    call = f"{head or f'torch.nn.utils.{name}'}({model}.parameters(), {number_text(limit)})"
                    edits.append(line_before(source, step, call))
                    yield Proposal(tuple(edits), "gradients are clipped as the reference's are", CALLS)
        steps = {source.parents.get(step): step for source, step, _ in self._optimizer_steps()}
        for source, clip in own:
            behind = source.statement_around(clip)
            before = None if behind is None else steps.get(source.parents.get(behind))
            if isinstance(behind, ast.Expr) and before is not None and behind.lineno > before.lineno:
                moves = (line_removed(source, behind), line_before(source, before, source.code(clip)))
                yield Proposal(moves, "gradients are clipped before the optimizer's step", CALLS)
        if function.startswith("ClipGradBy"):
            for source, made in self._project.catalog_calls("optimizer"):
                if not any(keyword.arg == "grad_clip" for keyword in made.keywords):
                    value = ast.parse(f"paddle.nn.{function}({number_text(limit)})", mode="eval").body
                    yield from self._written(source, Match(0.0), [Change("add", made, "grad_clip", value)], CALLS)
        has_none = "the reference does not" in self._fault.words or "not set against" in self._fault.words
        if has_none and self._models.lines.reference.get("@clip") is None:
            for source, clip in own:
                statement = source.statement_around(clip)
                if isinstance(statement, ast.Expr):
                    yield Proposal((line_removed(source, statement),), "gradients are not clipped", CALLS)
            for source, made in self._project.catalog_calls("optimizer"):
                for keyword in made.keywords:
                    if keyword.arg == "grad_clip":
                        yield from self._written(source, Match(0.0), [Change("remove", keyword, "grad_clip")], CALLS)

    def _total(self) -> Iterator[Proposal]:
        """Yield the line that adds to the loss, where the candidate has none."""
        sides = self._models.lines.map(lambda lines: lines.get("@total"))
        if self._first.stage != "loss" or sides.reference is None or sides.candidate is None:
            return
        reference, source = self._reference_node(sides.reference), self._project.get(sides.candidate.file)
        own = None if source is None else source.statement(sides.candidate.line)
        if source is None or not isinstance(reference, ast.Assign) or not isinstance(own, ast.Assign):
            return
        target, value = dotted(own.targets[0]), reference.value
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if not target or dotted(reference.targets[0]) not in names or not isinstance(value, ast.BinOp):
            return
        try:
            models = {
                dotted(node.func.value): _model_of(source, own)
                for node in ast.walk(value)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "parameters"
            }
            named = {name: model for name, model in models.items() if name and model}
            text = Writer(source, self._framework, {**named, dotted(reference.targets[0]): target}).expression(value)
        except UnwritableError:
            return
        edit = line_after(source, _last_before_backward(source, own), f"{target} = {text}")
        yield Proposal((edit,), "the term that the reference's loss has is added", LINES - 0.5)

    def _flipped(self) -> Iterator[Proposal]:
        """Yield removals and additions of a flip of the input."""
        if not self._fault.kind.endswith("_flipped") or self._fault.values is None:
            return
        axis = self._fault.values.candidate
        for source in self._project:
            for node in source.nodes:
                if isinstance(node, ast.Subscript) and _is_reversal(node.slice):
                    change = Change("unwrap", node, "[::-1]", None, node.value)
                    yield from self._written(source, Match(0.0), [change], LINES)
                if isinstance(node, ast.Call) and last_name(node.func) in ("flip", "cvtColor"):
                    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
                    is_method = owner is not None and dotted(owner) not in source.modules
                    inner = owner if is_method else next(iter(node.args), None)
                    if inner is not None:
                        change = Change("unwrap", node, last_name(node.func), None, inner)
                        yield from self._written(source, Match(0.0), [change], LINES)
        _, statement = self._project.statement_at(self._models.lines.candidate.get(ROOT))
        targets = {dotted(each) for each in getattr(statement, "targets", [])} - {""}
        for source in self._project:
            for node in source.nodes:
                if isinstance(node, ast.Call) and dotted(node.func) in targets and len(node.args) == 1:
                    end = source.span(node.args[0])[1]
                    if isinstance(node.args[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
                        edit = Edit(source.file, end, end, f".flip([{axis}])")
                        yield Proposal((edit,), f"the input is flipped along axis {axis}", LINES + 0.5)

    def _input(self) -> Iterator[Proposal]:
        """Yield changes of the constants by which inputs are normalised, computed from the recorded inputs."""
        yield from self._deviations()
        yield from self._windows()
        yield from self._axes()
        is_affine = self._fault.kind in ("input_scaled", "input_offset", "input_normalised")
        rows: Sequence[tuple[float, float]] = ()
        if is_affine and self._fault.values is not None:
            rows = self._fault.values.candidate
        if len(rows) != 1:
            yield from self._normalised_by_channel(rows)
            return
        factor, offset = rows[0]
        for source in self._project:
            for node in source.nodes:
                if isinstance(node, ast.BinOp):
                    yield from self._normalised(source, node, factor, offset)

    def _axes(self) -> Iterator[Proposal]:
        """Yield the order of axes of the line of the data with two of them exchanged, of a sample and of a batch."""
        values = self._fault.values if self._fault.kind == "input_transposed" else None
        axes: tuple[int, int] | None = None if values is None else values.candidate
        source, statement = self._project.statement_at(self.lines.candidate)
        for node in ast.walk(statement) if axes is not None and source is not None and statement is not None else ():
            if axes is None or source is None or not isinstance(node, ast.Call):
                continue
            orders = [each.elts for each in node.args if isinstance(each, (ast.Tuple, ast.List))] or [node.args]
            entries = [each for each in orders[0] if isinstance(number_of(each), (int, float))]
            if last_name(node.func) not in ("transpose", "permute") or len(entries) < 3:
                continue
            for batch in (1, 0):
                places = [axis - batch for axis in axes]
                if all(place < len(entries) for place in places):
                    pair = [entries[place] for place in places]
                    edits = [Edit(source.file, *source.span(each), source.code(other))
                             for each, other in zip(pair, pair[::-1])]  # fmt: skip
                    yield Proposal(tuple(edits), "two axes are exchanged", LINES - 0.2 - 0.1 * batch)

    def _windows(self) -> Iterator[Proposal]:
        """Yield the slices of the line of the data, or of the code that makes a sample, that take the reference's
        window.
        """
        if self._fault.kind not in ("input_moved", "batch_order") or self._fault.values is None:
            return
        shifts: tuple[int, ...] = self._fault.values.candidate
        source, statement = self._project.statement_at(self.lines.candidate)
        places = [(source, statement)] if source is not None and statement is not None else []
        for each in self._project:
            # Datasets and generators.
            functions = [node for node in each.nodes if isinstance(node, ast.FunctionDef)]
            places += [(each, node) for node in functions if _makes_samples(node)]
        words = f"the window begins {', '.join(f'{shift:+d}' for shift in shifts)} later"
        for k, (source, scope) in enumerate(places):
            slices = [node for node in ast.walk(scope) if isinstance(node, ast.Slice) and node.step is None]
            # Only a window has two ends, where the line is not known.
            slices = [node for node in slices if node.upper is not None and (node.lower is not None or not k)] + [
                node for node in slices if node.upper is None and node.lower is not None and not k
            ]
            for first in range(len(slices) - len(shifts) + 1):
                edits = [self._moved_slice(source, *pair) for pair in zip(slices[first:], shifts)]
                if all(edits):
                    yield Proposal(tuple(edit for each in edits for edit in each), words, LINES - 0.2 + 0.1 * bool(k))

    def _moved_slice(self, source: Source, node: ast.Slice, shift: int) -> list[Edit]:
        """Return the edits that move both ends of a slice; none if its first place is not known."""
        start, end = source.span(node)
        sums = [each for each in (node.lower, node.upper) if _added(each) is not None]
        if node.lower is None:
            edits = [Edit(source.file, start, start, str(shift))] if shift > 0 else []
        elif sums and node.upper is not None:
            # An end such as `i + 1` is a number further, or takes the shift.
            return [_further(source, each, shift) for each in (node.lower, node.upper)]
        else:
            is_plain = number_of(node.lower) is not None
            holders = [(source, node.lower)] if is_plain else self._project.definitions(source, node.lower)
            number = number_of(holders[0][1]) if len(holders) == 1 else None
            place = holders[0][0].span(holders[0][1]) if number is not None else (0, 0)
            text = "" if number is None or number + shift < 0 else number_text(int(number) + shift)
            edits = [Edit(holders[0][0].file, *place, text)] if text else []
        last = None if node.upper is None else number_of(node.upper)
        if edits and node.upper is not None and last is not None:
            edits.append(Edit(source.file, *source.span(node.upper), number_text(int(last) + shift)))
        elif edits and node.upper is not None and (node.lower is None or number_of(node.lower) is not None):
            edits.append(Edit(source.file, end, end, f" {'+' if shift > 0 else '-'} {abs(shift)}"))
        return edits

    def _deviations(self) -> Iterator[Proposal]:
        """Yield the divisor of a variance that the cause names: of an array, then of a tensor."""
        fix, frame = parsed_call(self._fault.fix), self.lines.candidate
        if self._fault.kind != "input_scaled" or fix is None or last_name(fix.func) != "std":
            return
        is_unbiased = number_of(fix.keywords[0].value) == 1
        for source, call in self._project.calls("std", "var"):
            far = frame is None or (source.file, call.lineno) != (frame.file, frame.line)
            values = {"ddof": str(int(is_unbiased)), "correction": str(int(is_unbiased)), "unbiased": str(is_unbiased)}
            divisors = [each for each in call.keywords if each.arg in values]
            end = source.span(call)[1] - 1
            comma = ", " * bool(call.args or call.keywords)
            edits = [Edit(source.file, *source.span(each.value), values[str(each.arg)]) for each in divisors] or [
                Edit(source.file, end, end, f"{comma}{name}={values[name]}") for name in ("ddof", "unbiased")
            ]
            for edit in edits:
                words = f"the variance divides by {'n - 1' if is_unbiased else 'n'}"
                yield Proposal((edit,), words, LINES - 0.2 + 0.5 * far)

    def _normalised_by_channel(self, pairs: Sequence[tuple[float, float]]) -> Iterator[Proposal]:
        """Yield new constants of ``(x - m) / s`` with a number for each channel.

        Args:
            pairs: factor and offset of each channel.
        """
        rows = [
            (source, node)
            for source in self._project
            for node in source.nodes
            if pairs and isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) == len(pairs)
        ]
        vectors = [
            (source, node, [number_of(each) or 0.0 for each in node.elts])
            for source, node in rows
            if all(number_of(each) is not None for each in node.elts)
        ]
        # Both stand near each other, mostly the means first.
        ranked = sorted(permutations(vectors, 2), key=lambda pair: (
            pair[0][0].file != pair[1][0].file, abs(pair[0][1].lineno - pair[1][1].lineno)
        ))  # fmt: skip
        for (source, means, shifts), (other, scales, divisors) in ranked[:_MOST_NORMALISED]:
            # The candidate's (x - m) / s is f times the reference's, plus o.
            new = [shift + offset * divisor for shift, divisor, (_, offset) in zip(shifts, divisors, pairs)]
            edits = [_rewritten(source, means, new)]
            if any(factor != 1.0 for factor, _ in pairs):
                edits.append(
                    _rewritten(other, scales, [divisor * factor for divisor, (factor, _) in zip(divisors, pairs)])
                )
            yield Proposal(tuple(edits), "the input is normalised with the reference's constants", LINES - 0.1)

    def _normalised(self, source: Source, node: ast.BinOp, factor: float, offset: float) -> Iterator[Proposal]:
        """Yield new constants of ``(x - m) / s``, ``x * k``, ``x / k`` and ``x - m``.

        Args:
            source: the file.
            node: the expression.
            factor, offset: the candidate's input is the reference's, times the factor, plus the offset.
        """
        inner = node.left
        constants: list[tuple[ast.expr, float]] = []
        if isinstance(node.op, (ast.Div, ast.Mult)):
            scale = self._number(source, node.right)
            if scale is None or not scale:
                return
            divided = isinstance(node.op, ast.Div)
            divisor = scale if divided else 1.0 / scale
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, (ast.Sub, ast.Add)):
                shift = self._number(source, inner.right)
                if shift is None:
                    return
                sign = 1.0 if isinstance(inner.op, ast.Sub) else -1.0
                # The candidate's (x - m) / s is a (x - m') / s' + b.
                constants = [(inner.right, sign * (sign * shift + offset * divisor))]
            elif offset:
                return
            if factor != 1.0:
                if divided is False and abs(scale / factor - 1.0) < 1e-6:
                    (start, end), last = source.span(node), source.span(inner)[1]
                    yield Proposal(
                        (Edit(source.file, last, end, ""),), f"the input is not scaled by {scale:g}", OTHERS - 1
                    )
                    return
                new = divisor * factor
                constants.append((node.right, new if divided else 1.0 / new))
        elif isinstance(node.op, (ast.Sub, ast.Add)) and factor == 1.0 and offset:
            shift = self._number(source, node.right)
            above = source.parents.get(node)
            if shift is None or (isinstance(above, ast.BinOp) and isinstance(above.op, (ast.Div, ast.Mult))):
                return
            constants = [(node.right, shift + (offset if isinstance(node.op, ast.Sub) else -offset))]
        edits = []
        for place, value in constants:
            holders = [(source, place)] if value_text(place) else self._project.definitions(source, place)
            if len(holders) != 1:
                return
            holder, literal = holders[0]
            start, end = holder.span(literal)
            edits.append(Edit(holder.file, start, end, _rounded(value)))
        if edits:
            shown = ", ".join(edit.text for edit in edits)
            yield Proposal(tuple(edits), f"the input is normalised with {shown}", OTHERS)

    def _number(self, source: Source, node: ast.expr) -> float | None:
        own = number_of(node)
        if own is not None or isinstance(node, ast.Constant):
            return own
        values = self._project.definitions(source, node) if isinstance(node, (ast.Name, ast.Attribute)) else []
        return number_of(values[0][1]) if len(values) == 1 else None

    def _optimizer_steps(self) -> list[tuple[Source, ast.stmt, str]]:
        """Return the statements in which an optimizer steps, with the optimizer's name."""
        places: list[tuple[Source, ast.stmt, str]] = []
        for source in self._project:
            schedules = _schedules(source)
            for call in source.calls("step"):
                name = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""
                statement = source.statement_around(call)
                if name and name not in schedules and isinstance(statement, ast.Expr) and statement.value is call:
                    places.append((source, statement, name))
        frame = line_of_role(("@step",), self._fault.first, self._models).candidate
        exact = [
            each for each in places if frame is not None and (each[0].file, each[1].lineno) == (frame.file, frame.line)
        ]
        near = [each for each in places if re.search("opt", each[2], re.IGNORECASE)]
        return exact or near or places


def _makes_samples(function: ast.FunctionDef) -> bool:
    return function.name == "__getitem__" or any(isinstance(node, ast.Yield) for node in ast.walk(function))


def _added(node: ast.expr | None) -> int | None:
    """Return the whole number that an expression adds to something; `None` if it adds none."""
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub))
    number = number_of(node.right) if is_sum else None  # type: ignore[union-attr]
    if number is None or number != int(number):
        return None
    return int(number) if isinstance(node.op, ast.Add) else -int(number)  # type: ignore[union-attr]


def _further(source: Source, node: ast.expr, shift: int) -> Edit:
    """Return the edit that adds a number to an expression."""
    added = _added(node)
    number, text = shift + (added or 0), source.code(node if added is None else node.left)  # type: ignore[attr-defined]
    return Edit(
        source.file, *source.span(node), f"{text} {'+' if number > 0 else '-'} {abs(number)}" if number else text
    )


def _is_reversal(node: ast.AST) -> bool:
    """Return True if an index reverses an axis."""
    return any(isinstance(each, ast.Slice) and each.step is not None and number_of(each.step) == -1.0
               for each in ast.walk(node))  # fmt: skip


def _schedules(source: Source) -> list[str]:
    """Return the variables and attributes that hold schedules of learning rates."""
    return [
        dotted(target)
        for node in source.nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if dotted(target) and kind_of(last_name(node.value.func)) == "schedule"
    ]


def _called_in_loops(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return the statements of loops that call a method of their own object."""
    statements = [
        statement
        for call in source.calls(function.name)
        if isinstance(call.func, ast.Attribute) and dotted(call.func.value) == "self"
        and (statement := source.statement_around(call)) is not None
    ]  # fmt: skip
    return [each for each in statements if isinstance(source.parents.get(each), (ast.For, ast.While))]


def _moved(source: Source, statement: ast.stmt, place: ast.stmt) -> tuple[Edit, Edit]:
    """Return the edits that put a statement behind another one."""
    return line_removed(source, statement), line_after(source, place, source.code(statement))


def _near(source: Source, node: ast.AST, step: ast.stmt) -> bool:
    return source.function(node) is source.function(step)


def _after(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements that follow a statement in its block."""
    parent = source.parents.get(statement)
    blocks = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    block = next((each for each in blocks if isinstance(each, list) and statement in each), [statement])
    return block[block.index(statement) + 1 :]


def _last_of_step(source: Source, step: ast.stmt) -> ast.stmt:
    """Return the last statement beside a step that still belongs to it: where gradients are zeroed."""
    zeroing = [each for each in _after(source, step) if any(
        isinstance(node, ast.Call) and last_name(node.func) in ("zero_grad", "clear_grad") for node in ast.walk(each)
    )]  # fmt: skip
    return zeroing[-1] if zeroing else step


def _last_before_backward(source: Source, statement: ast.stmt) -> ast.stmt:
    """Return the last statement beside one that still comes before the backward pass."""
    last = statement
    for each in _after(source, statement):
        calls = {last_name(node.func) for node in ast.walk(each) if isinstance(node, ast.Call)}
        if calls & {"backward", "zero_grad", "clear_grad", "step"}:
            break
        last = each
    return last


def _model_of(source: Source, step: ast.stmt) -> str:
    """Return the variable of the model in the function in which an optimizer steps; empty if not known."""
    scope = source.function(step) or source.tree
    parameters = [
        dotted(call.func.value) for call in source.calls("parameters") if isinstance(call.func, ast.Attribute)
    ]
    names = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name)}
    inside = [name for name in dict.fromkeys(parameters) if name.partition(".")[0] in names]
    if len(inside) == 1:
        return inside[0]
    trained = [
        dotted(call.func.value)
        for call in source.calls("train")
        if isinstance(call.func, ast.Attribute) and call in [*ast.walk(scope)]
    ]
    return trained[0] if len({*trained}) == 1 else ""


def _quoted(path: str) -> str:
    text = ascii(path)[1:-1]
    return f'"{text}"' if '"' not in text else ascii(path)


def _rewritten(source: Source, node: ast.Tuple | ast.List, values: list[float]) -> Edit:
    """Return the edit that gives a tuple or list other numbers."""
    start, end = source.span(node)
    signs = "[]" if isinstance(node, ast.List) else "()"
    is_bare = isinstance(node, ast.Tuple) and source.text[start] != "("
    inner = ", ".join(_rounded(value) for value in values)
    return Edit(source.file, start, end, inner if is_bare else f"{signs[0]}{inner}{signs[1]}")


def _rounded(value: float) -> str:
    """Return a number with the few digits that recorded inputs tell."""
    return number_text(float(f"{value:.4g}")) if abs(value) > 1e-6 else "0.0"
