"""Probes of losses."""

from __future__ import annotations

import numpy as np

from padiff_atlas.probe import Group, Probe

_RNG = np.random.default_rng(0)
_INPUTS = {
    "logits": _RNG.normal(size=(6, 5)),
    "labels": np.array([0, 3, 1, 4, 2, 3]),
    "ignored": np.array([0, 3, -100, 4, 2, 3]),
    "weight": np.array([1.0, 2.0, 0.5, 1.5, 3.0]),
    "probs": _RNG.dirichlet(np.ones(5), size=6),
    "x": _RNG.normal(size=(6, 5)) * 2,
    "y": _RNG.normal(size=(6, 5)),
    "z": _RNG.normal(size=(6, 5)),
    "var": _RNG.uniform(0.5, 2.0, size=(6, 5)),
    "flags": np.array(_RNG.integers(0, 2, size=(6, 5)), dtype=np.float64),
    "signs": np.array([1.0, -1.0, 1.0, 1.0, -1.0, -1.0]),
    "sequence": _RNG.normal(size=(7, 2, 5)),
    "targets": np.array([[1, 2, 3], [2, 4, 1]]),
    "input_lengths": np.array([7, 6]),
    "target_lengths": np.array([3, 2]),
    "segments": np.array(_RNG.integers(0, 3, size=(2, 4, 4))),
    "maps": _RNG.normal(size=(2, 3, 4, 4)),
}

_LOG_P = "(logits - special.logsumexp(logits, 1, keepdims=True))"
_PICKED = f"-{_LOG_P}[np.arange(6), labels]"

LOSSES = Group(
    "losses",
    (
        Probe(
            "cross_entropy",
            "F.cross_entropy(logits, labels)",
            formula=f"({_PICKED}).mean()",
        ),
        Probe(
            "cross_entropy, ignored labels, mean",
            "F.cross_entropy(logits, ignored, ignore_index=-100)",
            mended="F.cross_entropy(logits, ignored, ignore_index=-100, reduction='sum')"
            " / (ignored != -100).sum().astype('float32')",
            formula=f"np.delete({_PICKED}, 2).mean()",
            note="with a negative ignore_index paddle's mean divides by all rows, those with an ignored label too",
        ),
        Probe(
            "cross_entropy, labels of -1 ignored, mean",
            "F.cross_entropy(logits, labels - 1, ignore_index=-1)",
            mended="F.cross_entropy(logits, labels - 1, ignore_index=-1, reduction='sum')"
            " / (labels != 0).sum().astype('float32')",
            formula="-(logits - special.logsumexp(logits, 1, keepdims=True))[1:][np.arange(5), labels[1:] - 1].mean()",
            note="as with -100",
        ),
        Probe(
            "cross_entropy, ignored labels, sum",
            "F.cross_entropy(logits, ignored, reduction='sum')",
            formula=f"np.delete({_PICKED}, 2).sum()",
        ),
        Probe(
            "cross_entropy, a label ignored that is a class, mean",
            "F.cross_entropy(logits, labels, ignore_index=3)",
            formula=f"({_PICKED})[labels != 3].mean()",
        ),
        Probe(
            "cross_entropy, class weights",
            "F.cross_entropy(logits, labels, weight=weight)",
            formula=f"({_PICKED} * weight[labels]).sum() / weight[labels].sum()",
        ),
        Probe(
            "cross_entropy, class weights and ignored labels",
            "F.cross_entropy(logits, ignored, weight=weight)",
            formula=f"np.delete({_PICKED} * weight[labels], 2).sum() / np.delete(weight[labels], 2).sum()",
        ),
        Probe(
            "cross_entropy, smoothing",
            "F.cross_entropy(logits, labels, label_smoothing=0.1)",
            formula=f"(0.9 * {_PICKED} - 0.1 * {_LOG_P}.mean(1)).mean()",
        ),
        Probe(
            "cross_entropy of large logits",
            "F.cross_entropy(logits * 100, labels, reduction='none')",
            mended="paddle.logsumexp(logits * 100, 1) - (logits * 100).take_along_axis(labels[:, None], 1)[:, 0]",
            formula="special.logsumexp(logits * 100, 1) - 100 * logits[np.arange(6), labels]",
            note="on a CPU paddle takes no logit for more than 64 below the largest one, so no loss exceeds 64",
        ),
        Probe(
            "cross_entropy, smoothing and ignored labels",
            "F.cross_entropy(logits, ignored, label_smoothing=0.1)",
            mended="kept = ignored != -100\nF.cross_entropy(logits[kept], ignored[kept], label_smoothing=0.1)",
            note="paddle turns the labels into one-hot rows before it looks for ignored ones",
            formula=f"np.delete(0.9 * {_PICKED} - 0.1 * {_LOG_P}.mean(1), 2).mean()",
        ),
        Probe(
            "cross_entropy, smoothing and class weights",
            "F.cross_entropy(logits, labels, weight=weight, label_smoothing=0.1)",
            mended="smooth = 0.9 * F.one_hot(labels, 5) + 0.1 / 5\n"
            "-(smooth * weight * F.log_softmax(logits, 1)).sum() / weight[labels].sum()",
            formula=f"-((0.9 * np.eye(5)[labels] + 0.02) * weight * {_LOG_P}).sum() / weight[labels].sum()",
            note="torch divides by the weights of the labels, paddle by those of the smoothed labels",
        ),
        Probe(
            "cross_entropy, labels as probabilities",
            "F.cross_entropy(logits, probs)",
            "F.cross_entropy(logits, probs, soft_label=True)",
            formula=f"-(probs * {_LOG_P}).sum(1).mean()",
        ),
        Probe(
            "cross_entropy, one value for each label",
            "F.cross_entropy(logits, labels, reduction='none')",
            formula=_PICKED,
        ),
        Probe(
            "cross_entropy of maps, classes in the second axis",
            "F.cross_entropy(maps, segments)",
            mended="F.cross_entropy(maps, segments[:, None], axis=1).mean()",
            note="paddle's classes are in the last axis by default",
        ),
        Probe(
            "nll_loss",
            "F.nll_loss(x, labels)",
            formula="-x[np.arange(6), labels].mean()",
        ),
        Probe(
            "nll_loss, ignored labels",
            "F.nll_loss(x, ignored)",
            formula="-np.delete(x[np.arange(6), labels], 2).mean()",
        ),
        Probe(
            "nll_loss, class weights",
            "F.nll_loss(x, labels, weight=weight)",
            formula="-(x[np.arange(6), labels] * weight[labels]).sum() / weight[labels].sum()",
        ),
        Probe("mse_loss", "F.mse_loss(x, y)", formula="((x - y) ** 2).mean()"),
        Probe("l1_loss", "F.l1_loss(x, y)", formula="np.abs(x - y).mean()"),
        Probe(
            "smooth_l1_loss",
            "F.smooth_l1_loss(x, y)",
            formula="np.where(np.abs(x - y) < 1, (x - y) ** 2 / 2, np.abs(x - y) - 0.5).mean()",
        ),
        Probe(
            "smooth_l1_loss, beta 0.5",
            "F.smooth_l1_loss(x, y, beta=0.5)",
            "F.smooth_l1_loss(x, y, delta=0.5)",
            mended="F.smooth_l1_loss(x, y, delta=0.5, is_huber=False)",
            mended_torch="F.huber_loss(x, y, delta=0.5)",
            formula="np.where(np.abs(x - y) < 0.5, (x - y) ** 2, np.abs(x - y) - 0.25).mean()",
            note="paddle's is Huber's loss unless `is_huber=False`: delta times torch's",
        ),
        Probe(
            "SmoothL1Loss, beta 0.5",
            "nn.SmoothL1Loss(beta=0.5)(x, y)",
            "nn.SmoothL1Loss(delta=0.5)(x, y)",
            mended="nn.SmoothL1Loss(delta=0.5, is_huber=False)(x, y)",
        ),
        Probe("huber_loss", "F.huber_loss(x, y, delta=0.5)", "F.smooth_l1_loss(x, y, delta=0.5)"),
        Probe(
            "binary_cross_entropy",
            "F.binary_cross_entropy(probs, flags)",
            formula="-(flags * np.log(probs) + (1 - flags) * np.log(1 - probs)).mean()",
        ),
        Probe(
            "binary_cross_entropy of 0 and 1",
            "F.binary_cross_entropy(flags, 1 - flags, reduction='none')",
        ),
        Probe(
            "binary_cross_entropy_with_logits",
            "F.binary_cross_entropy_with_logits(x, flags)",
            formula="(np.logaddexp(0, x) - x * flags).mean()",
        ),
        Probe(
            "binary_cross_entropy_with_logits, pos_weight",
            "F.binary_cross_entropy_with_logits(x, flags, pos_weight=weight)",
            formula="(flags * weight * np.logaddexp(0, -x) + (1 - flags) * np.logaddexp(0, x)).mean()",
        ),
        Probe("kl_div, mean", "F.kl_div(logits, probs)", formula="(probs * (np.log(probs) - logits)).mean()"),
        Probe(
            "kl_div, batchmean",
            "F.kl_div(logits, probs, reduction='batchmean')",
            formula="(probs * (np.log(probs) - logits)).sum() / 6",
        ),
        Probe(
            "kl_div, target as logarithms",
            "F.kl_div(logits, y, log_target=True)",
            formula="(np.exp(y) * (y - logits)).mean()",
        ),
        Probe("margin_ranking_loss", "F.margin_ranking_loss(x, y, flags * 2 - 1, margin=0.1)"),
        Probe("hinge_embedding_loss", "F.hinge_embedding_loss(x, flags * 2 - 1)"),
        Probe("cosine_embedding_loss", "F.cosine_embedding_loss(x, y, signs, margin=0.1)"),
        Probe("triplet_margin_loss", "F.triplet_margin_loss(x, y, z)"),
        Probe(
            "soft_margin_loss",
            "F.soft_margin_loss(x, flags * 2 - 1)",
            formula="np.log1p(np.exp(-(flags * 2 - 1) * x)).mean()",
        ),
        Probe("multi_margin_loss", "F.multi_margin_loss(x, labels)"),
        Probe(
            "multilabel_soft_margin_loss",
            "F.multilabel_soft_margin_loss(x, flags)",
            "F.multi_label_soft_margin_loss(x, flags)",
        ),
        Probe("poisson_nll_loss", "F.poisson_nll_loss(x, var)", formula="(np.exp(x) - var * x).mean()"),
        Probe("poisson_nll_loss, full", "F.poisson_nll_loss(x, var, full=True)"),
        Probe(
            "gaussian_nll_loss",
            "F.gaussian_nll_loss(x, y, var)",
            formula="(0.5 * (np.log(var) + (x - y) ** 2 / var)).mean()",
        ),
        Probe(
            "ctc_loss, mean",
            "F.ctc_loss(sequence.log_softmax(-1), targets, input_lengths, target_lengths)",
            "F.ctc_loss(F.log_softmax(sequence, -1), targets.astype('int32'), input_lengths, target_lengths)",
        ),
        Probe(
            "ctc_loss of logits",
            "F.ctc_loss(sequence, targets, input_lengths, target_lengths, reduction='none')",
            "F.ctc_loss(sequence, targets.astype('int32'), input_lengths, target_lengths, reduction='none')",
            mended_torch="log_p = sequence.log_softmax(-1)\n"
            "F.ctc_loss(log_p, targets, input_lengths, target_lengths, reduction='none')",
            note="paddle takes logits and normalises them itself, torch takes logarithms of probabilities",
        ),
        Probe("cosine_similarity", "F.cosine_similarity(x, y)"),
        Probe(
            "cosine_similarity, tiny vectors",
            "F.cosine_similarity(x * 1e-5, y * 1e-5)",
            mended="(F.normalize(x * 1e-5, epsilon=1e-8) * F.normalize(y * 1e-5, epsilon=1e-8)).sum(1)",
            formula="(x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)",
            note="epsilon bounds each norm in torch, and in paddle the product of the squared norms",
        ),
        Probe("pairwise_distance", "F.pairwise_distance(x, y)"),
        Probe("pairwise_distance of equal rows", "F.pairwise_distance(x, x)"),
    ),
    _INPUTS,
)
