"""Alignment of a step's tokens: rows of tensors in one layout found in another layout by the identity of the tokens.

A padded batch, sequences packed in one row, and calls with a cache that get a token at a time hold the same tokens in
other places. Steps are rewritten so that each tensor with a row per token has these rows in one order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from padiff.errors import SketchOnlyError
from padiff.pair.joined_calls import backwards_agree, records_by_call
from padiff.records import LOOP, PARAMETER_STAGES, ROOT, SIDES, Both, Record, Step
from padiff.records.sources import InMemory, TensorSource
from padiff.records.step_schema import fact_of
from padiff.records.traces import Trace

# Inputs of whole numbers that are not the tokens themselves.
_NO_TOKENS = ("mask", "position", "token_type", "segment", "label", "seq_len", "lengths", "slot_mapping")
# Least share of the smaller side's tokens that the other side has; below it the batches are other batches. Chosen.
_SHARED = 0.5
# A run of tokens in the middle of another sequence is a sequence of its own from this length on.
_SHORTEST = 2

#: Call of the model, row, and place in the row of each token: an array of shape (tokens, 3).
Places: TypeAlias = np.ndarray


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Tokens of one call of the model.

    Attributes:
        ids: ids of the tokens, of shape (rows, time).
        is_token: False at padding, of the same shape.
        positions: position that each token is computed at, of the same shape; `None` if not recorded.
        is_continued: True if a mask that is longer than the call shows a cache.
    """

    ids: np.ndarray
    is_token: np.ndarray
    positions: np.ndarray | None
    is_continued: bool


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one side, each without padding.

    Attributes:
        ids: ids of each sequence's tokens.
        places: places of each sequence's tokens.
    """

    ids: list[np.ndarray]
    places: list[Places]


@dataclass(frozen=True, slots=True)
class TokenAlignment:
    """The tokens that both sides have, in the order of the reference's sequences.

    Attributes:
        sequence, index: number of the sequence, and of the token in it, without padding.
        ids: id of each token.
        places: place of each token on either side.
        positions: position that each token is computed at, -1 if not known.
        padding: number of rows of padding that were left out.
        surplus: number of tokens that only this side has.
        holes: tokens that one side lacks before a token that both have: side, sequence, index on the side that has
            it, id.
        calls: the calls of either side.
        has_other_sequences: True if a side has a whole sequence that the other side lacks: then the batches differ.
    """

    sequence: np.ndarray
    index: np.ndarray
    ids: np.ndarray
    places: Both[Places]
    positions: Both[np.ndarray]
    padding: Both[int]
    surplus: Both[int]
    holes: tuple[tuple[str, int, int, int], ...]
    calls: Both[list[ModelCall]]
    has_other_sequences: bool

    def __len__(self) -> int:
        return len(self.ids)


class _Match(NamedTuple):
    """Tokens that two sequences share: the number of either sequence, and the places of the tokens in it."""

    sequences: tuple[int, int]
    tokens: tuple[np.ndarray, np.ndarray]


class TokenRows(TensorSource):
    """A tensor with a row for each aligned token, gathered from the tensors of the model's calls.

    Args:
        sources: the source of each call.
        rows: call, and row in the call's tensor of shape (rows, ...), of each token.
        lead: number of leading axes of each call's tensor that count rows.
    """

    __slots__ = ("_lead", "_rows", "_sources")

    def __init__(self, sources: Mapping[int, TensorSource], rows: np.ndarray, lead: Mapping[int, int]) -> None:
        self._sources, self._rows, self._lead = sources, rows, lead

    def read(self) -> np.ndarray:
        result: np.ndarray | None = None
        for call in np.unique(self._rows[:, 0]):
            array = self._sources[int(call)].read()
            flat = array.reshape(-1, *array.shape[self._lead[int(call)] :])
            if result is None:
                result = np.empty((len(self._rows), *flat.shape[1:]), flat.dtype)
            chosen = self._rows[:, 0] == call
            result[chosen] = flat[self._rows[chosen, 1]]
        assert result is not None
        return result


def align_tokens(steps: Both[Step]) -> TokenAlignment | None:
    """Return the tokens that two steps share, if these lie in other layouts; `None` if the layouts are alike, or the
    steps have no tokens in common.
    """
    calls = steps.map(model_calls)
    if not calls.reference or not calls.candidate or _are_alike(calls, steps):
        return None
    best: TokenAlignment | None = None
    for joins in (Both(False, False), Both(False, True), Both(True, False), Both(True, True)):
        # The positions and the mask show most caches. Where neither was recorded, the tokens themselves do.
        if any(join and len(side) < 2 for join, side in zip(joins, calls)):
            continue
        sequences = calls.zip(joins).map(lambda side: sequences_of(*side))
        alignment = _matched(calls, sequences)
        if best is None or _score(alignment) > _score(best):
            best = alignment
    assert best is not None
    fewest = min(sum(int(call.is_token.sum()) for call in side) for side in calls)
    if not len(best) or len(best) < _SHARED * fewest or best.has_other_sequences:
        return None
    # Two trainings have to learn from the same tokens: others are a fault of their batches.
    learn = all(fact_of(step.records, _learns) for step in steps)
    return None if learn and any(best.surplus) else best


def _learns(records: Sequence[Record]) -> bool:
    return any(record.stage in ("backward", "grad", "update") for record in records)


def _score(alignment: TokenAlignment) -> tuple[int, int]:
    return len(alignment) - len(alignment.holes), -len(set(alignment.sequence.tolist()))


def _are_alike(calls: Both[list[ModelCall]], steps: Both[Step]) -> bool:
    """Return True if both sides call the model with the same rows of tokens, in any order: then the layouts are alike,
    and another order is one of the batches.

    Calls on parts of a batch are alike one call of all of it (`padiff.pair.joined_calls`).
    """
    if len(calls.reference) != len(calls.candidate):
        return _are_one_batch(calls) and backwards_agree(steps)
    if any(a.ids.shape != b.ids.shape for a, b in zip(*calls)):
        return False
    rows = calls.map(lambda side: sorted(row.tobytes() for call in side for row in call.ids.astype(np.int64)))
    return rows.reference == rows.candidate


def _are_one_batch(calls: Both[list[ModelCall]]) -> bool:
    """Return True if one side's only call has the rows of the other side's calls, one below the other."""
    if 1 not in map(len, calls):
        return False
    shapes = {call.ids.shape[1:] for side in calls for call in side}
    rows = [np.concatenate([call.ids for call in side]) for side in calls] if len(shapes) == 1 else []
    return bool(rows) and np.array_equal(rows[0], rows[1])


# -- the tokens of one side ---------------------------------------------------------------------------------


def model_calls(step: Step) -> list[ModelCall]:
    """Return the tokens of each call of the model in a step; empty if the model gets no tokens, or if these were not
    recorded in full.
    """
    inputs: dict[int, dict[str, Record]] = defaultdict(dict)
    for place in fact_of(step.records, _input_places):
        record = step.records[place]
        inputs[record.call][record.slot] = record
    result = []
    for number in sorted(inputs):
        slot = token_slot(inputs[number].values())
        ids = None if slot is None else _values(inputs[number][slot])
        if ids is None:
            return []
        others = {name: record for name, record in inputs[number].items() if name != slot}
        result.append(_model_call(ids.reshape(-1, ids.shape[-1]), others.values(), _traced_numbers(step, number)))
    return result


def _input_places(records: Sequence[Record]) -> list[int]:
    """Return the places of the model's inputs; empty if none of these can hold tokens."""
    places = [k for k, record in enumerate(records) if record.stage == "input" and record.layer == ROOT]
    return places if token_slot(records[place] for place in places) is not None else []


def token_slot(records: Iterable[Record]) -> str | None:
    """Return the slot of the model's input that holds the ids of tokens; `None` without such an input."""
    whole = [
        record
        for record in records
        if record.dtype in ("int64", "int32") and len(record.shape) in (1, 2) and 0 not in record.shape
        and not any(word in record.slot for word in _NO_TOKENS)
    ]  # fmt: skip
    return next((record.slot for record in whole if "ids" in record.slot), whole[0].slot if whole else None)


def _values(record: Record) -> np.ndarray | None:
    try:
        return np.asarray(record.value)
    except SketchOnlyError:
        return None


def _traced_numbers(step: Step, call: int) -> list[np.ndarray]:
    """Return the inputs of whole numbers that layers without sublayers got in the model's call."""
    arrays = []
    for traced in step.trace.calls:
        if traced.function or traced.call != call:
            continue
        for operand in traced.inputs:
            tensor = step.trace.tensors[operand.tensor]
            if tensor.dtype in ("int64", "int32") and tensor.source is not None and not tensor.source.sketched:
                arrays.append(np.asarray(tensor.source.read()))
    return arrays


def _model_call(ids: np.ndarray, others: Iterable[Record], traced: list[np.ndarray]) -> ModelCall:
    rows, time = ids.shape
    is_token = np.ones(ids.shape, bool)
    positions: np.ndarray | None = None
    borders: np.ndarray | None = None
    is_continued = False
    for record in others:
        if "mask" in record.slot and len(record.shape) == 2 and record.shape[0] == rows and record.shape[1] >= time:
            mask = _values(record)
            if mask is not None:
                is_token, is_continued = mask[:, -time:].astype(bool), record.shape[1] > time
        elif record.dtype not in ("int64", "int32"):
            continue
        elif "position" in record.slot and record.shape in ((rows, time), (1, time), (time,)):
            values = _values(record)
            # A cache's places (one axis) are positions only where no padding comes before them.
            if values is not None and (positions is None or len(record.shape) == 2):
                positions = np.broadcast_to(values, ids.shape)
        elif len(record.shape) == 1 and record.shape[0] >= 2:
            values = _values(record)
            if values is not None and values[0] == 0 and values[-1] == ids.size and (np.diff(values) > 0).all():
                borders = values
    if positions is None:
        fits = (a for a in traced if a.shape in ((rows, time), (1, time), (time,)))
        fits = (a for a in fits if not np.array_equal(a, ids) and not _is_mask(a))
        positions = next((np.broadcast_to(a, ids.shape) for a in fits), None)
        wider = (a for a in traced if a.ndim == 2 and a.shape[0] == rows and a.shape[1] > time)
        is_continued = is_continued or any(a.min() >= 0 and a.max() <= 1 for a in wider)
    if borders is not None and rows == 1:
        positions = np.concatenate([np.arange(n) for n in np.diff(borders)])[None]
    return ModelCall(ids, is_token, positions, is_continued)


def _is_mask(array: np.ndarray) -> bool:
    """Return True for a mask, or kinds of tokens: ones and zeros, some of which follow their like."""
    return bool(
        array.shape[-1] > 1
        and array.min() >= 0
        and array.max() <= 1
        and (np.diff(array.reshape(-1, array.shape[-1])) == 0).any()
    )


def sequences_of(calls: Sequence[ModelCall], joined: bool) -> Sequences:
    """Return the sequences of a side's calls.

    A sequence ends where positions restart. It goes on in a later call where the position is the next one, or where a
    mask covers earlier tokens.

    Args:
        joined: True to join the rows of all calls with as many rows, whatever positions and masks show.
    """
    ids: list[list[int]] = []
    places: list[list[tuple[int, int, int]]] = []
    ends: list[int | None] = []  # position of the last token of each sequence
    rows: dict[int, int] = {}  # last sequence of each row of the call before
    before = 0
    for number, call in enumerate(calls):
        latest: dict[int, int] = {}
        for row in range(len(call.ids)):
            position_before: int | None = None
            current: int | None = None
            for time in np.flatnonzero(call.is_token[row]):
                position = None if call.positions is None else int(call.positions[row, time])
                if current is None or (position is not None and position != (position_before or 0) + 1):
                    same_row = rows.get(row) if before == len(call.ids) else None
                    first = current is None
                    current = _continued(ends, same_row, position, first and (joined or call.is_continued))
                    if current is None:
                        current = len(ids)
                        ids.append([])
                        places.append([])
                        ends.append(None)
                ids[current].append(int(call.ids[row, time]))
                places[current].append((number, row, int(time)))
                ends[current] = position_before = position
                latest[row] = current
        rows, before = rows | latest if before == len(call.ids) else latest, len(call.ids)
    return Sequences(
        [np.array(each, np.int64) for each in ids], [np.array(each, np.int64).reshape(-1, 3) for each in places]
    )


def _continued(ends: list[int | None], same_row: int | None, position: int | None, anyway: bool) -> int | None:
    """Return the earlier sequence that goes on at a token; `None` if a sequence begins."""
    if position == 0:
        return None
    if position is not None:
        open_ends = [k for k, end in enumerate(ends) if end is not None and end + 1 == position]
        if same_row in open_ends:
            return same_row
        if open_ends and not anyway:
            return open_ends[-1] if len(open_ends) == 1 else None
    return same_row if anyway else None


# -- the tokens of both sides -------------------------------------------------------------------------------


def _matched(calls: Both[list[ModelCall]], sequences: Both[Sequences]) -> TokenAlignment:
    """Return the tokens that both sides' sequences share: equal ones first, then parts of one another."""
    used = sequences.map(lambda side: [np.zeros(len(each), bool) for each in side.ids])
    matches: list[_Match] = []

    def match(a: int, b: int, of_a: np.ndarray, of_b: np.ndarray) -> None:
        used.reference[a][of_a] = True
        used.candidate[b][of_b] = True
        matches.append(_Match((a, b), (of_a, of_b)))

    waiting: dict[bytes, list[int]] = defaultdict(list)
    for b, ids in enumerate(sequences.candidate.ids):
        waiting[ids.tobytes()].append(b)
    for a, ids in enumerate(sequences.reference.ids):
        partners = waiting[ids.tobytes()]
        if partners:
            match(a, partners.pop(0), np.arange(len(ids)), np.arange(len(ids)))
    for search in (_inside, _shared_ends):
        candidates = range(len(sequences.candidate.ids))
        pairs = [
            (a, b) for a, own in enumerate(used.reference) if not own.any() or search is _inside for b in candidates
        ]
        # Long sequences first, as short ones occur in many places.
        lengths = sequences.map(lambda side: [len(each) for each in side.ids])
        pairs.sort(key=lambda pair: -min(lengths.reference[pair[0]], lengths.candidate[pair[1]]))
        for a, b in pairs:
            if not used.reference[a].all() and not used.candidate[b].all():
                shared = search(sequences.reference.ids[a], sequences.candidate.ids[b],
                                used.reference[a], used.candidate[b])  # fmt: skip
                if shared is not None:
                    match(a, b, *shared)
    return _alignment(calls, sequences, matches, used)


def _inside(
    a: np.ndarray, b: np.ndarray, used_a: np.ndarray, used_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the places at which the whole shorter sequence lies in the longer one; `None` if it does not."""
    if len(a) > len(b):
        swapped = _inside(b, a, used_b, used_a)
        return None if swapped is None else (swapped[1], swapped[0])
    if used_a.any():
        return None
    last = len(b) - len(a)
    starts = np.flatnonzero((b[: last + 1] == a[0]) & ~used_b[: last + 1])
    for start in starts:
        if len(a) < _SHORTEST and start:
            continue
        span = np.arange(start, start + len(a))
        if not used_b[span].any() and np.array_equal(a, b[span]):
            return np.arange(len(a)), span
    return None


def _shared_ends(
    a: np.ndarray, b: np.ndarray, used_a: np.ndarray, used_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the places of the tokens at the beginning and at the end that two sequences share."""
    if used_a.any() or used_b.any():
        return None
    short = min(len(a), len(b))
    head = int(np.argmin(np.append(a[:short] == b[:short], False)))
    tail = int(np.argmin(np.append(a[::-1][: short - head] == b[::-1][: short - head], False)))
    if head + tail < max(_SHORTEST, _SHARED * short):
        return None
    return np.r_[0:head, len(a) - tail : len(a)], np.r_[0:head, len(b) - tail : len(b)]


def _alignment(
    calls: Both[list[ModelCall]],
    sequences: Both[Sequences],
    matches: list[_Match],
    used: Both[list[np.ndarray]],
) -> TokenAlignment:
    # The side with more sequences names them: the other one packs several into one.
    namer = int(len({match.sequences[1] for match in matches}) > len({match.sequences[0] for match in matches}))
    names = {each: name for name, each in enumerate(sorted({match.sequences[namer] for match in matches}))}
    tokens = sorted(
        (names[match.sequences[namer]], int(t), *match.sequences, int(s), int(c))
        for match in matches
        for t, s, c in zip(match.tokens[namer], *match.tokens)
    )
    table = np.array(tokens, np.int64).reshape(-1, 6)
    places = Both(
        *(
            np.array([side.places[s][t] for s, t in zip(table[:, 2 + k], table[:, 4 + k])], np.int64).reshape(-1, 3)
            for k, side in enumerate(sequences)
        )
    )
    ids = np.array([sequences.reference.ids[a][t] for a, t in zip(table[:, 2], table[:, 4])], np.int64)
    return TokenAlignment(
        table[:, 0],
        table[:, 1],
        ids,
        places,
        calls.zip(places).map(lambda side: _positions(*side)),
        calls.map(lambda side: sum(int((~call.is_token).sum()) for call in side)),
        used.map(lambda side: sum(int((~each).sum()) for each in side)),
        tuple(_holes(sequences, matches, used, lambda match: names[match.sequences[namer]])),
        calls,
        any(_is_other(*each) for side in sequences.zip(used) for each in zip(side[0].ids, side[1])),
    )


def _is_other(ids: np.ndarray, used: np.ndarray) -> bool:
    """Return True if no token of a sequence is shared, and the sequence is no padding of one id."""
    return not used.any() and len(set(ids.tolist())) > 1


def _positions(calls: Sequence[ModelCall], places: Places) -> np.ndarray:
    result = np.full(len(places), -1, np.int64)
    for k, (call, row, time) in enumerate(places):
        positions = calls[call].positions
        if positions is not None:
            result[k] = positions[row, time]
    return result


def _holes(
    sequences: Both[Sequences],
    matches: list[_Match],
    used: Both[list[np.ndarray]],
    name_of: Callable[[_Match], int],
) -> Iterable[tuple[str, int, int, int]]:
    """Yield the tokens of one side that the other side lacks before a token that both have."""
    for k, (side, own, flags_of) in enumerate(zip(SIDES, sequences, used)):
        names = {match.sequences[k]: name_of(match) for match in matches}
        for number, flags in enumerate(flags_of):
            together = np.flatnonzero(flags)
            for t in np.flatnonzero(~flags[: together[-1]]) if len(together) else ():
                yield side, names[number], int(t), int(own.ids[number][t])
        yield from _padding_as_tokens(side, own, flags_of, names)


def _padding_as_tokens(
    side: str, own: Sequences, used: list[np.ndarray], names: Mapping[int, int]
) -> Iterable[tuple[str, int, int, int]]:
    """Yield tokens of one id before a row's first sequence, which the other side lacks: padding without a mask, whose
    positions restart.
    """
    rows: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = defaultdict(list)
    for number, (ids, places) in enumerate(zip(own.ids, own.places)):
        for (call, row, time), token, shared in zip(places.tolist(), ids.tolist(), used[number].tolist()):
            rows[call, row].append((time, number, token, shared))
    for tokens in rows.values():
        tokens.sort()
        first = next((k for k, token in enumerate(tokens) if token[3]), 0)
        before = [token for token in tokens[:first] if not used[token[1]].any()]
        if before and len({token for *_, token, _ in before}) == 1:
            yield from ((side, names[tokens[first][1]], k, token) for k, (*_, token, _) in enumerate(before))


# -- steps in the order of the tokens -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenSteps:
    """Two steps whose tensors have a row for each token, in one order.

    Attributes:
        steps: the rewritten steps.
        alignment: the tokens.
        known: the tokens of which both sides have a row, by the width of tensors that have only some of them.
        left_out: number of tensors of each side that cannot be brought into this order, by the reason in words.
    """

    steps: Both[Step]
    alignment: TokenAlignment
    known: Mapping[tuple[int, ...], np.ndarray]
    left_out: Both[Counter[str]]


SKETCHED = 'kept as sketches, which have no rows: record with detail="full"'
NO_ROWS = "without a row for each token"


def in_token_order(steps: Both[Step], alignment: TokenAlignment) -> TokenSteps:
    """Return two steps with the rows of their tensors in the order of the tokens; padding is left out."""
    sides = [_Side(*side, alignment) for side in zip(steps, SIDES, alignment.calls, alignment.places)]
    # A call may compute the logits of its last tokens only: then the other side's are compared at those tokens.
    known: dict[tuple[int, ...], np.ndarray] = {}
    for side in sides:
        for width, mask in side.known.items():
            known[width] = known.get(width, np.ones(len(alignment), bool)) & mask
    rewritten, left_out = (side.rewritten(known) for side in sides), (side.left_out for side in sides)
    return TokenSteps(Both(*rewritten), alignment, known, Both(*left_out))


class _Side:
    """One side's step, with the rows of its tensors."""

    def __init__(
        self,
        step: Step,
        side: str,
        calls: list[ModelCall],
        places: Places,
        alignment: TokenAlignment,
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self._step, self._side, self._alignment = step, side, alignment
        self._calls, self._places = calls, places
        #: The tokens whose rows are there, by the width of tensors that have only some of them.
        self.known: dict[tuple[int, ...], np.ndarray] = {}
        self._kept: list[Callable[[Mapping[tuple[int, ...], np.ndarray]], Record]] = []
        inside: list[Record] = []
        begins = np.array(
            sorted(min(r.order for r in step.records if r.stage == "input" and r.layer == ROOT and r.call == call)
                   for call in {r.call for r in step.records if r.stage == "input" and r.layer == ROOT})
        )  # fmt: skip
        slot = token_slot(r for r in step.records if r.stage == "input" and r.layer == ROOT)
        for record in sorted(step.records, key=lambda record: record.order):
            if record.stage in PARAMETER_STAGES or record.layer == LOOP:
                self._kept.append(partial(_unchanged, record))
            elif record.stage == "input":
                if record.layer == ROOT and record.slot == slot and not record.call:
                    self._kept.append(partial(self._tokens, record))
            else:
                inside.append(record)
        groups, _ = records_by_call(inside, begins, ("forward",))
        for (_, _, _, nth), records in groups.items():
            gathered = self._gathered(records)
            if isinstance(gathered, str):
                self.left_out[gathered] += 1
            else:
                self._kept.append(partial(self._rewritten, records, nth, *gathered))

    def rewritten(self, known: Mapping[tuple[int, ...], np.ndarray]) -> Step:
        records = [make(known) for make in self._kept]
        records = [record for record in records if 0 not in record.shape[:1] or record.stage in PARAMETER_STAGES]
        calls = [replace(call, inputs=(), outputs=(), choice=None) for call in self._step.trace.calls
                 if not call.function]  # fmt: skip
        return replace(
            self._step, records=records, trace=Trace((), calls, False), micro_batches=1, floors=None, evaluations=()
        )

    def _tokens(self, record: Record, _: Mapping[tuple[int, ...], np.ndarray]) -> Record:
        """Return the ids of the tokens; a token that the other side lacks makes them longer."""
        holes = [each for side, *_, each in self._alignment.holes if side == self._side]
        ids = np.concatenate([self._alignment.ids, np.array(holes, np.int64)])
        return replace(record, source=InMemory(ids), shape=ids.shape, dtype="int64")

    def _gathered(self, records: Mapping[int, Record]) -> tuple[np.ndarray, dict[int, int]] | str:
        """Return the call and the row of each token in the records, -1 where there is none; or why there are none."""
        rows = np.full((len(self._places), 2), -1, np.int64)
        rows[:, 0] = self._places[:, 0]
        lead: dict[int, int] = {}
        widths = set()
        for call, record in records.items():
            if record.source.sketched:
                return SKETCHED
            fit = _rows_of(record.shape, self._calls[call].ids.shape)
            if fit is None or record.part is not None:
                return NO_ROWS
            lead[call], table = fit
            widths.add(record.shape[lead[call] :])
            here = self._places[:, 0] == call
            rows[here, 1] = table[self._places[here, 1], self._places[here, 2]]
        if len(widths) > 1:
            return NO_ROWS
        present = rows[:, 1] >= 0
        if not present.all():
            width = widths.pop()
            self.known[width] = self.known.get(width, np.ones(len(rows), bool)) & present
        return rows, lead

    def _rewritten(
        self,
        records: Mapping[int, Record],
        nth: int,
        rows: np.ndarray,
        lead: Mapping[int, int],
        known: Mapping[tuple[int, ...], np.ndarray],
    ) -> Record:
        call, first = min(records.items(), key=lambda item: item[1].order)
        width = first.shape[lead[call] :]
        chosen = known.get(width)
        rows = rows if chosen is None else rows[chosen]
        source = TokenRows({k: record.source for k, record in records.items()}, rows, lead)
        return replace(first, call=nth, shape=(len(rows), *width), source=source)


def _unchanged(record: Record, _: Mapping[tuple[int, ...], np.ndarray]) -> Record:
    return record


def _rows_of(shape: tuple[int, ...], tokens: tuple[int, int]) -> tuple[int, np.ndarray] | None:
    """Return how many leading axes count a tensor's rows, and the row of each token, -1 where it has none; `None` if
    the tensor has no row for each token.
    """
    rows, time = tokens
    numbers = np.arange(rows * time).reshape(tokens)
    if len(shape) >= 3 and shape[1] == time and shape[0] in (1, rows):
        # One row for all sequences: what depends on the position alone.
        return 2, numbers if shape[0] == rows else np.broadcast_to(numbers[:1], tokens)
    if shape and shape[0] == rows * time:
        return 1, numbers
    if len(shape) == 2 and shape == tokens:
        return 2, numbers
    if len(shape) == 3 and shape[0] == rows and shape[1] == 1:
        table = np.full(tokens, -1)
        table[:, -1] = np.arange(rows)
        return 2, table
    return None
