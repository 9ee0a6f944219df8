"""Use of plans in a step: a step follows a plan, or is drafted as a new plan, or neither."""

from __future__ import annotations

from typing import Any

from padiff.frameworks.base import Framework
from padiff.recorder.activations import Activations
from padiff.recorder.calls import Call, Calls
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.step_template import TemplateBuilder
from padiff.recorder.template_matcher import TemplateMatcher
from padiff.recorder.tracer import Tracer


class Planning:
    """Follower or builder of the plan of one step; neither exists before `begin`.

    Attributes:
        following: follower of the plan of the previous step; `None` if the step follows no plan.
        draft: builder of a plan for the next step; `None` if no plan is built.
    """

    def __init__(
        self, framework: Framework, records: RecordBuffer, tracer: Tracer, calls: Calls, activations: Activations
    ) -> None:
        self._framework, self._records, self._tracer = framework, records, tracer
        self._calls, self._activations = calls, activations
        self.following: TemplateMatcher | None = None
        self.draft: TemplateBuilder | None = None

    def begin(self, about: tuple[Any, ...]) -> None:
        """Follow the existing plan if it fits; else build a new one, if the last steps had the same schema.

        Args:
            about: objects that must be identical for a step to follow a plan.
        """
        records, cache = self._records, self._records.known
        if cache.plan is not None and cache.plan.fits(about) and not len(records) and not len(records.copier.samples):
            self.following = TemplateMatcher(
                cache.plan, self._framework, records, self._tracer, self._calls, self._activations
            )
        elif cache.steady:
            self.draft = self._activations.draft = TemplateBuilder(about, self._framework, records, self._tracer)

    def model_begins(self, key: int, call: Call) -> None:
        """Handle the beginning of an outermost call whose inputs are recorded."""
        if self.following is not None and not self.following.model_begins(key, call):
            self.following.abandon()
        if self.draft is not None:
            self.draft.begun(key, call, True)

    def model_ends(self, key: int, output: Any) -> bool:
        """Handle the end of a call; return True if the plan expected it, and so has its records."""
        if self.following is None or self.following.ends(key, output):
            return self.following is not None
        self.following.abandon()
        return False

    def abandon(self) -> None:
        """Stop following or building a plan for this step, after an event that plans do not support."""
        self.draft = self._activations.draft = None
        if self.following is not None:
            self.following.abandon()

    def write(self) -> None:
        """Write the pending records of the followed plan."""
        if self.following is not None:
            self.following.write()

    def settle(self) -> None:
        """Write the pending records at the end of the step; leave the plan if the step is shorter than expected."""
        if self.following is not None and not self.following.whole:
            self.following.abandon()
        self.write()

    def end(self) -> None:
        """Store the plan for the next step, and release the data of this one."""
        cache = self._records.known
        if self.following is not None:
            cache.plan = cache.plan if self.following.whole else None
            self.following.end()
        elif self.draft is not None:
            cache.plan = self.draft.plan()
        self.following = self.draft = self._activations.draft = None
