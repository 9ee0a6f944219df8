"""A probe: one operation as written in each framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Relative L2 error up to which two tensors agree: float32 rounding of some hundred additions. Measured over all probes
#: of torch 2.13 and paddle 3.3.1: errors of equal operations reach 8e-7, errors of different ones begin at 7e-5.
TOLERANCE = 1e-5

#: Ways to evaluate a call's result; see `padiff_atlas.ways`.
WAYS = ("value", "gradient", "optimizer", "schedule", "clip", "drawn")


@dataclass(frozen=True, slots=True)
class Probe:
    """One operation, called alike in both frameworks.

    A call is source text, so that readers see exactly the code that ran. Available names are `torch` or `paddle`, `nn`,
    `F`, `init` (`torch.nn.init`, `paddle.nn.initializer`) and the inputs of the group. Lines before the last are
    statements; a layer with the name `layer` gets the same weights in both frameworks. The same constants appear in all
    three calls.

    Attributes:
        name: description of the operation, unique among all probes.
        torch: the call in torch.
        paddle: the call in paddle as ported line by line: the same arguments where paddle has them, else its defaults.
            Empty: torch's text with the other module's name.
        mended: a call in paddle that agrees with `torch`. Empty if none is known or necessary.
        mended_torch: a call in torch that agrees with `paddle`. Empty if there is none.
        way: evaluation of the call's result, one of `WAYS`.
        formula: definition in numpy, computed in float64 from the same inputs (`np`, `special` for scipy's). Empty if
            there is no closed form, or if it would only repeat the call.
        note: reason for the difference, in one sentence; shown only if the calls differ.
        tolerance: relative L2 error up to which the calls agree; larger for random numbers.
        dtype: dtype of the floating-point inputs.
    """

    name: str
    torch: str
    paddle: str = ""
    mended: str = ""
    mended_torch: str = ""
    way: str = "value"
    formula: str = ""
    note: str = ""
    tolerance: float = TOLERANCE
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"probe {self.name!r}: its way is one of {', '.join(WAYS)}, got {self.way!r}")
        if not self.paddle:
            object.__setattr__(self, "paddle", re.sub(r"\btorch\.", "paddle.", self.torch))


@dataclass(frozen=True, slots=True)
class Group:
    """Probes that share their inputs.

    Attributes:
        name: topic of the probes, an argument of `padiff atlas --only`.
        probes: the probes.
        inputs: numpy arrays and plain values by the names that the calls use. Arrays of floats are converted to the
            probe's dtype, everything else is passed unchanged.
    """

    name: str
    probes: tuple[Probe, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)
