"""Edits that leave something out of a formula: a term, a factor, a function, a layer."""

from __future__ import annotations

from collections.abc import Iterator

from padiff.compare.diagnose.computing.edit import Edit, FormulaView, instead

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
                    yield Edit(kind, name, text, {k: instead(operand)}, rank, at=k, telling=telling)
        if node.operation == "transpose" and len(node.given) == 1 and not sheet.is_parameter(node.given[0]):
            text = f"{sheet.where(k)} is left out: the axes are in another order"
            yield Edit("axes_order", "another order of axes", text, {k: instead(node.given[0])}, 2, at=k)
        yield from _further(sheet, k)


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
        yield Edit(kind, name, text, {output: instead(source)}, 0, at=output)


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
        masks = sheet.formula.values[other_operand].dtype.kind == "b" or _is_mask(sheet, other_operand)
        kind, name = ("mask_missing", "a mask") if masks else ("factor_missing", "a factor")
        what = "mask" if masks else "factor"
        return kind, name, f"the {what} of {where} is left out: {sheet.named(other_operand)}", 2
    if operation == "act":
        return None  # "no activation" is one of the edits of activations
    if operation in _NORMS:
        return "norm_missing", "a normalisation", f"what {where} normalises is not normalised", 1
    if operation in ("masked", "causal", "where"):
        return "mask_missing", "a mask", f"the mask is missing: what {where} hides is not hidden", 1
    if operation == "cast":
        return "precision", "another precision", f"{where}, which rounds to {node.how['dtype']}, is left out", 2
    if operation in ("softmax", "log_softmax", "clamp", "roll", "flip", "sqrt", "square", "abs", "exp", "log"):
        return f"{operation}_missing", operation, f"{where} is left out", 2
    return None


def _is_mean(sheet: FormulaView, node: int) -> bool:
    item = sheet.nodes[node]
    return item.operation == "reduced" and item.how["by"] == "mean"


def _is_mask(sheet: FormulaView, node: int) -> bool:
    values = sheet.formula.values[node]
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
        norm = any(sheet.nodes[n].operation in ("sqrt", "rsqrt") for n in above)
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
            tensor = sheet.tensor(operand)
            call = sheet.graph.producers.get(tensor) if tensor is not None else None
            if call is not None and call.function in _ROTATING:
                return True
    return False
