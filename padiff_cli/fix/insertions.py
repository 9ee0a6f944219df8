"""Proposals that insert what the candidate's code lacks: a residual, a scale, a divisor, a call of a layer, `detach`.

The reference's line need not be known. What is inserted is made of names that stand in the candidate's own function.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise, permutations

from padiff.compare.declared.layers import layer_fix
from padiff.frameworks.catalog import number_text
from padiff.model.equivalents import common_kind
from padiff.records import Both, Layer
from padiff_cli.fix.arithmetic import Arithmetic, UnknownError
from padiff_cli.fix.fault import Fault
from padiff_cli.fix.matching import inner_expressions, unread_variables
from padiff_cli.fix.source import (
    Edit,
    Project,
    Proposal,
    Source,
    dotted,
    indent,
    last_name,
    line_after,
    line_before,
    line_removed,
)
from padiff_cli.fix.vocabulary import UNARY, is_layer, kind_of, number_of, whole_name

# Weights: what a cause names, and what remains where all that is computed forward agrees, come before the two lines
# that are compared.
_NAMED, _GUESSED = 1.5, 1.8
# Largest number of proposals of a rule: each is a run.
_MOST = 6
# A layer's output that only the reference adds.
_NOT_ADDED = re.compile(r"what `([^`]+)` gives is not added")
# Relative error of a number that a cause shows with six digits, or of its square.
_DIGITS = 2e-5
_PRODUCTS = frozenset(("matmul", "bmm", "einsum", "baddbmm", "mm"))
# Functions that compare a prediction with a target, beside the losses of the catalog.
_COMPARING = frozenset(("cosine_similarity", "pairwise_distance", "kl_div"))
# Norms by their common names.
_NORMS = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "groupnorm": "GroupNorm",
    "batchnorm1d": "BatchNorm1d",
    "batchnorm2d": "BatchNorm2d",
    "batchnorm3d": "BatchNorm3d",
}


def insertions(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield all proposals of this module."""
    yield from _residual(fault, project)
    yield from _attention_scale(fault, project)
    yield from _divisor(fault, project)
    yield from _sum_of_samples(fault, project)
    yield from _taken_place(fault, project)
    yield from _micro_batches(fault, project)
    yield from _scaled_terms(fault, project)
    yield from _scaled_by_names(fault, project)
    yield from _masked_mean(fault, project)
    yield from _unscaled(fault, project)
    yield from _missing_norm(fault, project)
    yield from _uncalled_layers(fault, project)
    yield from _detached_targets(fault, project)
    yield from _reordered(fault, project)
    yield from _sum_order(fault, project)
    yield from _missing_functions(fault, project)
    yield from _missing_terms(fault, project)
    yield from _exchanged_parts(fault, project)
    yield from _branches(fault, project)
    yield from _untied(fault, project)


def _untied(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the embedding's weight in the place of that of a linear layer, where the reference has one for both."""
    sites = next((each.parameters.candidate for each in fault.settings if each.kind == "tied"), ())
    kinds = {layer.path: common_kind(layer.kind) for layer in fault.models.layers.candidate}
    paths = {kinds.get(path, ""): path for path in (site.rpartition("/")[0] for site in sites)}
    if fault.kind != "tied" or {*paths} != {"linear", "embedding"}:
        return
    head, table = (f"self.{_tail(paths[kind])}" for kind in ("linear", "embedding"))
    source, made = project.statement_at(fault.models.lines.candidate.get(paths["linear"]))
    if source is None or not isinstance(made, ast.Assign) or dotted(made.targets[0]) != head:
        return
    words = f"`{head}` and `{table}` have one weight"
    if fault.frameworks[1] == "torch":
        yield Proposal((line_after(source, made, f"{head}.weight = {table}.weight"),), words, _NAMED)
    for call in _calls_of(source.tree, _tail(head)) if fault.frameworks[1] == "paddle" else ():
        given = ", ".join(map(source.code, call.args))
        product = Edit(source.file, *source.span(call), f"paddle.matmul({given}, {table}.weight, transpose_y=True)")
        yield Proposal((line_removed(source, made), product), words, _NAMED)


def _residual(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield sums of what is computed at the place of the fault and another variable of the function."""
    if fault.kind != "residual_missing":
        return
    found: list[tuple[Source, ast.expr, str]] = []
    for source, statement, node in places(fault, project):
        function = source.function(statement)
        if function is not None:
            found += [(source, node, name) for name in _variables(function, statement)]
    yield from _ranked(
        ((_around(source, node, "", f" + {name}"),), f"the residual `{name}` is added") for source, node, name in found
    )


def places(fault: Fault, project: Project) -> Iterator[tuple[Source, ast.stmt, ast.expr]]:
    """Yield expressions that compute the tensor of the fault, with their statements: the most likely one first."""
    source, statement = project.statement_at(fault.lines.candidate)
    layer = _tail(fault.first.candidate)
    if source is None or statement is None:
        return
    is_input = (fault.first.slot or "").startswith("input")
    if is_input:
        for call in _calls_of(statement, layer):
            yield from ((source, statement, each) for each in call.args[:1])
    before = _tail(fault.partner_of(fault.first.last_agreeing))
    scope = source.function(statement) or source.tree
    for node in ast.walk(scope):
        if isinstance(node, ast.stmt) and node is not scope and not isinstance(node, (ast.For, ast.If, ast.With)):
            yield from ((source, node, call) for call in _calls_of(node, before))
    if isinstance(statement, (ast.Return, ast.Assign)) and statement.value is not None:
        yield source, statement, statement.value


def _variables(function: ast.FunctionDef | ast.AsyncFunctionDef, statement: ast.stmt) -> list[str]:
    """Return the variables that a function has at a statement: those that nothing reads, parameters, then others."""
    stored = [
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < statement.lineno
    ]
    parameters = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
    unread = [name for name in unread_variables(function) if name in stored]
    # Of the others, those that were made last are the nearest ones.
    return list(dict.fromkeys([*unread, *parameters, *reversed(stored)]))


def _attention_scale(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the reference's scale of a product, where the cause names both scales."""
    if fault.kind != "attention_scale" or len(fault.numbers) != 1:
        return
    right, own = fault.numbers[0]
    size = _square(right)
    if own != 1.0 and own > 0 and right > 0:
        yield from _scale_of_size(project, _square(own), size)
        # Another power of the same number.
        factor = math.log(right) / math.log(own)
        for source in project:
            for node in source.nodes:
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
                    exponent = number_of(node.right)
                    new = None if exponent is None else round(exponent * factor, 3)
                    if new is not None and 4 * new == round(4 * new) and new:
                        start, end = source.span(node.right)
                        text = number_text(new)
                        yield Proposal(
                            (Edit(source.file, start, end, text),), f"the exponent of the scale is {text}", _NAMED
                        )
        return
    for source, product, first in _products(project)[:_MOST] if own == 1.0 else ():
        # A name that holds the size says more than the number.
        name = f"{first}.shape[-1]" if first else _name_of(project, source, product, size) if size else ""
        scale = f"{name or size} ** -0.5" if size else number_text(right)
        yield Proposal((_around(source, product, "", f" * {scale}"),), f"the product is scaled by {scale}", _NAMED)


def _square(scale: float) -> int:
    """Return the whole number whose root a scale is, or is one over; 0 if there is none."""
    square = max(scale * scale, 1 / (scale * scale)) if scale else 0.0
    return round(square) if abs(square - round(square)) <= 1e-4 * square else 0


def _scale_of_size(project: Project, wrong: int, size: int) -> Iterator[Proposal]:
    """Yield the reference's size for the size of which the candidate's code takes the root."""
    roots: list[tuple[bool, Source, ast.expr]] = []
    for source in project if wrong and size else ():
        for node in source.nodes:
            base: ast.expr | None = None
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
                base = node.left if number_of(node.right) in (0.5, -0.5) else None
            elif isinstance(node, ast.Call) and last_name(node.func) in ("sqrt", "rsqrt") and len(node.args) == 1:
                base = node.args[0]
            number = None if base is None else _held_number(project, source, base)
            if base is not None and number in (None, wrong):
                roots.append((number is None, source, base))
    for _, source, base in sorted(roots, key=lambda each: each[0]):
        text = _name_of(project, source, base, size) or str(size)
        edit = Edit(source.file, *source.span(base), text)
        yield Proposal((edit,), f"the scale is of {text} for {source.code(base)}", _NAMED - 0.1)


def _held_number(project: Project, source: Source, node: ast.expr) -> float | None:
    """Return the number that an expression has, computed from the numbers that its names hold; `None` if not known."""
    try:
        number = Arithmetic(project).evaluate(source, node)
    except UnknownError:
        return None
    return float(number) if isinstance(number, (int, float)) else None


def _products(project: Project) -> list[tuple[Source, ast.expr, str]]:
    """Return products of matrices, with the variable of the first factor: those first that a softmax follows."""
    places: list[tuple[bool, int, Source, ast.expr, str]] = []
    for source in project:
        for node in source.nodes:
            is_sign = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
            if not is_sign and not (isinstance(node, ast.Call) and last_name(node.func) in _PRODUCTS):
                continue
            function = source.function(node)
            follows = function is not None and any(
                isinstance(each, ast.Call)
                and last_name(each.func) == "softmax"
                and (each.end_lineno or 0) >= node.lineno  # type: ignore[attr-defined]
                for each in ast.walk(function)
            )
            factors = [each for each in ast.iter_child_nodes(node) if isinstance(each, (ast.Name, ast.Attribute))]
            if isinstance(node, ast.BinOp):
                factors = [node.left] if isinstance(node.left, (ast.Name, ast.Attribute)) else []
            else:
                factors = [each for each in node.args[:1] if isinstance(each, (ast.Name, ast.Attribute))]  # type: ignore[attr-defined]
            places.append((not follows, len(places), source, node, dotted(factors[0]) if factors else ""))  # type: ignore[arg-type]
    return [(source, node, name) for _, _, source, node, name in sorted(places, key=lambda each: each[:2])]


def _divisor(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the division of the loss before backward, where gradients are a whole number of times the reference's."""
    if fault.first.stage not in ("backward", "grad", "loss"):
        return
    times = next((each.candidate for each in fault.numbers if each.reference == 1.0), 0.0)
    count = round(times)
    if count < 2 or abs(times - count) > 1e-3 * count:
        return
    for source, call in project.calls("backward"):
        value = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
        if value is None:
            continue
        text = _name_of(project, source, call, count) or str(count)
        is_plain = isinstance(value, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        head, tail = ("(", f" / {text})") if is_plain else ("((", f") / {text})")
        start, end = source.span(value)
        edit = Edit(source.file, start, end, f"{head}{source.code(value)}{tail}")
        yield Proposal((edit,), f"the loss is divided by {text} before backward", _NAMED)


def _sum_of_samples(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the sum of each sample, averaged over the samples, for the mean of all places, or the mean for that sum, as
    the cause's divisors tell.
    """
    counts = fault.values
    if fault.kind != "reduction" or counts is None or not all(isinstance(each, float) for each in counts):
        return
    source, statement = project.statement_at(fault.lines.candidate)
    axis = "axis=1" if fault.frameworks[1] == "paddle" else "dim=1"
    rename = ("mean", "sum") if counts.reference < counts.candidate else ("sum", "mean")
    for node in ast.walk(statement) if source is not None and statement is not None else ():
        if source is None or not isinstance(node, ast.Call):
            continue
        is_method = isinstance(node.func, ast.Attribute) and dotted(node.func.value) not in source.modules
        inner = node.func.value if is_method else next(iter(node.args), None)  # type: ignore[attr-defined]
        is_of_axis, name = bool(node.args[not is_method :] or node.keywords), last_name(node.func)
        if is_of_axis and name == rename[0]:
            end = source.span(node.func)[1]
            edit = Edit(source.file, end - len(name), end, rename[1])
            yield Proposal((edit,), f"the {rename[1]} over an axis is taken for the {name}", _NAMED - 0.05)
        if inner is None or is_of_axis or rename[0] != "mean" or name != "mean":
            continue
        text = source.code(inner)
        text = f"({text})" if isinstance(inner, (ast.BinOp, ast.UnaryOp, ast.IfExp)) else text
        for mask in _masks(source, statement) if statement is not None else ():
            if mask in [source.code(each) for each in inner_expressions(inner)]:
                edit = Edit(source.file, *source.span(node), f"{text}.sum() / {mask}.sum()")
                yield Proposal((edit,), "the mean is over the places that the mask keeps", _NAMED - 0.1)
        # The samples are a divisor of all places.
        flats = (("", ""), (".flatten(1)", ", of any number of axes"))
        for flat, words in flats if not counts.candidate % counts.reference else ():
            edit = Edit(source.file, *source.span(node), f"{text}{flat}.sum({axis}).mean()")
            yield Proposal((edit,), f"each sample is summed before the mean{words}", _NAMED)


def _taken_place(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield one place of an axis for a reduction over the axis, or the reduction for the place, as the cause says."""
    source, statement = project.statement_at(fault.lines.candidate)
    values = fault.values
    if fault.kind != "reduction_form" or values is None or not isinstance(values.candidate, tuple):
        return
    (place, right), (_, own) = values
    for node in ast.walk(statement) if source is not None and statement is not None else ():
        if source is None:
            return
        if isinstance(node, ast.Call) and last_name(node.func) in (own, f"a{own}"):
            inner = next(inner_expressions(node), None)
            axes = [number_of(each) for each in (*node.args, *(keyword.value for keyword in node.keywords))]
            if inner is not None and (place in axes or -1 in axes):
                text = f"{source.code(inner)}[{':, ' * place}{right}]"
                edit = Edit(source.file, *source.span(node), text)
                yield Proposal((edit,), f"place {right} is taken for the {own}", _NAMED)
        if isinstance(node, ast.Subscript) and isinstance(own, int):
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if len(items) == place + 1 and number_of(items[-1]) == own:
                axis = "axis" if fault.frameworks[1] == "paddle" else "dim"
                text = f"{source.code(node.value)}.{right if right in ('mean', 'sum') else f'a{right}'}({axis}={place})"
                edit = Edit(source.file, *source.span(node), text)
                yield Proposal((edit,), f"the {right} is taken for place {own}", _NAMED)


def _micro_batches(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the reference's number of micro-batches for the divisor that tells when the optimizer steps."""
    counts = fault.values
    if fault.kind != "micro_batches" or counts is None:
        return
    for source, call in project.calls("step"):
        above = source.parents.get(source.statement_around(call) or call)
        tested = ast.walk(above.test) if isinstance(above, ast.If) else ()
        for node in (each for each in tested if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod)):
            is_number = number_of(node.right) is not None
            places = [(source, node.right)] if is_number else project.definitions(source, node.right)
            edits = {Edit(each.file, *each.span(value), str(counts.reference)) for each, value in places
                     if number_of(value) == counts.candidate}  # fmt: skip
            for edit in sorted(edits):
                yield Proposal((edit,), f"a step has {counts.reference} micro-batches", _NAMED)


def _scaled_terms(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield a term of a sum times the factor that only the reference has, as the cause says."""
    # A factor of the candidate's is another number of its code.
    numbers = [each.reference for each in fault.numbers if each.candidate == 1.0]
    if fault.kind in ("loss_term_weight", "scale_missing", "scale") and len(numbers) == len(fault.numbers) == 1:
        yield from scaled_terms(fault, project, numbers[0])


def _scaled_by_names(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield a term times the ratio of two weights, where a name holds it, or its root."""
    numbers = fault.numbers[0] if len(fault.numbers) == 1 and fault.kind == "loss_term_weight" else Both(1.0, 1.0)
    ratio = numbers.reference / numbers.candidate if numbers.candidate not in (0.0, 1.0) else 0.0
    for proposal in scaled_terms(fault, project, ratio) if ratio > 0 else ():
        if not proposal.words.endswith(f" {number_text(ratio)}"):
            yield replace(proposal, weight=proposal.weight - 2)


def scaled_terms(fault: Fault, project: Project, number: float) -> Iterator[Proposal]:
    """Yield a term of the sum at a fault times a number: the last term first."""
    own = fault.models.lines.candidate
    losses = [own[key] for key in own if key == "@total" or key.startswith("@loss:")]
    frames = [fault.lines.candidate, *(losses if fault.first.stage != "forward" else ())]
    terms: list[tuple[Source, ast.expr]] = []
    for frame in dict.fromkeys(frames):
        source, statement = project.statement_at(frame)
        # The sum of a loss may stand behind the call that the verdict shows.
        function = source.function(statement) if source is not None and statement is not None else None
        sums = [
            each
            for each in ast.walk(function)
            if isinstance(each, (ast.Return, ast.Assign)) and _is_sum(each.value) and frame in losses
        ] if function is not None else []  # fmt: skip
        for each in [*sums, statement]:
            value = getattr(each, "value", None)
            if source is not None and isinstance(value, ast.expr) and not isinstance(each, ast.Expr):
                terms += [(source, term) for term in reversed(_terms(value)) if not _is_class(term)]
    agreeing = _tail(fault.partner_of(fault.first.last_agreeing))
    # What the layer that still agrees gives comes first.
    ranked = sorted(dict.fromkeys(terms), key=lambda term: not _calls_of(term[1], agreeing))
    for k, (source, term) in enumerate(ranked[:_MOST]):
        factor = _by_names(project, source, term, number)
        edit = _around(source, term, f"{factor} * ", "")
        yield Proposal((edit,), f"a term is multiplied by {factor}", _NAMED + 0.01 * k)


def _is_class(node: ast.expr) -> bool:
    """Return True for the construction of a loss."""
    return isinstance(node, ast.Call) and last_name(node.func).endswith("Loss")


def _terms(node: ast.expr) -> list[ast.expr]:
    """Return the terms of a sum in their order, or the expression itself."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return [*_terms(node.left), *_terms(node.right)]
    inner = next(inner_expressions(node), None) if isinstance(node, ast.Call) else None
    # A mean of a sum has the terms of the sum.
    if last_name(getattr(node, "func", node)) in ("mean", "sum") and isinstance(inner, ast.BinOp):
        return _terms(inner)
    return [node]


def _name_of(project: Project, source: Source, place: ast.AST, number: float) -> str:
    """Return an expression of the function around a node that holds a number; empty if there is none."""
    function, owner = source.function(place), source.class_around(place)
    scope = source.tree if function is None else function
    places = []
    attributes = [each for each in ast.walk(owner) if _is_own(each)] if owner is not None else []
    for node in [*ast.walk(scope), *attributes]:
        if not isinstance(node, (ast.Name, ast.Attribute)) or not dotted(node):
            continue
        is_known = isinstance(node.ctx, ast.Load) or node.lineno < place.lineno  # type: ignore[attr-defined]
        holder = _held_number(project, source, node) if is_known else None
        if holder is not None and math.isclose(holder, number, rel_tol=_DIGITS):
            places.append(dotted(node))
    # Of names that hold one number, a quotient is meant for a part of a size.
    quotients = {name for name in places if any(map(_is_quotient, source.assigned(name)))}
    return min(places, key=lambda name: ("accum" not in name.lower(), name not in quotients, len(name)), default="")


def _is_quotient(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv))


def _by_names(project: Project, source: Source, place: ast.AST, number: float) -> str:
    """Return a number as an expression of a name that holds it, its root, its square or its inverse; else as text."""
    powers = {1.0: "", 2.0: " ** 2", 0.5: " ** 0.5", -0.5: " ** -0.5", -1.0: " ** -1"}
    for power, text in powers.items() if number > 0 and number != 1 else ():
        name = _name_of(project, source, place, number ** (1 / power))
        if name:
            return f"{name}{text}"
    return number_text(number)


def _masked_mean(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the mean over the places that a mask of the candidate's function keeps, for a mean over all places."""
    source, statement = project.statement_at(fault.lines.candidate)
    if fault.kind != "mean_over_pads" or source is None or statement is None:
        return
    masks = _masks(source, statement)
    axis_name = "axis" if fault.frameworks[1] == "paddle" else "dim"
    means: list[tuple[tuple[Edit, ...], str]] = []
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or last_name(node.func) not in ("mean", "max", "amax"):
            continue
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        is_method = owner is not None and dotted(owner) not in source.modules
        arguments = [*([owner] if is_method and owner is not None else []), *node.args]
        axes = [*arguments[1:2], *(each.value for each in node.keywords if each.arg in ("axis", "dim"))]
        if not arguments or (axes and number_of(axes[0]) is None):
            continue
        x = source.code(arguments[0])
        x = x if isinstance(arguments[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({x})"
        over = f"{axis_name}={source.code(axes[0])}" if axes else ""
        for mask in masks:
            # A mask has a place for each step of a sequence, or for each number.
            shapes = [f"{mask}.unsqueeze(-1)", mask] if axes else [mask, f"{mask}.unsqueeze(-1)"]
            for shaped in shapes:
                count = f"{mask}.sum({over}, keepdim=True)" if shaped != mask and over else f"{shaped}.sum({over})"
                text = f"({x} * {shaped}).sum({over}) / {count}"
                is_inner = isinstance(source.parents.get(node), (ast.BinOp, ast.UnaryOp, ast.Attribute))
                edit = Edit(source.file, *source.span(node), f"({text})" if is_inner else text)
                means.append(((edit,), "the mean is over the places that the mask keeps"))
    yield from _ranked(means)


def _masks(source: Source, statement: ast.stmt) -> list[str]:
    """Return expressions of the function around a statement that are 1 where a place counts, and 0 at padding."""
    function = source.function(statement)
    if function is None:
        return []
    values = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and node.lineno < statement.lineno
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names = [name for name, value in values.items() if any(isinstance(each, ast.Compare) for each in ast.walk(value))]
    names += [name for name in _variables(function, statement) if re.search("mask|valid", name) and name not in names]
    expressions = []
    for name in names:
        value = values.get(name)
        signs = [op for each in ast.walk(value) if isinstance(each, ast.Compare) for op in each.ops] if value else []
        is_number = value is not None and any(
            isinstance(each, ast.Call) and last_name(each.func) in ("astype", "float", "to", "type", "cast")
            for each in ast.walk(value)
        )
        text = name if is_number else f"{name}.astype('float32')" if _is_paddle(source) else f"{name}.float()"
        expressions.append(f"(1 - {text})" if any(isinstance(sign, ast.Eq) for sign in signs) else text)
    return expressions


def _is_paddle(source: Source) -> bool:
    return any(module.partition(".")[0] == "paddle" for module in source.modules.values())


def _unscaled(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield `unscale_` before gradients are clipped."""
    if fault.kind != "clip_scaled":
        return
    words = "gradients are unscaled before they are clipped"
    for source, clip in project.calls("clip_grad_norm_", "clip_grad_value_"):
        statement = source.statement_around(clip)
        own = [
            each
            for call in source.calls("unscale_")
            if source.function(call) is source.function(clip)
            and isinstance(each := source.statement_around(call), ast.Expr)
        ]
        if statement is not None and own:
            edits = (line_removed(source, own[0]), line_before(source, statement, source.code(own[0])))
            yield Proposal(edits, words, _NAMED)
        for call in source.calls("step") if statement is not None and not own else ():
            if statement is not None and isinstance(call.func, ast.Attribute) and len(call.args) == 1:
                code = f"{source.code(call.func.value)}.unscale_({source.code(call.args[0])})"
                yield Proposal((line_before(source, statement, code),), words, _NAMED)


def _missing_norm(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield calls of a norm that the reference has at the place of the fault, and the line that makes the norm.

    A norm that the candidate's class makes and never calls is called; else one is made.
    """
    path = fault.values.reference if fault.kind == "norm_missing" and fault.values is not None else ""
    layer = _layer_at(fault, path)
    if layer is None:
        return
    proposals: list[tuple[tuple[Edit, ...], str]] = []
    for source, statement, node in places(fault, project):
        owner = source.class_around(statement)
        if owner is None:
            continue
        unread = [name for name, value in _uncalled(owner).items() if common_kind(value.lower()) == layer.kind]
        made = None if unread else _norm_made(fault, project, source, owner, layer)
        for name in unread or ([] if made is None else [made[0]]):
            first = () if unread or made is None else made[1]
            words = (
                f"`self.{name}`, which is never called, is called" if unread else f"a {layer.kind} is made and called"
            )
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id != "self"}
            variables = names & {*_variables_at(source, statement)} if indent(source, statement) is not None else ()
            for variable in sorted(variables):
                line = line_before(source, statement, f"{variable} = self.{name}({variable})")
                proposals.append(((*first, line), words))
            proposals.append(((*first, _around(source, node, f"self.{name}(", ")")), words))
    yield from _ranked(proposals, _NAMED - 0.1)


def _layer_at(fault: Fault, path: str) -> Layer | None:
    """Return the reference's layer that a cause names, with the common name of its kind; `None` if it is no norm."""
    layer = next((each for each in fault.models.layers.reference if each.path == path), None)
    kind = "" if layer is None else common_kind(layer.kind)
    return None if layer is None or kind not in _NORMS else replace(layer, kind=kind)


def _norm_made(
    fault: Fault, project: Project, source: Source, owner: ast.ClassDef, layer: Layer
) -> tuple[str, tuple[Edit, ...]] | None:
    """Return the attribute of a new norm, and the edits that make the norm at the end of the class's `__init__`.

    The call is made of the catalog's name, and of the numbers of the reference's layer; names of the run are not used.
    """
    framework = fault.frameworks[1]
    whole = whole_name(framework, _NORMS[layer.kind])
    shape = next((each.shape for each in layer.parameters if each.slot == "weight"), ())
    init = next((node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
    if not whole or not shape or init is None or indent(source, init.body[-1]) is None:
        return None
    # Of names that hold the size, one that makes the layer before or behind: others may hold the number by chance.
    beside = {_tail(fault.first.candidate), _tail(fault.partner_of(fault.first.last_agreeing))}
    names = [
        argument
        for node in ast.walk(init)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if any(_is_own(target) and last_name(target) in beside for target in node.targets)
        for argument in node.value.args
        if isinstance(argument, ast.Name)
    ]
    sizes = [_name_among(project, source, names, size) or str(size) for size in shape]
    arguments = [sizes[0] if len(sizes) == 1 else f"[{', '.join(sizes)}]"]
    if layer.kind == "groupnorm":
        groups = layer.settings.get("num_groups")
        if not isinstance(groups, int):
            return None
        arguments.insert(0, str(groups))
    for setting, default in (("eps", 1e-5), ("momentum", 0.1)):
        value = layer.settings.get(setting)
        if isinstance(value, float) and value != default:
            line = layer_fix(framework, replace(layer, type=whole.rpartition(".")[2], kind=layer.kind), setting, value)
            argument = line.partition("(..., ")[2].removesuffix(")")
            if argument:
                arguments.append(argument)
    taken = {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute) and _is_own(node)}
    name = next(each for each in ("norm", *(f"norm{n}" for n in range(1, 99))) if each not in taken)
    spelled = source.spelled(whole)
    edits = [line_after(source, init.body[-1], f"self.{name} = {spelled or whole}({', '.join(arguments)})")]
    if not spelled:
        edits.append(source.import_edit(framework))
    return name, tuple(edits)


def _name_among(project: Project, source: Source, names: Sequence[ast.Name], size: int) -> str:
    """Return the first of some names that holds a number; empty if none does."""
    for name in names:
        values = project.definitions(source, name)
        if values and all(number_of(value) == size for _, value in values):
            return name.id
    return ""


def _variables_at(source: Source, statement: ast.stmt) -> list[str]:
    function = source.function(statement)
    return [] if function is None else _variables(function, statement)


def _uncalled(owner: ast.ClassDef, classes: Collection[str] = ()) -> dict[str, str]:
    """Return the attributes of layers that a class makes and never reads, with the names of the layers' classes.

    Args:
        owner: the class.
        classes: names of further classes of layers.
    """
    attributes = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and _is_own(node)]
    read = {node.attr for node in attributes if isinstance(node.ctx, ast.Load)}
    return {
        node.targets[0].attr: last_name(node.value.func)
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and _is_own(node.targets[0])
        and node.targets[0].attr not in read
        and isinstance(node.value, ast.Call)
        and (is_layer(last_name(node.value.func)) or last_name(node.value.func) in classes)
    }


def _uncalled_layers(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield calls of layers that a class makes and never calls."""
    if fault.first.stage != "forward" or (fault.fix and fault.first.cause is not None and fault.first.cause.proven):
        return
    before = fault.partner_of(fault.first.last_agreeing).split(".")
    owners = [(source, node) for source in project for node in source.nodes if isinstance(node, ast.ClassDef)]
    classes = {node.name for _, node in owners}
    places: list[tuple[bool, Source, ast.expr, str]] = []
    for source, owner in owners:
        calls = [node for node in ast.walk(owner) if isinstance(node, ast.Call) and _is_own(node.func)]
        for name in sorted(_uncalled(owner, classes)):
            places += [(last_name(call.func) not in before, source, call, name) for call in calls]
    yield from _ranked(
        ((_around(source, call, f"self.{name}(", ")"),), f"`self.{name}`, which is never called, is called")
        for _, source, call, name in sorted(places, key=lambda each: each[0])
    )


def _detached_targets(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield targets of losses without their gradient, where gradients differ though all that is computed agrees."""
    if fault.first.stage not in ("backward", "grad", "update") or fault.kind not in (
        "", "unknown", "generic", "detached", "loss_term_missing", "gradients", "no_gradient",
    ):  # fmt: skip
        return
    places: list[tuple[Source, ast.expr]] = []
    for source in project:
        for node in source.nodes:
            if not isinstance(node, ast.Call):
                continue
            name = last_name(node.func)
            if (kind_of(name) == "loss" or name in _COMPARING) and len(node.args) > 1:
                places += [(source, each) for each in node.args[:2] if isinstance(each, (ast.Name, ast.Attribute))]
    targets = places[1::2] if len(places) % 2 == 0 else places
    groups = [targets] if len(targets) > 1 else []
    for group in [*groups, *([each] for each in targets)][:_MOST]:
        edits = tuple(_around(source, node, "", ".detach()") for source, node in group)
        yield Proposal(edits, "the target of the loss is detached", _GUESSED)


def _reordered(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield two layers in the latter order, where the candidate's activation stands in the place of no activation, or
    follows where the reference has the activation already.
    """
    is_late = fault.kind == "activation_missing"
    if not is_late and (fault.kind != "activation" or fault.values is None or fault.values.reference):
        return
    if fault.values is None or (is_late and not fault.values.reference):
        return
    name = common_kind(str(fault.values.reference if is_late else fault.values.candidate).lower().replace("_", ""))

    def is_named(node: ast.AST) -> bool:
        function = last_name(getattr(node, "func", node)).lower().replace("_", "")
        return bool(function) and (function in name.split() or common_kind(function) == name)

    frames = [fault.models.lines.candidate.get(fault.first.candidate or ""), fault.lines.candidate]
    texts: list[tuple[Edit, ...]] = []
    for frame in dict.fromkeys(filter(None, frames)):
        source, statement = project.statement_at(frame)
        if source is None or statement is None:
            continue
        for first, second in pairwise(_block(source, statement)):
            is_meant = not is_late or is_named(getattr(second, "value", second))
            if statement in (first, second) and is_meant and _does_alike(first, second):
                texts.append(_exchanged(source, first, second))
        for node in ast.walk(statement):
            items = node.elts if isinstance(node, ast.List) else []
            if isinstance(node, ast.Call) and last_name(node.func) == "Sequential":
                items = node.args
            pairs = [pair for pair in pairwise(items) if all(isinstance(each, ast.Call) for each in pair)]
            # The activation that comes too early or too late, if the items name it.
            moved = [pair for pair in pairs if is_named(pair[is_late])]
            texts += [_exchanged(source, *pair) for pair in moved or ([] if is_late else pairs)]
            inner = node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else None
            is_value = not isinstance(source.parents.get(node), ast.Expr) and (not is_late or is_named(node))
            if is_value and isinstance(node, ast.Call) and isinstance(inner, ast.Call) and len(inner.args) == 1:
                texts.append(_exchanged(source, node.func, inner.func))
    yield from _ranked((edits, "two layers come in the other order") for edits in texts)


def _sum_order(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield an activation of a sum for the activation of a term, which may be a statement before the sum."""
    source, near = project.statement_at(fault.lines.candidate)
    if fault.kind != "activation_order" or source is None or near is None:
        return
    statements = [node for node in ast.walk(source.function(near) or source.tree) if isinstance(node, ast.stmt)]
    patches: list[tuple[Edit, ...]] = []
    for total in sorted(statements, key=lambda each: each is not near):
        value = getattr(total, "value", None)
        sums = [each for each in ast.walk(value) if _is_sum(each)] if isinstance(value, ast.expr) else []
        for node in [total] if isinstance(total, ast.AugAssign) and isinstance(total.op, ast.Add) else sums:
            sides = [getattr(node, name) for name in (("target",) if node is total else ("left", "right"))]
            for term in sides:
                before = [each for each in statements if each.lineno < total.lineno and _assigns(each, dotted(term))]
                call = before[-1].value if before and isinstance(before[-1], ast.Assign) else term
                if not isinstance(call, ast.Call) or len(call.args) != 1 or kind_of(last_name(call.func)) == "loss":
                    continue
                head, inner = source.code(call.func), source.code(call.args[0])
                edit = Edit(source.file, *source.span(call), inner)
                if call is not term and inner == dotted(term):
                    first, last = (source.line_start(before[-1].lineno + k) for k in (0, 1))
                    edit = Edit(source.file, first, last, "")
                if isinstance(node, ast.AugAssign):
                    start, end = source.span(node)
                    added = f"{source.code(term)} = {head}({source.code(term)} + {source.code(node.value)})"
                    patches.append((edit, Edit(source.file, start, end, added)))
                elif call is term:
                    terms = [inner if each is term else source.code(each) for each in sides]
                    patches.append((Edit(source.file, *source.span(node), f"{head}({' + '.join(terms)})"),))
                else:
                    patches.append((edit, Edit(source.file, *source.span(node), f"{head}({source.code(node)})")))
    yield from _ranked((edits, "the activation is of the sum") for edits in patches)


def _is_sum(node: ast.AST | None) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _assigns(statement: ast.stmt, name: str) -> bool:
    """Return True if a statement assigns a value to a variable."""
    return bool(name) and isinstance(statement, ast.Assign) and name in map(dotted, statement.targets)


def _exchanged(source: Source, former: ast.AST, latter: ast.AST) -> tuple[Edit, ...]:
    pairs = ((former, source.code(latter)), (latter, source.code(former)))
    return tuple(Edit(source.file, *source.span(node), text) for node, text in pairs)


def _missing_functions(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield functions around the layers that still agree, which only the reference calls, as the cause says."""
    reference, candidate = fault.calls.map(lambda side: Counter(name for name, _ in side))
    agreeing = fault.partner_of(fault.first.last_agreeing)
    patches: list[tuple[tuple[Edit, ...], str]] = []
    for name in [each for each in reference - candidate if each in UNARY]:
        # The outermost layer first: all its calls in a function change together.
        for layer in [each for each in agreeing.split(".") if each and not each.isdecimal()]:
            by_function: dict[ast.AST, list[Edit]] = {}
            for source in project:
                whole = whole_name(fault.frameworks[1], name)
                head = source.spelled(whole) or whole
                for call in _calls_of(source.tree, layer):
                    scope = source.function(call)
                    if scope is not None:
                        by_function.setdefault(scope, []).append(_around(source, call, f"{head}(", ")"))
            patches += [(tuple(edits), f"`{name}` is around `self.{layer}`") for edits in by_function.values()]
    yield from _ranked(patches)


def _missing_terms(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield sums with a layer that the reference adds at the place of the fault, and that the candidate never calls."""
    match = _NOT_ADDED.search(fault.words)
    layer = "" if match is None else _tail(fault.partner_of(match[1]))
    if not layer:
        return
    yield from _ranked(
        ((_around(source, node, "", f" + self.{layer}({name})"),), f"`self.{layer}({name})` is added")
        for source, statement, node in places(fault, project)
        for name in _variables_at(source, statement)[:3]
    )


def _exchanged_parts(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield the parts of a concatenation in other orders."""
    if fault.kind != "parts_order":
        return
    frame = fault.lines.candidate
    patches: list[tuple[tuple[Edit, ...], str]] = []
    for source, call in sorted(
        project.calls("concat", "cat", "concatenate", "stack", "hstack"),
        key=lambda row: frame is None or (row[0].file, row[1].lineno) != (frame.file, frame.line),
    ):
        parts = call.args[0].elts if call.args and isinstance(call.args[0], (ast.List, ast.Tuple)) else []
        texts = [source.code(part) for part in parts]
        for order in list(permutations(texts))[1:] if 1 < len(texts) < 4 else ():
            edits = tuple(
                Edit(source.file, *source.span(part), text)
                for part, text in zip(parts, order)
                if source.code(part) != text
            )
            patches.append((edits, f"the parts come in the order {', '.join(order)}"))
    yield from _ranked(patches)


def _branches(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield ``x = x + f(g(x))`` for ``x = g(x)`` and ``x = x + f(x)``: the sum takes what comes before the layer."""
    if fault.first.stage != "forward":
        return
    frame = fault.lines.candidate
    source = None if frame is None else project.get(frame.file)
    if source is None:
        return
    for second in source.nodes:
        if not isinstance(second, (ast.Assign, ast.Return)) or not isinstance(second.value, ast.BinOp):
            continue
        block = _block(source, second)
        first = block[block.index(second) - 1] if second in block[1:] else None
        if not isinstance(first, ast.Assign) or not isinstance(first.value, ast.Call):
            continue
        name, arguments = dotted(first.targets[0]), first.value.args
        sides = (second.value.left, second.value.right)
        branch = next((each for each in sides if isinstance(each, ast.Call) and name in map(dotted, each.args)), None)
        if (
            len(arguments) != 1
            or not name
            or dotted(arguments[0]) != name
            or branch is None
            or name not in map(dotted, sides)
        ):
            continue
        argument = next(each for each in branch.args if dotted(each) == name)
        edits = (
            line_removed(source, first),
            Edit(source.file, *source.span(argument), source.code(first.value)),
        )
        yield Proposal(edits, f"the sum takes `{name}` as it is before `{source.code(first.value.func)}`", _GUESSED)


def _block(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements of the block that a statement is in."""
    blocks = (getattr(source.parents.get(statement), name, None) for name in ("body", "orelse", "finalbody"))
    return next((each for each in blocks if isinstance(each, list) and statement in each), [statement])


def _does_alike(former: ast.stmt, latter: ast.stmt) -> bool:
    """Return True if two statements hand former variable on, or add to former list."""
    if isinstance(former, ast.Expr) and isinstance(latter, ast.Expr):
        calls = [each.value for each in (former, latter)]
        names = [dotted(each.func) if isinstance(each, ast.Call) else "" for each in calls]
        return bool(names[0]) and names[0] == names[1]
    if not isinstance(former, ast.Assign) or not isinstance(latter, ast.Assign):
        return False
    target = dotted(former.targets[0])
    return bool(target) and dotted(latter.targets[0]) == target and all(
        isinstance(each.value, ast.Call) and any(dotted(value) == target for value in each.value.args)
        for each in (former, latter)
    )  # fmt: skip


def _calls_of(node: ast.AST, layer: str) -> list[ast.Call]:
    """Return the calls of an attribute of `self` by its name."""
    return [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Call) and _is_own(each.func) and layer and last_name(each.func) == layer
    ]


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _around(source: Source, node: ast.expr, before: str, after: str) -> Edit:
    """Return the edit that puts text around an expression, with brackets where its place needs them."""
    start, end = source.span(node)
    text = source.code(node)
    operator = after[1:2] if after.startswith(" ") else ""
    if operator and isinstance(node, (ast.IfExp, ast.Compare, ast.Lambda, ast.BoolOp)):
        text = f"({text})"
    if operator == "*" and isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        text = f"({text})"
    whole = f"{before}{text}{after}"
    around = source.parents.get(node)
    if operator and isinstance(around, (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript)):
        whole = f"({whole})"
    return Edit(source.file, start, end, whole)


def _ranked(patches: Iterable[tuple[tuple[Edit, ...], str]], weight: float = _NAMED) -> Iterator[Proposal]:
    """Yield the first patches with their words, the first one with the smallest weight."""
    for k, (edits, words) in enumerate(islice(patches, _MOST)):
        yield Proposal(edits, words, weight + 0.01 * k)


def _tail(path: str | None) -> str:
    return (path or "").rpartition(".")[2]


def literals(project: Project) -> Sequence[tuple[Source, ast.expr, float]]:
    """Return all numbers of a project that are not an index, with their signs."""
    places: list[tuple[Source, ast.expr, float]] = []
    for source in project:
        for node in source.nodes:
            number = number_of(node) if isinstance(node, ast.Constant) else None
            around = source.parents.get(node)
            signed = number_of(around) if isinstance(around, ast.UnaryOp) else None
            if number is not None and signed is not None:
                places.append((source, around, signed))  # type: ignore[arg-type]
            elif number is not None and not isinstance(around, (ast.Subscript, ast.Slice)):
                places.append((source, node, number))  # type: ignore[arg-type]
    return places
