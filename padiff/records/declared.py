"""What two runs declare differently, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from padiff.records.both import Both
from padiff.records.cause import Cause
from padiff.records.recorded import LOOP, STAGES
from padiff.records.settings import setting_text
from padiff.system.naming import first_few

_NOTHING: Both[tuple[str, ...]] = Both((), ())
# Parameters and layers that a sentence names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that two runs are set differently in.

    Attributes:
        name: what it is, e.g. ``beta2``; the same in both frameworks.
        values: what either run has set. `None`: it has nothing of the kind.
        stage: where in a step it acts.
        kind: of the cause that it is: ``optimizer_setting``, ``learning_rate``, ``clipping``, ``loss_setting``,
            ``layer_setting``, ``mode``, ``trainable``, ``tied``, ``accumulation``, ``micro_batches``,
            ``left_over``, ``trainer``, ``precision``.
        about: whose it is, in words: ``AdamW``, ``the loss``, ``layer norm1 (LayerNorm) against ln (LayerNorm)``.
        changes: whether the two runs can't compute the same because of it.
        fix: the line that mends it, in the candidate's framework. May be empty.
        parameters: which parameters it concerns, by ``layer/slot``; all that the runs train where it is empty.
        layers: which layers it concerns, by path.
        step: the first step that shows it.
        note: a sentence that explains it. May be empty.
    """

    name: str
    values: Both[Any]
    stage: str
    kind: str
    about: str = ""
    changes: bool = True
    fix: str = ""
    parameters: Both[tuple[str, ...]] = _NOTHING
    layers: Both[tuple[str, ...]] = _NOTHING
    step: int = 0
    note: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same for the same difference in another step."""
        return self.name, *map(str, self.values), self.about, self.parameters, self.layers

    @property
    def order(self) -> tuple[int, int]:
        """Where it stands in causal order."""
        return self.step, STAGES.index(self.stage)

    @property
    def said(self) -> str:
        """What is said of differences of its kind."""
        return _SAID[self.kind]

    @property
    def text_alone(self) -> str:
        """What differs, in words, without whose it is."""
        values = self.values.map(setting_text)
        # The kind says of a learning rate what it is.
        name = "" if self.kind == "learning_rate" else f"{_WORDS.get(self.name, self.name)} "
        return f"{name}{values.reference} against {values.candidate}"

    @property
    def text(self) -> str:
        """What differs, in words."""
        where = self.about
        if self.parameters.reference:
            where += f"{' ' if where else ''}for {first_few(self.parameters.reference, _NAMED)}"
        return f"{where}: {self.text_alone}" if where else self.text_alone

    def cause(self) -> Cause:
        """The difference as the cause of a diff."""
        own = self.text_alone if self.layers.reference else self.text
        return Cause(self.kind, f"{self.said}: {own}", evidence=self.note, fix=self.fix)

    @property
    def place(self) -> Both[str | None]:
        """The layers that it is reported at; the loop where it is about no layer alone."""
        if self.layers.reference or self.layers.candidate:
            return self.layers.map(lambda paths: paths[0] if paths else None)
        if self.parameters.reference or self.parameters.candidate:
            return self.parameters.map(lambda sites: sites[0].rpartition("/")[0] if sites else None)
        return Both(LOOP, LOOP)


#: Names that are said in words.
_WORDS = {"weight_decay": "weight decay"}
_SAID = {
    "optimizer_setting": "the optimizers are set differently",
    "learning_rate": "the learning rates differ",
    "clipping": "gradients are clipped differently",
    "loss_setting": "the losses are set differently",
    "layer_setting": "the layers are set differently",
    "precision": "one run computes in another precision",
    "mode": "one run trains where the other evaluates",
    "trainer": "the trainers are set differently",
    "left_over": "a step of one run begins with gradients that are no part of it",
    "micro_batches": "a step is made of more micro-batches in one run than in the other",
    "accumulation": "steps are made of different numbers of batches",
    "trainable": "one run trains what the other does not",
    "tied": "one run shares a parameter that the other has twice",
}
