"""PaDiff's calls that compare two dumps: ``check_report``, ``check_params``, ``check_weights``, ``check_grads``."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from padiff.compare import Tolerance, compare_runs
from padiff.dump import open_run
from padiff.dump.format import ALONE
from padiff.errors import UsageError
from padiff.records import Both, Report, Run
from padiff.system.terminal import nearest

#: The keys of a ``cfg``, and their defaults.
DEFAULTS: Mapping[str, Any] = {"atol": 1e-4, "rtol": 1e-7, "compare_mode": "mean"}

#: Folder of a dump, or a run in memory.
_Dump = str | Path | Run
# In PaDiff's documentation, each function has different argument names for the two dumps; all names are accepted by all
# functions.
_KINDS = ("report", "param", "params", "weight", "weights", "grad", "grads")


def check_report(
    report_path_0: _Dump | None = None,
    report_path_1: _Dump | None = None,
    cfg: Mapping[str, Any] | None = None,
    **paths: _Dump,
) -> Report:
    """Compare inputs, outputs, losses and activation gradients of two dumps.

    Args:
        report_path_0: the reference: a run folder (all of its steps), a step's folder, or a dump folder.
        report_path_1: the candidate: a run folder, a step's folder, or a dump folder.
        cfg: ``atol`` (default 1e-4), ``rtol`` (1e-7), ``compare_mode`` (``"mean"``; or ``"strict"``).
            `mean` judges the mean of the error, `strict` every element.
        paths: the two dumps under the argument names of another check: ``report_path_0``, ``param_path_0``,
            ``weight_path_0``, ``grad_path_0`` (or in the plural) and so on.

    Returns:
        The report, which is true in a condition if everything passed.

    Raises:
        UsageError: an unknown key in ``cfg``; a dump is missing, or passed twice.
        RunFolderError: a folder can't be read.
        NothingToCompareError: the dumps have no tensors of these kinds in common.
    """
    stages = ("input", "forward", "loss", "backward")
    return _check("check_report", Both(report_path_0, report_path_1), paths, cfg, stages)


def check_params(
    param_path_0: _Dump | None = None,
    param_path_1: _Dump | None = None,
    cfg: Mapping[str, Any] | None = None,
    **paths: _Dump,
) -> Report:
    """Compare weights, gradients and updates of two dumps; arguments and errors as for `check_report`."""
    return _check("check_params", Both(param_path_0, param_path_1), paths, cfg, ("weight", "grad", "update"))


def check_weights(
    weight_path_0: _Dump | None = None,
    weight_path_1: _Dump | None = None,
    cfg: Mapping[str, Any] | None = None,
    **paths: _Dump,
) -> Report:
    """Compare parameters and buffers of two dumps; arguments and errors as for `check_report`."""
    return _check("check_weights", Both(weight_path_0, weight_path_1), paths, cfg, ("weight",))


def check_grads(
    grad_path_0: _Dump | None = None,
    grad_path_1: _Dump | None = None,
    cfg: Mapping[str, Any] | None = None,
    **paths: _Dump,
) -> Report:
    """Compare the gradients that the optimizers consumed, of two dumps; arguments and errors as for `check_report`."""
    return _check("check_grads", Both(grad_path_0, grad_path_1), paths, cfg, ("grad",))


def tolerance_of(cfg: Mapping[str, Any] | None) -> Tolerance:
    """Return the tolerance of a ``cfg``, with defaults for missing keys; the ``cfg`` is not changed."""
    options = dict(cfg or {})
    for key in options:
        if key not in DEFAULTS:
            raise UsageError(f"cfg: unknown key {key!r}. {nearest(str(key), DEFAULTS)}")
    settings = {**DEFAULTS, **options}
    return Tolerance(atol=settings["atol"], rtol=settings["rtol"], mode=settings["compare_mode"])


def _check(
    what: str,
    positional: Both[_Dump | None],
    named: Mapping[str, _Dump],
    cfg: Mapping[str, Any] | None,
    stages: Collection[str],
) -> Report:
    tolerance = tolerance_of(cfg)
    dumps = _dumps(what, positional, named)
    runs = dumps.map(lambda dump: _opened(dump, stages) if isinstance(dump, (str, os.PathLike)) else dump)
    return compare_runs(runs.reference, runs.candidate, policy=tolerance, stages=stages)


def _dumps(what: str, positional: Both[_Dump | None], named: Mapping[str, _Dump]) -> Both[_Dump]:
    """Return the two dumps, from the arguments of the function or from argument names of another check.

    Args:
        what: name of the function.
        positional: the dumps from the function's first two arguments.
        named: dumps by other argument names.
    """
    number_by_name = {f"{kind}_path_{number}": number for kind in _KINDS for number in (0, 1)}
    dumps = list(positional)
    for name, path in named.items():
        if name not in number_by_name:
            raise UsageError(f"{what}: unknown argument {name!r}. {nearest(name, [*number_by_name, 'cfg'])}")
        number = number_by_name[name]
        if dumps[number] is not None:
            raise UsageError(f"{what}: two paths for dump {number}: {dumps[number]} and {path} ({name})")
        dumps[number] = path
    for number, dump in enumerate(dumps):
        if dump is None:
            raise UsageError(f"{what} needs two dumps, report_path_0 and report_path_1; number {number} is missing")
    return Both(*(dump for dump in dumps if dump is not None))


def _opened(path: str | Path, stages: Collection[str]) -> Run:
    """Open a run or a dump; open the separate files of ``dump_weights`` or ``dump_grads`` if they exist."""
    alone = [ALONE[stage][0] for stage in stages if len(stages) == 1 and stage in ALONE]
    folders = [Path(path), *Path(path).glob("rank_*"), *Path(path).glob("step_*"), *Path(path).glob("step_*/rank_*")]
    if any((folder / name).exists() for folder in folders for name in alone):
        return open_run(path, alone)
    return open_run(path)
