"""Names of optimizer settings, for people and as machine-readable kinds."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.compare.diagnose.hypotheses.parameter_history import ParameterHistory
from padiff.system.naming import first_few

#: Machine-readable names of causes, by setting.
KINDS = {
    "rate": "update_scale",
    "momentum": "momentum",
    "dampening": "dampening",
    "beta1": "{rule}_beta1",
    "beta2": "{rule}_beta2",
    "eps": "{rule}_eps",
    "alpha": "{rule}_alpha",
    "initial": "{rule}_initial",
    "weight_decay": "weight_decay",
    "momentum_decay": "momentum_decay",
    "nesterov": "nesterov",
    "decoupled": "weight_decay_form",
    "corrected": "bias_correction",
    "first_corrected": "bias_correction",
    "second_corrected": "bias_correction",
    "amsgrad": "amsgrad",
    "inside": "{rule}_eps_inside",
    "uncorrected_eps": "{rule}_eps_form",
    "centered": "centered",
    "rate_inside": "rate_in_momentum",
    "lost": "optimizer_state_lost",
}
#: Names of settings for people.
NAMES = {
    "rate": "the size of updates",
    "momentum": "momentum",
    "dampening": "dampening",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "epsilon",
    "alpha": "alpha (rho)",
    "initial": "the initial accumulator",
    "weight_decay": "weight decay",
    "momentum_decay": "momentum decay",
    "nesterov": "Nesterov",
    "decoupled": "decoupled weight decay",
    "corrected": "bias correction",
    "first_corrected": "bias correction of the first moment",
    "second_corrected": "bias correction of the second moment",
    "amsgrad": "AMSGrad",
    "inside": "epsilon inside the root",
    "uncorrected_eps": "epsilon before bias correction",
    "centered": "centered",
    "rate_inside": "learning rate inside the momentum",
    "lost": "lost state",
}
#: Sentences for a form that differs: switched off in the candidate, and switched on.
WORDS = {
    "nesterov": ("the candidate has no Nesterov momentum, the reference has", "the candidate has Nesterov momentum"),
    "decoupled": (
        "weight decay is part of the gradient in the candidate (coupled), apart from it in the reference (decoupled)",
        "weight decay is apart from the gradient in the candidate (decoupled), part of it in the reference (coupled)",
    ),
    "corrected": (
        "the candidate's moments are not bias-corrected, the reference's are",
        "the candidate's moments are bias-corrected, the reference's are not",
    ),
    "first_corrected": (
        "the candidate's first moment is not bias-corrected, the reference's is",
        "the candidate's first moment is bias-corrected, the reference's is not",
    ),
    "second_corrected": (
        "the candidate's second moment is not bias-corrected, the reference's is",
        "the candidate's second moment is bias-corrected, the reference's is not",
    ),
    "amsgrad": ("the reference uses AMSGrad, the candidate does not", "the candidate uses AMSGrad"),
    "inside": (
        "epsilon is added outside of the square root in the candidate, inside of it in the reference",
        "epsilon is added inside of the square root in the candidate, outside of it in the reference",
    ),
    "uncorrected_eps": (
        "epsilon is added after bias correction in the candidate, before it in the reference",
        "epsilon is added before bias correction in the candidate, after it in the reference",
    ),
    "centered": ("the reference's RMSProp is centered, the candidate's is not", "the candidate's RMSProp is centered"),
    "rate_inside": (
        "the learning rate is applied to the momentum in the candidate, and inside of it in the reference",
        "the learning rate is applied inside of the momentum in the candidate, and to it in the reference",
    ),
    "lost": ("the candidate's optimizer lost its state before step {step}: it starts anew there",),
}


def number_text(value: float) -> str:
    return f"{value:.6g}"


def scope_text(wrong: Sequence[ParameterHistory], rest: Sequence[ParameterHistory] | None) -> str:
    """Return text that limits a cause to the parameters in ``wrong``; empty if no other parameter is in ``rest``."""
    if not rest:
        return ""
    if all(track.is_norm for track in wrong) and not any(track.is_norm for track in rest):
        return ", of norms and biases only"
    if not any(track.is_norm for track in wrong) and all(track.is_norm for track in rest):
        return ", of all but norms and biases"
    names = [f"{layer}/{slot}" for layer, slot, _ in (track.place for track in wrong)]
    return f", of {first_few(names, 3)} only"
