"""What the fixture `padiff` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import padiff
from padiff.compare import Policy
from padiff.errors import UsageError
from padiff.records import Both, Report
from padiff.weights.assign import AssignError
from padiff_pytest.golden import Golden, Kept, checked
from padiff_pytest.same import compared
from padiff_pytest.verdict import ShortErrors, failure_text


class Padiff:
    """The fixture `padiff` of one test. Whatever else is asked of it comes from the package of that name, which it
    hides in the test: ``padiff.record``, ``padiff.Tolerance``.
    """

    def __init__(self, item: pytest.Item, folders: pytest.TempPathFactory, update: bool) -> None:
        self._item, self._folders, self._update = item, folders, update
        self._written: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(padiff, name)

    def __repr__(self) -> str:
        return "<the fixture padiff>"

    def assert_same(
        self,
        reference: Any,
        candidate: Any,
        inputs: Any,
        *,
        labels: Any = None,
        steps: int | None = None,
        optimizers: Any = None,
        loss: Any = None,
        layer_map: Any = None,
        start_equal: bool = True,
        policy: Policy | None = None,
        detail: Any = "full",
        max_bytes: float | None = None,
    ) -> Report:
        """Train two models side by side, in memory, and fail with the verdict unless the trainings match.

        Args:
            reference: the model to trust, of torch or paddle.
            candidate: the model in question, of either. It is trained, as the reference is, and stays so.
            inputs: what both are called with: a numpy array or tensor, a tuple of them (by position), or a mapping (by
                name); or a list with one of these for each step. Each model gets tensors of its own framework.
            labels: what the loss takes besides, likewise. Default: nothing.
            steps: how many. Default: as many as the lists have, else 3 with optimizers and 1 without.
            optimizers: a pair, each made of its own model's parameters. Default: nothing is updated.
            loss: a function of the output (and of the labels, if there are any) that gives a tensor of one element;
                or a pair of them. Default: the mean of the squares of all floating outputs.
            layer_map: layers that answer to each other, as objects or paths; the rest is found around them.
            start_equal: whether the candidate gets the reference's weights and buffers first. Default true.
            policy: when a diff passes. Default: `padiff.NoisePolicy`; `padiff.Tolerance` is a fixed one.
            detail: how much is kept of each tensor, as `padiff.record` takes it. Default ``"full"``.
            max_bytes: how much is held of each run. Default 1 GB; what does not fit is not compared.

        Returns:
            The report, if the trainings match.

        Raises:
            AssertionError: they differ, it is not known whether they do, or the weights can't be carried over.
            UsageError: an argument is wrong.
        """
        __tracebackhide__ = True
        with ShortErrors():
            found = compared(
                Both(reference, candidate),
                inputs,
                labels=labels,
                steps=steps,
                optimizers=optimizers,
                loss=loss,
                layer_map=layer_map,
                start_equal=start_equal,
                policy=policy,
                detail=detail,
                max_bytes=max_bytes,
            )
        if isinstance(found, AssignError):
            raise AssertionError(f"the candidate can't start equal: its weights can't be assigned. {found}")
        if not found.passed:
            raise AssertionError(failure_text(found))
        return found

    def golden(
        self,
        name: str,
        model: Any,
        *,
        layer_map: Any = None,
        policy: Policy | None = None,
        **options: Any,
    ) -> Golden:
        """Record a training and fail with the verdict unless it matches the run that is kept beside the test:
        ``with padiff.golden("resnet", net, optimizer=optimizer) as rec: ...``.

        With ``--padiff-update`` the run is kept instead, in ``golden/<test module>/<name>`` beside the test's file.

        Args:
            name: of the golden run, one for each that the module has.
            model: the model that is trained in the ``with``.
            layer_map: layers of the golden run and of the model that answer to each other, by path. Default: found.
            policy: when a diff passes. Default: `padiff.NoisePolicy`.
            options: of `padiff.record` (``optimizer=``, ``every_n_steps=``, ...); ``detail`` is ``"sketch"`` here.

        Raises:
            AssertionError: at the end, if the run is another one; at the beginning, if there is no golden run.
            UsageError: an argument is wrong, or no step was recorded.
        """
        __tracebackhide__ = True
        with ShortErrors():
            kept = self._kept(name, layer_map, policy)
            return Golden(kept, self._folders.mktemp(f"padiff-{name}"), model, **options)

    def golden_run(self, name: str, run: str | Path, *, layer_map: Any = None, policy: Policy | None = None) -> None:
        """As `golden`, for a run folder that is there: what a trainer's callback or a script recorded.

        Args:
            run: the run folder. It is copied, and stays as it is.

        Raises:
            AssertionError: it is another run, or there is no golden run.
            UsageError: an argument is wrong.
            RunFolderError: the folder can't be read.
        """
        __tracebackhide__ = True
        with ShortErrors():
            kept = self._kept(name, layer_map, policy)
        missing = kept.missing()
        if missing:
            raise AssertionError(missing)
        checked(kept, Path(run))

    def _kept(self, name: str, layer_map: Any, policy: Policy | None) -> Kept:
        if self._update and name in self._written:
            raise UsageError(f"golden: this test writes {name!r} twice; give each its own name")
        kept = Kept(name, self._item, self._folders, self._update, layer_map, policy)
        self._written.add(name)
        return kept
