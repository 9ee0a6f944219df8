"""Differences between the declared settings of two runs, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from padiff.records.both import Both
from padiff.records.cause import Cause
from padiff.records.recorded import LOOP, STAGES
from padiff.records.settings import setting_text
from padiff.system.naming import first_few

_NOTHING: Both[tuple[str, ...]] = Both((), ())
# Maximum number of parameters and layers that a sentence names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that two runs declare differently.

    Attributes:
        name: name of the setting, e.g. ``beta2``; the same in both frameworks.
        values: the value of each run; `None` if a run has no such setting.
        stage: the stage of a step in which the setting acts.
        kind: kind of the cause: ``optimizer_setting``, ``learning_rate``, ``clipping``, ``loss_setting``,
            ``layer_setting``, ``argument``, ``mode``, ``trainable``, ``tied``, ``accumulation``, ``micro_batches``,
            ``left_over``, ``trainer``, ``precision``.
        about: the object that has the setting, in words: ``AdamW``, ``the loss``, ``layer norm1 (LayerNorm) against ln
            (LayerNorm)``.
        changes: True if the two runs cannot compute the same because of the difference.
        fix: the line of code that fixes the difference, in the candidate's framework. May be empty.
        parameters: the parameters that are affected, by ``layer/slot``; empty: all trained parameters.
        layers: the layers that are affected, by path.
        step: the first step that shows the difference.
        note: a sentence that explains the difference. May be empty.
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
        """Return a key that is equal for the same difference in different steps."""
        return self.name, *map(str, self.values), self.about, self.parameters, self.layers

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key of the causal order: step, then stage."""
        return self.step, STAGES.index(self.stage)

    @property
    def said(self) -> str:
        """Return the sentence for differences of this kind."""
        return _SAID[self.kind]

    @property
    def text_alone(self) -> str:
        """Return the two values in words, without the object that has the setting."""
        values = self.values.map(setting_text)
        # The sentence of the kind names the learning rate already.
        name = "" if self.kind == "learning_rate" else f"{_WORDS.get(self.name, self.name)} "
        return f"{name}{values.reference} against {values.candidate}"

    @property
    def text(self) -> str:
        """Return the two values and the object that has the setting, in words."""
        where = self.about
        if self.parameters.reference:
            where += f"{' ' if where else ''}for {first_few(self.parameters.reference, _NAMED)}"
        return f"{where}: {self.text_alone}" if where else self.text_alone

    def cause(self) -> Cause:
        """Return the difference as the cause of a diff."""
        text = self.text_alone if self.layers.reference else self.text
        return Cause(self.kind, f"{self.said}: {text}", evidence=self.note, fix=self.fix)

    @property
    def place(self) -> Both[str | None]:
        """Return the layers at which to report the difference; the loop if no layer is affected by itself."""
        if self.layers.reference or self.layers.candidate:
            return self.layers.map(lambda paths: paths[0] if paths else None)
        if self.parameters.reference or self.parameters.candidate:
            return self.parameters.map(lambda sites: sites[0].rpartition("/")[0] if sites else None)
        return Both(LOOP, LOOP)


#: Kinds of differences that belong to a layer.
OF_LAYERS = ("layer_setting", "mode")
#: Names that are printed as words.
_WORDS = {"weight_decay": "weight decay"}
_SAID = {
    "optimizer_setting": "the optimizers are set differently",
    "learning_rate": "the learning rates differ",
    "clipping": "gradients are clipped differently",
    "loss_setting": "the losses are set differently",
    "layer_setting": "the layers are set differently",
    "argument": "the model is called with other numbers",
    "precision": "one run computes in another precision",
    "mode": "one run trains where the other evaluates",
    "trainer": "the trainers are set differently",
    "left_over": "a step of one run begins with gradients that are no part of it",
    "micro_batches": "a step is made of more micro-batches in one run than in the other",
    "accumulation": "steps are made of different numbers of batches",
    "trainable": "one run trains what the other does not",
    "tied": "one run shares a parameter that the other has twice",
}
