"""What is found of the pairs' maps, from live models: weights carried over make the outputs equal, no pair is wrong."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from kit.frameworks import kit_of

from padiff.errors import UsageError
from padiff.weights.assign import carry_over

from . import PAIRS
from .copying import layer

ROOTS = ("", "(root)")
#: Names, or the numbers in them, mislead on both sides: no one can know without running them.
MISLEADING = {"attention_scrambled", "letters_mislead", "unet_of_one_width"}


def of(*evidence, without=frozenset()):
    found = [pair for pair in PAIRS if pair.evidence in evidence and pair.name not in without]
    return pytest.mark.parametrize("pair", found, ids=lambda pair: pair.name)


def by_turns(first):
    """Each pair that its definition tells, one way."""
    found = [(pair, bool((k + first) % 2)) for k, pair in enumerate(p for p in PAIRS if p.evidence == "definition")]
    return pytest.mark.parametrize(("pair", "back"), found, ids=lambda one: getattr(one, "name", None))


both_ways = pytest.mark.parametrize("back", [False, True], ids=["there", "back"])


class Case:
    """Two fresh models, the base first, and the truth between them."""

    def __init__(self, pair, back):
        turn = (lambda sides: tuple(reversed(sides))) if back else tuple
        self.models = turn([model.eval() or model for model in pair.build()])
        self.inputs = turn(pair.inputs())
        self.truth = {turn(entry) for entry in pair.layers}
        extra = turn(pair.extra)
        self.left_out = [(path, None) for path in extra[0]] + [(None, path) for path in extra[1]]

    def carried(self, inputs=False):
        return carry_over(*self.models, self.left_out or None, self.inputs if inputs else None)

    def distance(self):
        base, raw = (kit_of(m).run(m, args).astype("float64") for m, args in zip(self.models, self.inputs))
        return np.linalg.norm(base - raw) / np.linalg.norm(base)

    def layers(self, paths):
        """Two paths as the layers that they name: a shared layer has several paths."""
        return tuple(id(at(model, path)) for model, path in zip(self.models, paths))

    def found(self, alignment):
        return {(a.layer, b.layer) for p in alignment.parameters for a in p.reference for b in p.candidate}

    def wrong(self, alignment):
        true = {self.layers(entry) for entry in self.truth}
        return sorted(paths for paths in self.found(alignment) if self.layers(paths) not in true)

    def missing(self, alignment):
        found = {self.layers(paths) for paths in self.found(alignment)}
        return {paths for paths in self.truth if self.layers(paths) not in found}


def at(model, path):
    return model if path in ROOTS else layer(model, path)


@cache
def transferred(pair, back, inputs):
    case = Case(pair, back)
    return case, case.carried(inputs).alignment, case.distance()


@by_turns(0)
def test_live_models_alone_are_enough_to_carry_weights_over(pair, back):
    case, alignment, distance = transferred(pair, back, False)
    assert distance < 1e-4
    assert not case.wrong(alignment)
    missing = case.missing(alignment)  # only what a call ties
    assert not missing or ("lm_head" in str(missing) and len(missing) == 1)


@both_ways
@of("execution")
def test_inputs_tell_what_the_definition_does_not(pair, back):
    case, alignment, distance = transferred(pair, back, True)
    assert distance < 1e-4
    assert not case.wrong(alignment)
    assert not case.missing(alignment)


@by_turns(1)
def test_inputs_spoil_nothing(pair, back):
    case, alignment, distance = transferred(pair, back, True)
    assert distance < 1e-4
    assert not case.wrong(alignment)


@both_ways
@of("execution", without=MISLEADING)
def test_a_wrong_guess_is_not_reported_as_sure(pair, back):
    case, alignment, _ = transferred(pair, back, False)
    wrong = set(case.wrong(alignment))
    assert wrong
    sure = [p for p in alignment.pairs if (p.reference.path, p.candidate.path) in wrong and p.confidence >= 0.8]
    assert not sure
    assert not alignment.sure


@both_ways
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if any(pair.extra)], ids=lambda pair: pair.name)
def test_what_has_no_partner_is_refused_by_name(pair, back):
    case = Case(pair, back)
    before = values(case.models[1])
    extra = [path for sides in case.left_out for path in sides if path is not None]
    with pytest.raises(UsageError) as error:
        carry_over(*case.models)
    assert all(path in str(error.value).partition("model (")[0] for path in extra)
    assert all(np.array_equal(a, b) for a, b in zip(before, values(case.models[1])))


def values(model):
    kit = kit_of(model)
    return [kit.numpy(t) for _, t in (*model.named_parameters(), *model.named_buffers())]
