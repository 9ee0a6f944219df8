"""Edits of a formula, among them those that leave out a term, a factor or a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.formula import CONSTANT, MADE, Change, Node
from padiff.compare.diagnose.computing.operations import OPERATIONS
from padiff.compare.diagnose.computing.writer import Writer
from padiff.compare.diagnose.traced import Graph, place_of
from padiff.records import Both, TracedCall
from padiff.system.frames import Frame

#: What a tensor is called that no call gives.
UNNAMED = "what comes in"
# Operations that only rearrange, select or cast values.
_LOOKING = frozenset({"getitem", "reshape", "transpose", "expand", "cast", "detach"})
# Largest difference of values that agree, as a share of the largest value.
_AGREE = 1e-4


@dataclass(frozen=True)
class Argument:
    """An argument of a function with another value in the candidate's call.

    Attributes:
        names: the argument's name in each framework.
        right, wrong: the values of the reference's and of the candidate's call.
        usual: the value of a call without the argument; by framework, if they differ.
        axis: True if the value is an axis.
    """

    names: Mapping[str, str]
    right: Any
    wrong: Any
    usual: Any
    axis: bool = False

    def is_wrong_in(self, arguments: Mapping[str, Any], framework: str, axes: int) -> bool:
        """Return True if a call has the candidate's value.

        Args:
            arguments: the arguments of the call.
            framework: the framework of the call.
            axes: the number of axes of the call's first tensor.
        """
        usual = self.usual[framework] if isinstance(self.usual, Mapping) else self.usual
        value = arguments.get(self.names[framework], usual)
        if self.axis and isinstance(value, int) and axes:
            value %= axes
        return type(value) is type(self.wrong) and bool(value == self.wrong)


@dataclass(frozen=True)
class Edit:
    """A possible change of the candidate's code, as changes to nodes of a formula.

    Attributes:
        kind: the machine-readable kind of the cause.
        name: a name of one or two words, for the list of tried edits.
        text: the cause in words.
        changes: the changes, by node of the formula.
        rank: the priority among edits that explain the same; the simplest edit has the lowest rank.
        free: the number of values that were solved for.
        at: the node that the edit is about.
        telling: True if the edit names the reason; False if the edit only says where and how the output changes.
        argument: the argument of a function that the edit changes, if that is all it changes.
        other: the node of the candidate's formula that belongs to `at`; -1 if not known.
        values: as in `Cause`, of the side that the formula is of, and of the other one.
    """

    kind: str
    name: str
    text: str
    changes: Mapping[int, Change]
    rank: int = 1
    free: int = 0
    at: int = -1
    telling: bool = True
    argument: Argument | None = None
    other: int = -1
    values: Both[Any] | None = None


class FormulaView:
    """A formula together with the trace that it was written from, which gives names and places to the nodes.

    Attributes:
        formula: the formula of the tensor that differs.
        graph: the graph of the trace.
        writer: the writer of the formula.
        end_is_open: True to try edits of the whole output, too; other tensors are always edited.
    """

    def __init__(self, writer: Writer, graph: Graph, end_is_open: bool = True) -> None:
        self.end_is_open = end_is_open
        self.writer, self.formula, self.graph = writer, writer.formula, graph
        self._tensors = {node: tensor for tensor, node in reversed(list(writer.nodes.items()))}

    @property
    def nodes(self) -> list[Node]:
        return self.formula.nodes

    def shape(self, node: int) -> tuple[int, ...]:
        return self.formula.values[node].shape

    def where(self, node: int) -> str:
        """Return the call that a node belongs to as text, e.g. ``the second add() in `layers.1` ``."""
        about = self.nodes[node].about
        if about < 0:
            return self.named(node)
        return place_of(self.graph.trace.calls[about], self.graph.trace)

    def line(self, node: int) -> Frame | None:
        """Return the line of the user's code that makes a node's call; `None` if not recorded."""
        about = self.nodes[node].about
        return self.graph.trace.calls[about].line if about >= 0 else None

    def maker(self, node: int) -> Frame | None:
        """Return the line of the user's code that makes a node's tensor: by a function, or by a layer."""
        call = self.producer(node)
        return self.line(node) or (None if call is None else call.line)

    def equal(self, value: np.ndarray) -> list[int]:
        """Return the nodes whose values agree with a tensor's in their order, whatever their axes are."""
        largest = np.max(np.abs(value), initial=0.0) if value.dtype.kind in "fiu" else np.nan
        return [
            k
            for k, own in enumerate(self.formula.values)
            if own.size == value.size and np.allclose(own.ravel(), value.ravel(), rtol=0, atol=_AGREE * largest)
        ]

    @property
    def last(self) -> int:
        """Return the last node that belongs to a call; -1 if there is none."""
        return max((k for k, node in enumerate(self.nodes) if node.about >= 0), default=-1)

    def function(self, node: int) -> str:
        """Return the function whose call a node belongs to; empty if there is none."""
        about = self.nodes[node].about
        return self.graph.trace.calls[about].function if about >= 0 else ""

    def layer(self, node: int) -> str:
        """Return the path of the layer whose code contains a node; empty if there is none."""
        about = self.nodes[node].about
        return self.graph.trace.calls[about].layer if about >= 0 else ""

    def layer_type(self, node: int) -> str:
        about = self.nodes[node].about
        return self.graph.trace.calls[about].layer_type if about >= 0 else ""

    def source(self, k: int) -> int:
        """Return the node whose values a node only views, copies or selects; the node itself if it computes."""
        while self.nodes[k].operation in _LOOKING and self.nodes[k].given:
            k = self.nodes[k].given[0]
        return k

    def named(self, node: int) -> str:
        """Return a text for a node's tensor: a parameter, or the output of a layer or call."""
        item = self.nodes[node]
        if self.is_parameter(node):
            return f"`{item.name}`"
        source = self.source(node)
        if source != node and self.is_parameter(source):
            return f"`{self.nodes[source].name}`"
        tensor = self._tensors.get(node)
        calls = [c for c in self.graph.trace.calls if any(o.tensor == tensor for o in c.outputs)]
        layers = [call for call in calls if not call.function]
        if layers:
            return f"what `{layers[0].layer}` gives"
        if calls:
            return f"what {place_of(calls[0], self.graph.trace)} gives"
        if item.about >= 0:
            return f"what {self.where(node)} gives"
        return UNNAMED

    def may_be_edited(self, node: int) -> bool:
        """Return True if edits of a node's whole tensor are tried."""
        return node != self.formula.end or self.end_is_open

    def is_parameter(self, node: int) -> bool:
        return self.nodes[node].name not in ("", CONSTANT, MADE)

    def is_number(self, node: int) -> bool:
        return self.nodes[node].name == CONSTANT

    def is_float(self, node: int) -> bool:
        return self.formula.values[node].dtype.kind == "f"

    def users(self, node: int) -> list[int]:
        """Return the nodes that have a node as an input."""
        return [k for k, item in enumerate(self.nodes) if node in item.given]

    def tensor(self, node: int) -> int | None:
        """Return the number of a node's tensor in the trace; `None` if it is not traced."""
        return self._tensors.get(node)

    def producer(self, node: int) -> TracedCall | None:
        """Return the call of a function or layer that gave a node's tensor; `None` if it is not traced."""
        return self.graph.producers.get(self._tensors.get(node, -1))

    def is_earlier_turn(self, node: int, later: int) -> bool:
        """Return True if two nodes of one shape are outputs of a layer that a loop calls again with what it gave."""
        calls = self.producer(node), self.producer(later)
        if calls[0] is None or calls[1] is None or calls[0].function or calls[1].function:
            return False
        waiting, seen = [calls[1]], {id(calls[1])}
        for call in waiting if calls[0].layer == calls[1].layer and self.shape(node) == self.shape(later) else ():
            makers = [self.graph.producers.get(operand.tensor) for operand in call.inputs]
            waiting += [maker for maker in makers if maker is not None and id(maker) not in seen]
            seen |= {id(maker) for maker in makers}
        return id(calls[0]) in seen

    def below(self, node: int, most: int) -> set[int]:
        """Return a node and the nodes that depend on it through at most the given number of operations.

        Args:
            most: the number of operations.
        """
        nodes = {node}
        for _ in range(most):
            nodes |= {k for k, item in enumerate(self.nodes) if any(g in nodes for g in item.given)}
        return nodes

    def feeds(self, node: int, operations: frozenset[str]) -> bool:
        """Return True if any node with one of the operations depends on a node."""
        return any(self.nodes[k].operation in operations for k in self.formula.below([node]))

    def turns(self, node: int) -> bool:
        """Return True if a node depends on sines and cosines that other calls computed."""
        calls = map(self.producer, self.formula.above(node, 4))
        return {"sin", "cos"} <= {call.function for call in calls if call is not None}

    def of_operations(self, node: int, operations: frozenset[str]) -> bool:
        """Return True if a node depends on a node with one of the operations, at most twelve operations away."""
        return any(self.nodes[k].operation in operations for k in self.formula.above(node, 12))


@dataclass(frozen=True)
class Target:
    """The tensor that an edit has to reproduce.

    Attributes:
        values: the other side's tensor, or the projection of its sketch.
        shape: the shape of the tensor that the formula computes.
        look: maps a computed tensor to the values to compare: the tensor itself, or its projection.
    """

    values: np.ndarray
    shape: tuple[int, ...]
    look: Callable[[np.ndarray], np.ndarray]

    def off(self, made: np.ndarray) -> float:
        """Return the root mean square error of a computed tensor."""
        error = self.look(made) - self.values
        return math.sqrt(float(np.mean(np.square(error)))) if error.size else 0.0


def put(value: np.ndarray) -> Change:
    """Return a change that sets a node to a value."""
    return lambda get, own: value


def instead(node: int) -> Change:
    """Return a change that replaces a node's value with another node's value."""
    return lambda get, own: get(node)


def given(sheet: FormulaView, k: int, **how: Any) -> Change:
    """Return a change that computes a node's operation with other keyword arguments.

    Args:
        k: the node.
        how: the keyword arguments to replace.
    """
    node = sheet.nodes[k]

    def change(get: Callable[[int], np.ndarray], own: Any) -> np.ndarray:
        return np.asarray(OPERATIONS[node.operation](*(get(g) for g in node.given), **{**node.how, **how}))

    return change


_ROTATING = frozenset({"sin", "cos"})
_NORMS = frozenset({"normalised", "grouped", "by_statistics"})
# Kinds that name a part of the code but not a reason; a cause of such a kind is never proven.
_WHERE = frozenset({"branch_missing", "factor_missing", "division_missing"})
#: The kind of an edit that takes one operand of a minimum or a maximum.
CHOICE = "choice_missing"
# The most operations between a node and an earlier node that may replace it.
_STEPS = 7
#: Placeholders in texts: for the side that leaves something out, and for the side whose calls the formula holds.
_SIDE, _OTHER = SIDES_OF_EDITS = "{side}", "{other}"


def dropped_terms(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that replace an operation by one of its operands, where both have the same shape."""
    yield from _layers(sheet)
    for k, node in enumerate(sheet.nodes):
        if not node.operation:
            continue
        for place, operand in enumerate(node.given):
            if sheet.shape(operand) == sheet.shape(k):
                description = _operation(sheet, k, place)
                if description is not None:
                    kind, name, text, rank = description
                    telling = kind not in _WHERE and not (kind == "term_missing" and not text.startswith(_SIDE))
                    values: Both[Any] = Both(sheet.function(k), "")
                    if kind == "scale_missing":
                        number = sheet.formula.values[node.given[1 - place]]
                        values = Both(float(number) if node.operation == "mul" else 1 / float(number), 1.0)
                    yield Edit(kind, name, text, {k: instead(operand)}, rank, at=k, telling=telling, values=values)
        if node.operation == "transpose" and len(node.given) == 1 and not sheet.is_parameter(node.given[0]):
            text = f"{sheet.where(k)} is left out: the axes are in another order"
            yield Edit("axes_order", "another order of axes", text, {k: instead(node.given[0])}, 2, at=k)
        yield from _further(sheet, k)
        if node.operation in ("mul", "pow") and len(node.given) == 2 and sheet.is_number(node.given[1]):
            yield from _powers(sheet, k)


def _powers(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield the edit that takes a power where the code multiplies by its exponent, or the other way round."""
    operand, number = sheet.nodes[k].given
    exponent = float(np.ravel(sheet.formula.values[number])[0])
    if exponent in (0.0, 1.0):
        return
    does = [f"takes a power of {exponent:g}", f"multiplies by {exponent:g}"]
    is_product = sheet.nodes[k].operation == "mul"
    first, second = does if is_product else does[::-1]
    function: Any = np.power if is_product else np.multiply
    text = f"{_SIDE} {first}, {_OTHER} {second} there ({sheet.where(k)})"
    change: Change = lambda get, own: np.asarray(function(get(operand), exponent))  # noqa: E731
    yield Edit("power", "a power", text, {k: change}, 2, at=k)


def _layers(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that leave out a whole layer."""
    for call in sheet.graph.trace.calls:
        if call.function or not call.inputs or not call.outputs:
            continue
        source, output = (sheet.writer.nodes.get(operands[0].tensor) for operands in (call.inputs, call.outputs))
        if source is None or output is None or source == output or sheet.shape(source) != sheet.shape(output):
            continue
        if source not in sheet.formula.above(output) or sheet.nodes[output].operation == "act":
            continue  # leaving out an elementwise function is one of the edits of the function
        norm = "norm" in call.layer_type.lower() or sheet.nodes[output].operation in _NORMS
        norm = norm or any(sheet.nodes[k].operation in _NORMS for k in sheet.formula.above(output, 2))
        text = f"layer `{call.layer}` ({call.layer_type}) is left out there: what goes into it is handed on without it"
        kind, name = ("norm_missing", "a normalisation") if norm else ("layer_missing", "a layer")
        yield Edit(kind, name, text, {output: instead(source)}, 0, at=output, values=Both(call.layer, ""))
    yield from _turns(sheet)


def _turns(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that leave out the last calls of a layer that a loop calls again with what it gave."""
    outputs: dict[str, list[int | None]] = {}
    for call in sheet.graph.trace.calls:
        if not call.function and call.outputs:
            outputs.setdefault(call.layer, []).append(sheet.writer.nodes.get(call.outputs[0].tensor))
    for layer, nodes in outputs.items():
        last = nodes[-1]
        for done, node in enumerate(nodes[:-1], 1):
            if last is not None and node is not None and sheet.is_earlier_turn(node, last):
                text = f"`{layer}` is called {done} times there, not {len(nodes)} times: the last calls are left out"
                yield Edit("layer_missing", "a layer", text, {last: instead(node)}, 0, at=last)


def _operation(sheet: FormulaView, k: int, place: int) -> tuple[str, str, str, int] | None:
    """Describe the edit that replaces an operation by one of its operands.

    Args:
        sheet: the formula.
        k: the node of the operation.
        place: the position of the operand that replaces the operation.

    Returns:
        Kind, name, text and rank of the edit; `None` if there is no such edit.
    """
    node, where = sheet.nodes[k], sheet.where(k)
    operation = node.operation
    other_operand = next((operand for n, operand in enumerate(node.given) if n != place), None)
    if operation in ("add", "sub", "channelwise") and other_operand is not None:
        if sheet.is_number(other_operand):
            return None  # numbers are solved for instead
        if operation == "channelwise" and node.how["how"] == "mul":
            return "factor_missing", "a factor", f"{sheet.named(other_operand)} does not multiply ({where})", 1
        if sheet.is_parameter(other_operand):
            name = sheet.nodes[other_operand].name
            what = "bias" if "bias" in name or "bias" in sheet.writer.slots(name) else "term"
            return f"{what}_missing", f"a {what}", f"{_SIDE} does not add {name}, {_OTHER} does ({where})", 1
        remaining = node.given[place]
        if operation != "add":
            mean = operation == "sub" and place == 0 and _is_mean(sheet, other_operand)
            if mean:
                return "norm_form", "another form of the norm", f"the mean is not taken out: {where} is left out", 1
            return "term_missing", "a term", f"{sheet.named(other_operand)} is left out of {where}", 2
        if remaining in sheet.formula.above(other_operand) or other_operand in sheet.formula.above(remaining):
            if other_operand in sheet.formula.above(remaining):
                return "residual_missing", "a residual", f"the residual is missing: {where} is left out", 1
            text = f"only the residual is handed on by {where}: {sheet.named(other_operand)} is left out"
            return "branch_missing", "a branch", text, 1
        if _is_residual(sheet, other_operand, remaining):
            text = f"only the residual is handed on by {where}: {sheet.named(other_operand)} is left out"
            return "branch_missing", "a branch", text, 1
        if _is_residual(sheet, remaining, other_operand):
            text = f"the residual is missing: {where} leaves out {sheet.named(other_operand)}"
            return "residual_missing", "a residual", text, 1
        return "term_missing", "a term", f"{sheet.named(other_operand)} is not added ({where})", 2
    if operation in ("maximum", "minimum") and other_operand is not None and not sheet.is_number(other_operand):
        which = "larger" if operation == "maximum" else "smaller"
        names = sheet.named(node.given[place]), sheet.named(other_operand)
        text = f"{_SIDE} takes {names[0]} alone, {_OTHER} the {which} of it and {names[1]} ({where})"
        # Before all edits of what is not taken: with any of them the other operand is taken everywhere.
        return CHOICE, "a choice", text, -1
    if operation == "dropped":
        if place:
            return None
        share = float((sheet.formula.values[node.given[1]] == 0).mean())
        text = f"{_SIDE} drops nothing of {sheet.named(node.given[0])}, {_OTHER} drops {share:.0%} of it ({where})"
        return "dropout_missing", "dropout", text, 0
    if operation in ("mul", "div") and other_operand is not None:
        if sheet.is_number(other_operand):
            number = float(sheet.formula.values[other_operand])
            text = f"{where} is left out: {sheet.named(node.given[place])} is not scaled by {number:.6g}"
            text += " (zeros stand in its place)" if number == 0 else ""
            if sheet.feeds(k, _ROTATING):
                text += " (positions, or frequencies, of rotary embeddings)"
            return "scale_missing", "a scale", text, 1
        function = sheet.function(k)
        if function == "normalize":
            return "norm_missing", "a normalisation", f"the normalisation of {where} is left out", 1
        if operation == "div":
            summed = sheet.nodes[node.given[0]]
            total = summed.operation == "reduced" and summed.how["by"] == "sum"
            text = f"the division of {where} is left out{': the sum for the mean' if total else ''}"
            return "division_missing", "a division", text, 2
        masks = sheet.formula.values[other_operand].dtype.kind == "b" or is_mask(sheet.formula.values[other_operand])
        kind, name = ("mask_missing", "a mask") if masks else ("factor_missing", "a factor")
        what = "mask" if masks else "factor"
        return kind, name, f"the {what} of {where} is left out: {sheet.named(other_operand)}", 2
    if operation in ("picked", "rows") and place == 0:
        text = f"{where}, which puts {sheet.named(node.given[0])} into another order, is left out"
        return "order_missing", "another order of rows", text, 2
    if operation == "act":
        return None  # "no activation" is one of the edits of activations
    if operation in _NORMS:
        return "norm_missing", "a normalisation", f"what {where} normalises is not normalised", 1
    if operation in ("masked", "causal", "where"):
        return "mask_missing", "a mask", f"the mask is missing: what {where} hides is not hidden", 1
    if operation == "cast":
        return "precision", "another precision", f"{where}, which rounds to {node.how['dtype']}, is left out", 2
    if operation == "neg":
        return "sign", "a sign", f"the sign of {sheet.named(node.given[0])} is flipped ({where})", 2
    if operation in ("softmax", "log_softmax", "clamp", "roll", "flip", "sqrt", "square", "abs", "exp", "log"):
        return f"{operation}_missing", operation, f"{where} is left out", 2
    return None


def _is_mean(sheet: FormulaView, node: int) -> bool:
    item = sheet.nodes[node]
    return item.operation == "reduced" and item.how["by"] == "mean"


def is_mask(values: np.ndarray) -> bool:
    """Return True if values are zeros and ones."""
    return bool(values.size > 1 and ((values == 0) | (values == 1)).all() and (values == 0).any())


def _is_residual(sheet: FormulaView, derived: int, source: int) -> bool:
    """Return True if one operand of a sum was computed from the other.

    Args:
        sheet: the formula.
        derived: the node that may have been computed from the other.
        source: the other node.
    """
    tensor, start = sheet.tensor(source), sheet.tensor(derived)
    if tensor is None or start is None or sheet.nodes[source].name:
        return False
    back = sheet.graph.back(start, lambda one: one == tensor)
    return any(operand.tensor == tensor for call in back for operand in call.inputs)


def _further(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits that leave out several operations: those between a node and an earlier node of the same shape."""
    node = sheet.nodes[k]
    if node.operation not in ("add", "sub", "mul", "div", "cat", "reshape"):
        return
    above = sheet.formula.above(k, _STEPS)
    for source, steps in sorted(above.items(), key=lambda item: item[1]):
        if (
            steps < 2
            or sheet.shape(source) != sheet.shape(k)
            or sheet.is_parameter(source)
            or not sheet.is_float(source)
        ):
            continue
        between = [n for n in above if source in sheet.formula.above(n, _STEPS) and n != source]
        rotated = any(
            sheet.nodes[n].operation in _ROTATING for b in between for n in sheet.formula.above(b, _STEPS + 3)
        ) or _has_rotating_input(sheet, between)
        norm = any(sheet.nodes[n].operation in ("sqrt", "rsqrt") for n in between)
        if rotated:
            text = f"the rotary embedding of {sheet.named(source)} is missing (up to {sheet.where(k)})"
            yield Edit("rotary_missing", "a rotary embedding", text, {k: instead(source)}, 2, at=k)
        else:
            kind, name = ("norm_missing", "a normalisation") if norm else ("calls_missing", "some calls")
            text = f"what is computed of {sheet.named(source)} up to {sheet.where(k)} is left out"
            text = f"{text}, with a normalisation" if norm else text
            yield Edit(kind, name, text, {k: instead(source)}, 3, at=k, telling=False)


def _has_rotating_input(sheet: FormulaView, nodes: list[int]) -> bool:
    """Return True if a node has an input that a call of sine or cosine computed outside of the formula."""
    for k in nodes:
        for operand in sheet.nodes[k].given:
            call = sheet.producer(operand)
            if call is not None and call.function in _ROTATING:
                return True
    return False
