"""Names of a function's variables, found without a trace in the function."""

from __future__ import annotations

import weakref

from padiff.system.frames import names_of

DROPS = """
def train():
    thing = Thing()
    alive = weakref.ref(thing)
    names = names_of({"a": thing})
    del thing
    return names, alive()
"""
ASKS = """
def train():
    size = 3
    config = locals()
    before = dict(config)
    thing = Thing()
    names_of({"a": thing})
    return config, before
"""


class Thing:
    """An object that can be referred to weakly."""


def called(tmp_path, code):
    scope = {"Thing": Thing, "weakref": weakref, "names_of": names_of}
    exec(compile(code, str(tmp_path / "train.py"), "exec"), scope)
    return scope["train"]()


def test_a_variable_is_named_and_dies_when_the_function_drops_it(tmp_path):
    assert called(tmp_path, DROPS) == ({"a": {"thing"}}, None)


def test_the_variables_that_a_function_has_asked_for_stay_as_they_were(tmp_path):
    config, before = called(tmp_path, ASKS)
    assert config == before == {"size": 3}
