"""Tensors that were seen are known again, by themselves and by views of all of them."""

from __future__ import annotations

import numpy as np

from padiff.frameworks import framework_called
from padiff.recorder.copying import Copier
from padiff.recorder.options import FULL
from padiff.recorder.tensor_copy import SeenTensors


def test_a_view_is_known_though_an_object_of_long_ago_had_the_number_of_its_base(kit):
    """Python gives the number of an object that is gone to another one: which copy is found must not hang on that."""
    framework = framework_called(kit.name)
    seen, copier = SeenTensors(framework), Copier(framework)
    early, late = ([kit.tensor(np.full(6, k)) for k in range(50)] for _ in range(2))
    for each in (*early, *late):
        seen.lookup(each)
    gone = {id(each) for each in early}
    early.clear()
    made = [kit.tensor(np.arange(6.0)) for _ in range(200)]
    base = next(each for each in made if id(each) in gone)
    seen.lookup(base).full = copier.copy_at_level(base, FULL)
    view = base.reshape([2, 3])
    found = seen.taken(view, FULL)
    assert found is not None
    np.testing.assert_array_equal(found.values, np.arange(6.0))
