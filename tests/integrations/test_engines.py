"""One model called by a trainer and by a generator: padded, packed, and with a cache, compared token by token."""

from __future__ import annotations

import functools
import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

import padiff

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FOLDER = str(Path(__file__).parents[2] / "benchmarks" / "engines")
sys.path.insert(0, FOLDER)
ways = importlib.import_module("ways")
FAULTS = runpy.run_path(f"{FOLDER}/seen.py")["FAULTS"]
sys.path.remove(FOLDER)


def recorded(folder, family: str, way: str, fault=None, dtype=None, **recording):
    model = ways.model_of(family, dtype or torch.float32, **(fault.config if fault else {}))
    if fault and fault.change:
        fault.change(model)
    ways.record(model, str(folder), way, fault.options if fault else None, **recording)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("qwen2", "bfloat16"), ("gpt2", "float32")]
)
def test_ways_to_call_a_model_match(tmp_path, family, dtype):
    runs = [recorded(tmp_path / way, family, way, dtype=getattr(torch, dtype)) for way in ways.WAYS]
    # Each way is the reference of one and the candidate of another.
    for reference, candidate in zip(runs, [*runs[1:], runs[0]]):
        report = padiff.compare_runs(reference, candidate)
        assert report.passed, report.text()
        assert report.tokens[0] == "Compared token by token: 26 tokens in 4 sequences"
        layers = {diff.pair.anchor.layer for diff in report if diff.pair.stage == "forward" and diff.compared}
        assert len(layers) > 10 and "lm_head" in layers


def test_the_distance_of_log_probabilities_is_that_of_torch(tmp_path):
    """Computed by torch from the logits of both calls, sequence by sequence."""
    texts = ways.sequences()
    model = ways.model_of("llama")
    scores = []
    for temperature in (1.0, 0.9):
        with torch.no_grad():
            logits = [model(input_ids=text[None]).logits[0].double() / temperature for text in texts]
        scores.append([each.log_softmax(-1)[:-1].gather(1, text[1:, None])[:, 0] for each, text in zip(logits, texts)])
    apart = [(a - b).abs() for a, b in zip(*scores)]
    largest = max(float(each.max()) for each in apart)
    sequence = next(k for k, each in enumerate(apart) if float(each.max()) == largest)
    token = int(apart[sequence].argmax()) + 1
    mean = float(torch.cat(apart).mean())
    reference = recorded(tmp_path / "a", "llama", "padded")
    fault = ways.Fault("packed", ways.Expected(""), change=ways.scaled_logits(0.9))
    report = padiff.compare_runs(reference, recorded(tmp_path / "b", "llama", "packed", fault))
    assert report.tokens[-1] == (
        f"Largest difference of a token's log probability: {largest:.2g} nats, at step 0, sequence {sequence}, "
        f"token {token}; mean {mean:.2g}"
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Runs of the model without a fault, by the way that it is called."""
    folder = tmp_path_factory.mktemp("references")
    return functools.cache(lambda way: recorded(folder / way, "llama", way))


@pytest.mark.parametrize("name", [*FAULTS])
def test_faults_are_placed(tmp_path, references, name):
    fault = FAULTS[name]
    report = padiff.compare_runs(references(fault.reference), recorded(tmp_path / "b", "llama", fault.way, fault))
    assert not report.passed
    text = " ".join(report.text(200).split())
    if name not in ("temperature", "rope base"):  # placed in other words: after `lm_head`, and in a buffer
        assert re.search(fault.expected.where, text), text
    assert re.search(fault.expected.words, text), text


def test_sketches_are_not_compared_and_the_report_says_so(tmp_path):
    def two_steps(way: str) -> str:
        model = ways.model_of("llama")
        with padiff.record(model, tmp_path / way, detail="sketch") as rec:
            for _ in range(2):
                ways.call(model, way)
                rec.end_step()
        return str(tmp_path / way)

    report = padiff.compare_runs(two_steps("padded"), two_steps("decoded"))
    sketched = 'kept as sketches, which have no rows: record with detail="full"'
    assert f"Not compared by tokens: the ids of the tokens of step 1 {sketched}" in report.tokens
    assert report.coverage.share < 0.9


def test_a_trainer_with_gradients_against_generate(tmp_path):
    model = ways.model_of("qwen2")
    ids, mask, _ = ways._left(ways.sequences())
    with padiff.record(model, tmp_path / "engine") as rec, torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        rec.end_step()
    texts = [row[row != 0] for row in out]
    batch = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    model.train()
    with padiff.record(model, tmp_path / "trainer", optimizer=torch.optim.SGD(model.parameters())) as rec:
        model(input_ids=batch, attention_mask=(batch != 0).long()).logits.log_softmax(-1).mean().backward()
        rec.end_step()
    report = padiff.compare_runs(tmp_path / "trainer", tmp_path / "engine")
    assert report.passed, report.text()
    # The token that was sampled last is not given to the model again.
    assert "Not compared: 4 tokens that only the reference has" in report.tokens
    assert any("nats" in line for line in report.tokens)


def test_the_same_sequences_in_another_order_are_another_batch():
    def run(order):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ids = torch.randint(0, 20, (6, 5), generator=torch.Generator().manual_seed(1))
        with padiff.record(model, optimizer=optimizer) as rec:
            for _ in range(2):
                torch.nn.functional.cross_entropy(model(ids[order]).flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                rec.try_dump()
        return rec.run

    first = padiff.compare_runs(run([0, 1, 2, 3, 4, 5]), run([3, 1, 2, 0, 4, 5])).first_diff
    assert first.diff.pair.stage == "input"
