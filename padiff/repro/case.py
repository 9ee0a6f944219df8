"""What a script is made of, for one side of a first diff."""

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
    """Of this first diff there is no script; the text says why."""


@dataclass
class Case:
    """A computation, as one side's script does it.

    Attributes:
        framework: the side's.
        what: what is computed, in words.
        given: tensors by the name of their variable.
        dtypes: of these, what each is in the run.
        origins: of these, what each is, in words; a comment.
        learns: names of those whose gradient is asked for, or is computed along with it.
        lines: the code, which sets ``made``.
        own, other: what the side recorded, and what the other one did, in this side's order.
        limit: relative L2 error that is allowed.
        remarks: what is to be known of it, as sentences.
        autocast: dtype, level and device of the autocast that the run computes under; `None`: none.
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
        """The name of the variable that holds a recorded tensor.

        Args:
            wish: what to call it.
            what: what it is, for an error.

        Raises:
            CannotWriteError: its values were not kept.
        """
        return self.give_array(wish, values_of(source, what), dtype, what)

    def give_array(self, wish: str, array: np.ndarray, dtype: str, what: str = "") -> str:
        """Return the name of the variable that holds an array.

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
    """The values of a recorded tensor, as an array that any reader of safetensors knows.

    Raises:
        CannotWriteError: they were not kept.
    """
    if source is None or source.sketched:
        kept = "nothing" if source is None else "only a sketch"
        raise CannotWriteError(f"of {what} {kept} was kept. {RECORD_IN_FULL}")
    try:
        array = source.read()
    except PadiffError as error:
        raise CannotWriteError(f"{what} can't be read: {error}") from error
    return plain_array(array)


def plain_array(array: np.ndarray) -> np.ndarray:
    """Of numpy's own dtypes: bfloat16 and its like are float32, which holds all of their values."""
    return np.ascontiguousarray(array if array.dtype.kind in "biuf" else array.astype(np.float32))


def comment(text: str) -> str:
    """Return a text as what may stand in a comment: in ASCII, on one line."""
    return text.encode("unicode_escape", "surrogatepass").decode("ascii")


def variable(wish: str) -> str:
    """Return the name of a variable: a word of the catalog, perhaps with a number, whatever a run calls the tensor."""
    name, number = re.fullmatch(r"(.*?)(_[0-9]+)?", wish.rpartition("/")[2], re.DOTALL).groups("")  # type: ignore[union-attr]
    if name not in VARIABLES:
        return "x"
    return f"x_{name}" if name in _TAKEN and not number else name + number


#: What variables of recorded tensors may be called: what tensors are to layers, losses and optimizers, and the
#: functions that gave them.
VARIABLES = frozenset({"x", "gradient", "running_mean", "running_var", "in_proj_weight", "in_proj_bias"}).union(
    WEIGHTS, ("bias",), *ROLES.values(), *(LANGUAGES[name].calls for name in LANGUAGES), OPERATORS
)
# What the text around uses itself.
_TAKEN = frozenset(
    (
        *("made", "given", "compute", "cast", "gradient", "array", "off", "dtype", "loss", "float", "torch", "paddle"),
        *("np", "sys", "optimizer", "rate", "step", "before"),
    )
)


def tensors_of(case: Case) -> Mapping[str, np.ndarray]:
    """All that the script's file of tensors holds."""
    found = dict(case.given)
    assert case.own is not None and case.other is not None
    found["recorded.here"] = plain_array(case.own)
    found["recorded.there"] = plain_array(case.other)
    return found
