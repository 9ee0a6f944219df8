"""The fixture `padiff`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import padiff
from padiff.compare import Policy
from padiff.errors import UsageError
from padiff.records import Both, Report
from padiff.weights.assign import AssignError
from padiff_pytest.command import sorted_command
from padiff_pytest.golden import Golden, Kept, checked
from padiff_pytest.same import compared
from padiff_pytest.verdict import ShortErrors, failure_text


class Padiff:
    """The fixture `padiff` of one test.

    In the test, the fixture hides the package of the same name; other attributes are those of the package:
    ``padiff.record``, ``padiff.Tolerance``.
    """

    def __init__(self, item: pytest.Item, folders: pytest.TempPathFactory, update: bool, bless: bool = False) -> None:
        self._item, self._folders, self._update, self._bless = item, folders, update, bless
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
        """Train two models side by side in memory, and fail the test unless the trainings match.

        Args:
            reference: the reference model, of torch or paddle.
            candidate: the model to check, of torch or paddle. Both models are trained, and stay trained.
            inputs: inputs of both models: a numpy array or tensor, a tuple of these (by position), or a mapping (by
                name); or a list with one of these for each step. Each model receives tensors of its own framework.
            labels: further arguments of the loss, in the same forms as `inputs`. Default: none.
            steps: number of steps. Default: the length of the lists, else 3 with optimizers and 1 without.
            optimizers: a pair, each created with its own model's parameters. Default: no updates.
            loss: a function of the output (and of the labels, if there are any) that returns a tensor of one element;
                or a pair of such functions. Default: the sum of the mean squares of all floating-point outputs.
            layer_map: pairs of layers, as objects or paths; all other layers are paired automatically.
            start_equal: True to copy the reference's weights and buffers to the candidate first. Default True.
            policy: decides which diffs pass. Default: `padiff.NoisePolicy`; `padiff.Tolerance` is a fixed limit.
            detail: amount of data recorded of each tensor, in the form that `padiff.record` accepts. Default
                ``"full"``.
            max_bytes: largest memory for each run. Default 1 GB; tensors beyond the limit are not compared.

        Returns:
            The report, if the trainings match.

        Raises:
            AssertionError: the trainings differ, or the result is unknown, or the weights can't be copied.
            UsageError: an argument is wrong.
        """
        __tracebackhide__ = True
        with ShortErrors():
            result = compared(
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
        if isinstance(result, AssignError):
            raise AssertionError(f"the candidate can't start equal: its weights can't be assigned. {result}")
        if not result.passed:
            raise AssertionError(failure_text(result))
        return result

    def golden(
        self,
        name: str,
        model: Any,
        *,
        layer_map: Any = None,
        policy: Policy | None = None,
        **options: Any,
    ) -> Golden:
        """Record a training, and fail the test unless the run matches the golden run stored beside the test.

        ``with padiff.golden("resnet", net, optimizer=optimizer) as rec: ...``

        With ``--padiff-update`` the run is stored as the golden run, in ``golden/<test module>/<name>`` beside the
        test's file.

        Args:
            name: name of the golden run, unique in the test module.
            model: the model that is trained inside the ``with`` block.
            layer_map: pairs of layers of the golden run and of the model, by path. Default: paired automatically.
            policy: decides which diffs pass. Default: `padiff.NoisePolicy`.
            options: options of `padiff.record` (``optimizer=``, ``every_n_steps=``, ...); ``detail`` is ``"sketch"`` by
                default.

        Raises:
            AssertionError: at the end, if the run differs; at the beginning, if there is no golden run.
            UsageError: an argument is wrong, or no step was recorded.
        """
        __tracebackhide__ = True
        with ShortErrors():
            golden_run = self._kept(name, layer_map, policy)
            return Golden(golden_run, self._folders.mktemp(f"padiff-{name}"), model, **options)

    def golden_run(self, name: str, run: str | Path, *, layer_map: Any = None, policy: Policy | None = None) -> None:
        """Compare a recorded run folder with the golden run, like `golden`.

        Use this for runs that a trainer's callback or a script recorded.

        Args:
            name: name of the golden run, unique in the test module.
            run: the run folder, which is not changed.
            layer_map: pairs of layers, as in `golden`.
            policy: decides which diffs pass, as in `golden`.

        Raises:
            AssertionError: the run differs, or there is no golden run.
            UsageError: an argument is wrong.
            RunFolderError: the folder can't be read.
        """
        __tracebackhide__ = True
        with ShortErrors():
            golden_run = self._kept(name, layer_map, policy)
        missing = golden_run.missing()
        if missing:
            raise AssertionError(missing)
        checked(golden_run, Path(run))

    def golden_command(self, name: str, *command: str | Path) -> None:
        """Run a training command, and fail the test if rounding does not explain its change from the golden run.

        The command runs like in ``padiff golden check``, and is sorted by the noise that was measured with the golden
        run. A drift passes with a `DriftWarning`; ``--padiff-bless`` replaces the golden run by it.

        Args:
            name: name of the golden run, unique in the test module.
            command: the program and its arguments.

        Raises:
            AssertionError: the training is not the same any more, or there is no golden run.
            UsageError: the command trains for fewer steps, or the name is invalid.
        """
        __tracebackhide__ = True
        with ShortErrors():
            text = sorted_command(
                self._kept(name, None, None), [str(word) for word in command], self._folders, self._bless
            )
        if text:
            raise AssertionError(text)

    def _kept(self, name: str, layer_map: Any, policy: Policy | None) -> Kept:
        if self._update and name in self._written:
            raise UsageError(f"golden: this test writes {name!r} twice; give each its own name")
        golden_run = Kept(name, self._item, self._folders, self._update, layer_map, policy)
        self._written.add(name)
        return golden_run
