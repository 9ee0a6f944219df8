"""A function around a method of one object, of which the object knows nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

from padiff.frameworks.interception import Override


class Base:
    def add(self, value, *, twice=False):
        return value * (2 if twice else 1) + 1


class Owner(Base):
    def add(self, value, *, twice=False):
        return super().add(value, twice=twice)


def plus(amount):
    return lambda method, *args, **kwargs: method(*args, **kwargs) + amount


def test_an_override_is_of_one_object_and_sets_nothing_on_it():
    owner, other = Owner(), Owner()
    override = Override(owner, "add", plus(100))
    assert (owner.add(1), owner.add(value=1, twice=True), other.add(1)) == (102, 103, 2)
    assert not vars(owner)
    assert copy.deepcopy(owner).add(1) == copy.copy(owner).add(1) == pickle.loads(pickle.dumps(owner)).add(1) == 2
    override.remove()
    override.remove()
    assert owner.add(1) == 2


def test_the_last_override_is_the_outermost_whichever_goes_first():
    owner, seen = Owner(), []

    def noting(name):
        def around(method, value, **kwargs):
            seen.append(name)
            return method(value)

        return around

    first, second = Override(owner, "add", noting("first")), Override(owner, "add", noting("second"))
    assert owner.add(1) == 2
    assert seen == ["second", "first"]
    first.remove()
    assert owner.add(1) == 2
    assert seen == ["second", "first", "second"]
    second.remove()
    assert owner.add(1) == 2


def test_an_override_can_be_taken_off_and_another_put_on_within_its_call():
    owner = Owner()
    overrides = []

    def around(method, value, **kwargs):
        overrides.pop().remove()
        result = method(value)
        overrides.append(Override(owner, "add", around))
        return result + 10

    overrides.append(Override(owner, "add", around))
    assert [owner.add(1) for _ in range(3)] == [12, 12, 12]


def test_a_method_that_is_set_on_the_object_is_put_back():
    owner = Owner()
    owner.add = own = lambda value: value + 5
    override = Override(owner, "add", plus(100))
    assert owner.add(1) == 106
    override.remove()
    assert owner.add is own


def test_an_override_keeps_no_object_and_ends_with_whoever_holds_it():
    gc.collect()  # overrides of other tests
    owner, code = Owner(), Owner.add.__code__
    override = Override(owner, "add", plus(100))
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None
    assert Owner.add.__code__ is not code
    del override
    gc.collect()
    assert Owner.add.__code__ is code
