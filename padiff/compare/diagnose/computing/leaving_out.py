"""Edits that leave something out of a formula: a term, a factor, a function, a layer."""

from __future__ import annotations

from collections.abc import Iterator

from padiff.compare.diagnose.computing.edit import Edit, Sheet, instead

_ROTATING = frozenset({"sin", "cos"})
_NORMS = frozenset({"normalised", "grouped", "by_statistics"})
# What says which part of the code it is, and not why: it is never called proven.
_WHERE = frozenset({"branch_missing", "factor_missing", "division_missing"})
# Operations between a node and one that may stand in its place.
_STEPS = 7
#: What stands for the side whose calls these are not, and for the other.
_SIDE, _OTHER = SIDES_OF_EDITS = "{side}", "{other}"


def left_out(sheet: Sheet) -> Iterator[Edit]:
    """Each operation that has an operand of its own shape, as if that were handed on."""
    yield from _layers(sheet)
    for k, node in enumerate(sheet.nodes):
        if not node.operation:
            continue
        for place, given in enumerate(node.given):
            if sheet.shape(given) == sheet.shape(k):
                found = _operation(sheet, k, place)
                if found is not None:
                    kind, name, text, rank = found
                    telling = kind not in _WHERE and not (kind == "term_missing" and not text.startswith(_SIDE))
                    yield Edit(kind, name, text, {k: instead(given)}, rank, at=k, telling=telling)
        if node.operation == "transpose" and len(node.given) == 1 and not sheet.is_parameter(node.given[0]):
            text = f"{sheet.where(k)} is left out: the axes are in another order"
            yield Edit("axes_order", "another order of axes", text, {k: instead(node.given[0])}, 2, at=k)
        yield from _further(sheet, k)


def _layers(sheet: Sheet) -> Iterator[Edit]:
    """A layer as a whole."""
    for call in sheet.graph.trace.calls:
        if call.function or not call.inputs or not call.outputs:
            continue
        one, other = (sheet.writer.nodes.get(some[0].tensor) for some in (call.inputs, call.outputs))
        if one is None or other is None or one == other or sheet.shape(one) != sheet.shape(other):
            continue
        if one not in sheet.formula.above(other) or sheet.nodes[other].operation == "act":
            continue  # that a function of each element is left out is tried as one of its forms
        norm = "norm" in call.layer_type.lower() or sheet.nodes[other].operation in _NORMS
        norm = norm or any(sheet.nodes[k].operation in _NORMS for k in sheet.formula.above(other, 2))
        text = f"layer `{call.layer}` ({call.layer_type}) is left out there: what goes into it is handed on without it"
        kind, name = ("norm_missing", "a normalisation") if norm else ("layer_missing", "a layer")
        yield Edit(kind, name, text, {other: instead(one)}, 0, at=other)


def _operation(sheet: Sheet, k: int, place: int) -> tuple[str, str, str, int] | None:
    """What it is called to leave an operation out, and hand on one of its operands."""
    node, where = sheet.nodes[k], sheet.where(k)
    operation = node.operation
    other = next((one for n, one in enumerate(node.given) if n != place), None)
    if operation in ("add", "sub", "channelwise") and other is not None:
        if sheet.is_number(other):
            return None  # numbers are solved for
        if operation == "channelwise" and node.how["how"] == "mul":
            return "factor_missing", "a factor", f"{sheet.named(other)} does not multiply ({where})", 1
        if sheet.is_parameter(other):
            name = sheet.nodes[other].name
            what = "bias" if "bias" in name or "bias" in sheet.writer.slots(name) else "term"
            return f"{what}_missing", f"a {what}", f"{_SIDE} does not add {name}, {_OTHER} does ({where})", 1
        given = node.given[place]
        if operation != "add":
            mean = operation == "sub" and place == 0 and _is_mean(sheet, other)
            if mean:
                return "norm_form", "another form of the norm", f"the mean is not taken out: {where} is left out", 1
            return "term_missing", "a term", f"{sheet.named(other)} is left out of {where}", 2
        if given in sheet.formula.above(other) or other in sheet.formula.above(given):
            if other in sheet.formula.above(given):
                return "residual_missing", "a residual", f"the residual is missing: {where} is left out", 1
            text = f"only the residual is handed on by {where}: {sheet.named(other)} is left out"
            return "branch_missing", "a branch", text, 1
        if _is_residual(sheet, other, given):
            text = f"only the residual is handed on by {where}: {sheet.named(other)} is left out"
            return "branch_missing", "a branch", text, 1
        if _is_residual(sheet, given, other):
            text = f"the residual is missing: {where} leaves out {sheet.named(other)}"
            return "residual_missing", "a residual", text, 1
        return "term_missing", "a term", f"{sheet.named(other)} is not added ({where})", 2
    if operation in ("mul", "div") and other is not None:
        if sheet.is_number(other):
            number = float(sheet.formula.values[other])
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
        masks = sheet.formula.values[other].dtype.kind == "b" or _is_mask(sheet, other)
        kind, name = ("mask_missing", "a mask") if masks else ("factor_missing", "a factor")
        what = "mask" if masks else "factor"
        return kind, name, f"the {what} of {where} is left out: {sheet.named(other)}", 2
    if operation == "act":
        return None  # another function is none as well
    if operation in _NORMS:
        return "norm_missing", "a normalisation", f"what {where} normalises is not normalised", 1
    if operation in ("masked", "causal", "where"):
        return "mask_missing", "a mask", f"the mask is missing: what {where} hides is not hidden", 1
    if operation == "cast":
        return "precision", "another precision", f"{where}, which rounds to {node.how['dtype']}, is left out", 2
    if operation in ("softmax", "log_softmax", "clamp", "roll", "flip", "sqrt", "square", "abs", "exp", "log"):
        return f"{operation}_missing", operation, f"{where} is left out", 2
    return None


def _is_mean(sheet: Sheet, node: int) -> bool:
    one = sheet.nodes[node]
    return one.operation == "reduced" and one.how["by"] == "mean"


def _is_mask(sheet: Sheet, node: int) -> bool:
    values = sheet.formula.values[node]
    return bool(values.size > 1 and ((values == 0) | (values == 1)).all() and (values == 0).any())


def _is_residual(sheet: Sheet, given: int, other: int) -> bool:
    """Whether one tensor was computed from the other, which is added to it."""
    tensor, start = sheet.tensor(other), sheet.tensor(given)
    if tensor is None or start is None or sheet.nodes[other].name:
        return False
    back = sheet.graph.back(start, lambda one: one == tensor)
    return any(operand.tensor == tensor for call in back for operand in call.inputs)


def _further(sheet: Sheet, k: int) -> Iterator[Edit]:
    """Several operations at once: what lies between a node and one of its own shape further up."""
    node = sheet.nodes[k]
    if node.operation not in ("add", "sub", "mul", "div", "cat", "reshape"):
        return
    above = sheet.formula.above(k, _STEPS)
    for one, steps in sorted(above.items(), key=lambda item: item[1]):
        if steps < 2 or sheet.shape(one) != sheet.shape(k) or sheet.is_parameter(one) or not sheet.is_float(one):
            continue
        between = [n for n in above if one in sheet.formula.above(n, _STEPS) and n != one]
        rotated = any(
            sheet.nodes[n].operation in _ROTATING for b in between for n in sheet.formula.above(b, _STEPS + 3)
        ) or _has_rotating_input(sheet, between)
        norm = any(sheet.nodes[n].operation in ("sqrt", "rsqrt") for n in above)
        if rotated:
            text = f"the rotary embedding of {sheet.named(one)} is missing (up to {sheet.where(k)})"
            yield Edit("rotary_missing", "a rotary embedding", text, {k: instead(one)}, 2, at=k)
        else:
            kind, name = ("norm_missing", "a normalisation") if norm else ("calls_missing", "some calls")
            text = f"what is computed of {sheet.named(one)} up to {sheet.where(k)} is left out"
            text = f"{text}, with a normalisation" if norm else text
            yield Edit(kind, name, text, {k: instead(one)}, 3, at=k, telling=False)


def _has_rotating_input(sheet: Sheet, nodes: list[int]) -> bool:
    """Whether sines or cosines, made elsewhere, go into one of some nodes."""
    for k in nodes:
        for given in sheet.nodes[k].given:
            tensor = sheet.tensor(given)
            call = sheet.graph.producers.get(tensor) if tensor is not None else None
            if call is not None and call.function in _ROTATING:
                return True
    return False
