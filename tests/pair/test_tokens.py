"""Tokens of two steps in other layouts, found by their ids; expected orders are written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from padiff.pair.tokens import align_tokens, in_token_order
from padiff.records import ROOT, Both, InMemory, Record, Step
from padiff.records.traces import Operand, Trace, TracedCall, TracedTensor

A, B = [11, 12, 13], [21, 22, 23, 24, 25]


def step(*calls: dict[str, np.ndarray], width: int = 2) -> Step:
    """A step of calls of the model; the layer `h` gives each token a row with its id, the call and the place in it."""
    records: list[Record] = []

    def add(layer: str, stage: str, slot: str, call: int, array: np.ndarray) -> None:
        records.append(
            Record(layer, stage, slot, InMemory(array), str(array.dtype), array.shape, call=call, order=len(records))
        )

    for number, inputs in enumerate(calls):
        for slot, array in inputs.items():
            add(ROOT, "input", f"input.{slot}", number, np.array(array))
        ids = np.array(inputs["input_ids"])
        add("h", "forward", "output.0", number, np.stack([ids * 1.0] * width, axis=-1))
    return Step(0, records)


def padded(*texts: list[int], left: bool = False, mask: bool = True) -> dict[str, np.ndarray]:
    length = max(map(len, texts))
    pads = [[0] * (length - len(text)) for text in texts]
    ids = [pad + text if left else text + pad for text, pad in zip(texts, pads)]
    ones = [[0] * len(pad) + [1] * len(text) if left else [1] * len(text) + [0] * len(pad)
            for text, pad in zip(texts, pads)]  # fmt: skip
    return {"input_ids": np.array(ids)} | ({"attention_mask": np.array(ones)} if mask else {})


def packed(*texts: list[int], shift: int = 0, restart: bool = True) -> dict[str, np.ndarray]:
    ids = [token for text in texts for token in text]
    positions = [place for text in texts for place in range(len(text))] if restart else list(range(len(ids)))
    return {"input_ids": np.array([ids]), "position_ids": np.array([positions]) + shift}


def decoded(*texts: list[int], first: int = 2, positions: bool = True) -> list[dict[str, np.ndarray]]:
    calls = []
    for text in texts:
        spans = [(0, first), *((k, k + 1) for k in range(first, len(text)))]
        for begin, end in spans:
            calls.append({"input_ids": np.array([text[begin:end]])})
            if positions:
                calls[-1]["position_ids"] = np.arange(begin, end)[None]
    return calls


LAYOUTS = {
    "padded": [padded(A, B)],
    "padded on the left": [padded(A, B, left=True)],
    "packed": [packed(A, B)],
    "packed, positions go on": [packed(A, B, restart=False)],
    "packed, without positions": [{"input_ids": np.array([A + B])}],
    "one by one": [padded(A), padded(B)],
    "with a cache": decoded(A, B),
    "with a cache, without positions": decoded(B, positions=False),
    "flat": [{"input_ids": np.array(A + B), "position_ids": np.array([0, 1, 2, 0, 1, 2, 3, 4])}],
    "flat, with borders": [{"input_ids": np.array(A + B), "cu_seqlens": np.array([0, 3, 8])}],
}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "padded"])
@pytest.mark.parametrize("swapped", [False, True])
def test_rows_are_found_in_each_layout(name, swapped):
    texts = [B] if name.endswith("cache, without positions") else [A, B]
    steps = Both(step(padded(*texts, [31, 32, 33, 34, 35, 36])), step(*LAYOUTS[name], packed([31, 32, 33, 34, 35, 36])))
    steps = steps.swapped(swapped)
    alignment = align_tokens(steps)
    assert alignment is not None
    tokens = [token for text in texts for token in text] + [31, 32, 33, 34, 35, 36]
    assert alignment.ids.tolist() == tokens
    assert alignment.sequence.tolist() == [k for k, text in enumerate([*texts, [0] * 6]) for _ in text]
    aligned = in_token_order(steps, alignment)
    for side in aligned.steps:
        layers = [record for record in side.records if record.layer == "h"]
        assert [record.shape for record in layers] == [(len(tokens), 2)]
        assert layers[0].value[:, 1].tolist() == tokens
    assert alignment.holes == ()


def traced(each: Step, arrays: list[np.ndarray]) -> Step:
    """Return a step in which the layer `positions` gets an array of whole numbers in each call of the model."""
    tensors = [TracedTensor(InMemory(array), "int64", array.shape) for array in arrays]
    calls = [TracedCall("positions", k, inputs=(Operand("input.0", k),)) for k in range(len(arrays))]
    return replace(each, trace=Trace(tensors, calls))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_mask_that_a_layer_gets_is_no_position_and_shows_a_cache(swapped):
    # OPT makes positions of the mask, which covers the tokens of the cache as well.
    calls = decoded(A, B, positions=False)
    masks = [np.ones((1, end), np.int64) for text in (A, B) for end in (2, *range(3, len(text) + 1))]
    batch = padded(A, B)
    steps = Both(traced(step(batch), [batch["attention_mask"]]), traced(step(*calls), masks)).swapped(swapped)
    alignment = align_tokens(steps)
    assert alignment is not None and alignment.holes == ()
    assert alignment.ids.tolist() == A + B
    assert alignment.sequence.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


def test_kinds_of_tokens_before_the_positions_are_no_positions():
    kinds, places = np.zeros((1, 8), np.int64), np.array([[0, 1, 2, 0, 1, 2, 3, 4]])
    one = step({"input_ids": np.array([A + B])})
    tensors = [TracedTensor(InMemory(array), "int64", array.shape) for array in (kinds, places)]
    calls = [TracedCall(layer, 0, inputs=(Operand("input.0", k),)) for k, layer in enumerate(("kinds", "places"))]
    alignment = align_tokens(Both(step(padded(A, B)), replace(one, trace=Trace(tensors, calls))))
    assert alignment is not None and alignment.ids.tolist() == A + B
    assert alignment.positions.candidate.tolist() == places[0].tolist()


def test_padding_is_counted():
    alignment = align_tokens(Both(step(padded(A, B)), step(packed(A, B))))
    assert alignment is not None and alignment.padding == Both(2, 0) and alignment.surplus == Both(0, 0)


def test_steps_with_one_layout_are_not_aligned():
    assert align_tokens(Both(step(padded(A, B)), step(padded(A, B)))) is None


def test_steps_with_other_tokens_are_not_aligned():
    assert align_tokens(Both(step(padded(A, B)), step(packed([7, 8], [9, 10, 11])))) is None


def test_the_last_token_of_a_sequence_may_be_absent():
    alignment = align_tokens(Both(step(padded(A, B)), step(*decoded(A, B[:-1]))))
    assert alignment is not None and len(alignment) == 7 and alignment.holes == () and alignment.surplus == Both(1, 0)


def test_a_token_in_the_middle_is_a_hole():
    alignment = align_tokens(Both(step(padded(A, B)), step(*decoded(A, [*B[:2], *B[3:]]))))
    assert alignment is not None and alignment.holes == (("reference", 1, 2, 23),)
    shapes = in_token_order(Both(step(padded(A, B)), step(*decoded(A, [*B[:2], *B[3:]]))), alignment).steps.map(
        lambda side: [record.shape for record in side.records if record.stage == "input"]
    )
    assert shapes == Both([(8,)], [(7,)])


def test_padding_without_a_mask_is_a_hole_of_the_other_side():
    alignment = align_tokens(Both(step(packed(A, B)), step(padded(A, B, left=True, mask=False))))
    assert alignment is not None and alignment.holes == (("candidate", 0, 0, 0), ("candidate", 0, 1, 0))


def test_a_row_per_position_serves_all_sequences():
    def with_positions(*calls):
        made = step(*calls)
        length = np.array(calls[0]["input_ids"]).shape[-1]
        array = np.arange(length)[None, :, None] * 1.0
        wpe = Record("wpe", "forward", "output.0", InMemory(array), "float64", array.shape, order=len(made.records))
        return Step(0, [*made.records, wpe])

    steps = Both(with_positions(padded(A, B)), step(packed(A, B)))
    aligned = in_token_order(steps, align_tokens(steps))
    wpe = next(record for record in aligned.steps.reference.records if record.layer == "wpe")
    assert wpe.value[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_logits_of_the_last_tokens_are_compared_at_these():
    made = step(padded(A, B, left=True), width=7)
    last = next(record for record in made.records if record.layer == "h")
    array = last.value[:, -1:]
    narrow = Record("h", "forward", "output.0", InMemory(array), "float64", array.shape, order=last.order)
    steps = Both(
        step(padded(A, B), width=7), Step(0, [narrow if record is last else record for record in made.records])
    )
    aligned = in_token_order(steps, align_tokens(steps))
    rows = aligned.steps.map(lambda side: [r.value[:, 0].tolist() for r in side.records if r.layer == "h"])
    assert rows == Both([[13.0, 25.0]], [[13.0, 25.0]])


def test_a_tensor_without_rows_is_counted():
    made = step(packed(A, B))
    weights = np.zeros((1, 2, 8, 8))
    extra = Record("h", "forward", "output.1", InMemory(weights), "float64", weights.shape, order=len(made.records))
    steps = Both(step(padded(A, B)), Step(0, [*made.records, extra]))
    aligned = in_token_order(steps, align_tokens(steps))
    assert aligned.left_out.candidate == {"without a row for each token": 1} and not aligned.left_out.reference


def test_a_batch_with_other_sequences_is_another_batch():
    assert align_tokens(Both(step(padded(A, B, [31, 32, 33])), step(packed(A, B)))) is None


def test_two_trainings_with_other_tokens_are_not_aligned():
    def learning(made):
        gradient = np.ones((2, 2))
        record = Record("h", "grad", "weight", InMemory(gradient), "float64", (2, 2), order=len(made.records))
        return Step(0, [*made.records, record])

    cut = step(packed(A, B[:-1]))
    assert align_tokens(Both(step(padded(A, B)), cut)) is not None
    assert align_tokens(Both(learning(step(padded(A, B))), cut)) is not None
    assert align_tokens(Both(learning(step(padded(A, B))), learning(cut))) is None
    assert align_tokens(Both(learning(step(padded(A, B))), learning(step(packed(A, B))))) is not None
