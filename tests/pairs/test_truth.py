"""The pairs' truth, proven without padiff: weights carried over by hand along the map make the outputs equal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kit.frameworks import kit_of

from . import DIFFERENT, PAIRS, ROOT
from .copying import MismatchError, layer, put, tensors

EVERY = (*PAIRS, *DIFFERENT)


def by_name(pairs):
    return pytest.mark.parametrize("pair", pairs, ids=lambda pair: pair.name)


def outputs(pair, models):
    made = (kit_of(model).run(model, args) for model, args in zip(models, pair.inputs()))
    return tuple(np.asarray(output, np.float64) for output in made)


def distance(reference, candidate):
    if reference.shape != candidate.shape:
        return np.inf
    return np.linalg.norm(reference - candidate) / np.linalg.norm(reference)


def owners(model):
    """Paths of layers that own parameters, with those parameters' identities."""
    found = {}
    for path, each in kit_of(model).named_layers(model).items():
        owned = {id(p) for p in each._parameters.values() if p is not None}
        if owned:
            found[path or ROOT] = owned
    return found


def test_names_are_unique():
    assert len({pair.name for pair in EVERY}) == len(EVERY)


@by_name(PAIRS)
def test_outputs_are_equal_after_the_transfer_and_not_before(pair):
    models = [model.eval() or model for model in pair.build()]
    assert distance(*outputs(pair, models)) > 1e-2
    pair.transfer(*models)
    reference, candidate = outputs(pair, models)
    assert np.isfinite(reference).all()
    assert reference.std() > 1e-2
    assert distance(reference, candidate) < 1e-5


@by_name(EVERY)
def test_every_layer_with_parameters_occurs(pair):
    for side, model in enumerate(pair.build()):
        reported = {entry[side] for entry in pair.layers} | set(pair.extra[side])
        all_owners = owners(model)
        known = set().union(*(all_owners.get(path, set()) for path in reported))
        assert not [path for path, owned in all_owners.items() if path not in reported and owned - known]
        assert all(layer(model, path)._parameters or layer(model, path)._buffers for path in reported)
        assert not {entry[side] for entry in pair.layers} & set(pair.extra[side])


@by_name(PAIRS)
def test_no_two_layers_are_interchangeable(pair):
    """So no other pairing than the map is right as well."""
    models = [model.eval() or model for model in pair.build()]
    pair.transfer(*models)
    candidate = models[1]
    kit = kit_of(candidate)
    reference, _ = outputs(pair, models)
    args = pair.inputs()[1]
    paths = sorted({path for _, path in pair.layers})
    owned = {path: {n: kit.numpy(t) for n, t in tensors(layer(candidate, path)).items()} for path in paths}
    for one, other in itertools.combinations(paths, 2):
        own, its = owned[one], owned[other]
        alike = {n: a.shape for n, a in own.items()} == {n: a.shape for n, a in its.items()}
        if not alike or _shared(candidate, one, other):
            continue
        for path, values in ((one, its), (other, own)):
            for name, array in values.items():
                put(candidate, path, name, array)
        assert distance(reference, np.asarray(kit.run(candidate, args), np.float64)) > 1e-4, (one, other)
        for path, values in ((one, own), (other, its)):
            for name, array in values.items():
                put(candidate, path, name, array)


def _shared(model, one, other):
    ids = [{id(t) for t in tensors(layer(model, path)).values()} for path in (one, other)]
    return bool(ids[0] & ids[1])


@by_name(DIFFERENT)
def test_different_pairs_differ_even_after_the_transfer(pair):
    models = [model.eval() or model for model in pair.build()]
    try:
        pair.transfer(*models)
    except MismatchError:
        return
    if pair.shows == "training":
        assert distance(*outputs(pair, models)) < 1e-5
        for model in models:
            model.train()
        outputs(pair, models)
        for model in models:
            model.eval()
    # Ten times what equal ones may differ by; gelu's approximation and an epsilon come to 3e-4.
    assert distance(*outputs(pair, models)) > 1e-4


@by_name(DIFFERENT)
def test_different_pairs_say_where(pair):
    reference, candidate = pair.build()
    assert not pair.same
    assert layer(reference, pair.differs) is not None
    for paths in pair.layers:
        assert layer(reference, paths[0]) is not None
        assert layer(candidate, paths[1]) is not None
