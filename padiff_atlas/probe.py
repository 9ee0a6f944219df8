"""What is asked of both frameworks: one operation, as each side writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Two tensors agree if they are no further apart than this, as relative L2: rounding of float32 over some hundred
#: additions. Measured over all probes of torch 2.13 and paddle 3.3.1: those that agree reach 8e-7, those that differ
#: begin at 7e-5.
TOLERANCE = 1e-5

#: What is done with what a call gives; see `padiff_atlas.ways`.
WAYS = ("value", "gradient", "optimizer", "schedule", "clip", "drawn")


@dataclass(frozen=True, slots=True)
class Probe:
    """One operation, called alike in both frameworks.

    A call is source text, so that what a reader sees is what ran. It may use `torch` or `paddle`, `nn`, `F`, `init`
    (`torch.nn.init`, `paddle.nn.initializer`) and the inputs of its group by name. Lines before the last are
    statements; a layer that they name `layer` gets the same weights on both sides. Constants stand alike in all
    three calls.

    Attributes:
        name: what is compared, in words; no two probes have the same one.
        torch: the call in torch.
        paddle: what a person writes who ports it line by line: the same arguments where paddle takes them, else
            its defaults. Empty: torch's text with the other module's name.
        mended: the call in paddle that gives what `torch` gives. Empty: none is known, or none is needed.
        mended_torch: the call in torch that gives what `paddle` gives. Empty: none is given.
        way: what is done with what the call gives, one of `WAYS`.
        formula: the definition in numpy, computed in float64 from the same inputs (`np`, `special` for scipy's).
            Empty: there is no closed form, or it would only say the call again.
        note: why the two differ, in one sentence; shown only where they do.
        tolerance: the relative L2 up to which two sides agree. It is larger where random numbers are compared.
        dtype: of the inputs that are no whole numbers.
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
        name: what the probes are about; `padiff atlas --only` takes it.
        probes: the probes.
        inputs: numpy arrays and plain values that the calls use by name. An array of floats is given in the probe's
            dtype, and anything else as it is.
    """

    name: str
    probes: tuple[Probe, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)
