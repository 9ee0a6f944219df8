"""The content of a script that reproduces one side of a first diff."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from padiff.errors import PadiffError, UsageError
from padiff.frameworks.losses import ROLES, WEIGHTS
from padiff.records import TensorSource
from padiff.records.dtypes import DTYPES
from padiff.repro.languages import LANGUAGES, OPERATORS
from padiff.system.code import refused

#: How to record what is missing.
RECORD_IN_FULL = (
    'Record that step in full on both sides: `detail="full"` keeps it, '
    "`replay_every_n_steps=1` also whatever goes into a layer; `padiff watch`, or a callback with `reference=`, asks "
    "for full tensors around a diff by itself (zoom)"
)


class CannotWriteError(UsageError):
    """Raised if no script can be written for a first diff; the message gives the reason."""


@dataclass
class Case:
    """The computation that one side's script repeats.

    Attributes:
        framework: the side's framework.
        what: description of the computation, in words.
        given: input tensors by variable name.
        dtypes: dtype of each input tensor in the run.
        origins: description of each input tensor, for a comment.
        learns: names of tensors that require a gradient.
        lines: lines of code, which set the variable ``made``.
        own, other: the result recorded on this side, and the one of the other side in this side's layout.
        limit: allowed relative L2 error.
        remarks: sentences for the script's docstring.
        autocast: dtype, level and device of the run's autocast; `None`: no autocast.
    """

    framework: str
    what: str
    given: dict[str, np.ndarray] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    learns: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    own: np.ndarray | None = None
    other: np.ndarray | None = None
    limit: float = 0.0
    remarks: list[str] = field(default_factory=list)
    autocast: tuple[str, str, str] | None = None

    def give(self, wish: str, source: TensorSource | None, dtype: str, what: str) -> str:
        """Add a recorded tensor to the inputs, and return the name of its variable.

        Args:
            wish: preferred name of the variable.
            source: values of the tensor.
            dtype: dtype of the tensor in the run.
            what: description of the tensor, for comments and errors.

        Raises:
            CannotWriteError: the values were not recorded, or can't be read.
            ForeignCodeError: no framework has the dtype.
        """
        return self.give_array(wish, values_of(source, what), dtype, what)

    def give_array(self, wish: str, array: np.ndarray, dtype: str, what: str = "") -> str:
        """Add an array to the inputs, and return the name of its variable.

        Raises:
            ForeignCodeError: no framework has the dtype.
        """
        if dtype not in DTYPES:
            raise refused("the dtype", dtype)
        name = base = variable(wish)
        number = 1
        while name in self.given:
            number += 1
            name = f"{base}_{number}"
        self.given[name] = array
        self.dtypes[name] = dtype
        self.origins[name] = what
        return name


def values_of(source: TensorSource | None, what: str) -> np.ndarray:
    """Return the values of a recorded tensor in a dtype that numpy knows.

    Raises:
        CannotWriteError: the values were not recorded, or can't be read.
    """
    if source is None or source.sketched:
        available = "nothing" if source is None else "only a sketch"
        raise CannotWriteError(f"of {what} {available} was kept. {RECORD_IN_FULL}")
    try:
        array = source.read()
    except PadiffError as error:
        raise CannotWriteError(f"{what} can't be read: {error}") from error
    return plain_array(array)


def plain_array(array: np.ndarray) -> np.ndarray:
    """Return an array in one of numpy's dtypes: bfloat16 and float8 become float32, which holds all of their values."""
    return np.ascontiguousarray(array if array.dtype.kind in "biuf" else array.astype(np.float32))


def comment(text: str) -> str:
    """Return a text for a comment: in ASCII, on one line."""
    return text.encode("unicode_escape", "surrogatepass").decode("ascii")


def variable(wish: str) -> str:
    """Return a safe variable name: a word of `VARIABLES`, perhaps with a number, else ``x``."""
    name, number = re.fullmatch(r"(.*?)(_[0-9]+)?", wish.rpartition("/")[2], re.DOTALL).groups("")  # type: ignore[union-attr]
    if name not in VARIABLES:
        return "x"
    return f"x_{name}" if name in _TAKEN and not number else name + number


#: Names of variables for recorded tensors: roles in layers, losses and optimizers, and names of the functions that
#: returned the tensors.
VARIABLES = frozenset({"x", "gradient", "running_mean", "running_var", "in_proj_weight", "in_proj_bias"}).union(
    WEIGHTS, ("bias",), *ROLES.values(), *(LANGUAGES[name].calls for name in LANGUAGES), OPERATORS
)
# Variable names that the script's template uses.
_TAKEN = frozenset(
    (
        *("made", "given", "compute", "cast", "gradient", "array", "off", "dtype", "loss", "float", "torch", "paddle"),
        *("np", "sys", "optimizer", "rate", "step", "before"),
    )
)


def tensors_of(case: Case) -> Mapping[str, np.ndarray]:
    """Return the tensors of the script's file: inputs, and the recorded results of both sides."""
    tensors = dict(case.given)
    assert case.own is not None and case.other is not None
    tensors["recorded.here"] = plain_array(case.own)
    tensors["recorded.there"] = plain_array(case.other)
    return tensors
