"""What a step has to do with plans: it follows one, or is written down for one, or neither."""

from __future__ import annotations

from typing import Any

from padiff.frameworks.base import Framework
from padiff.recorder.activations import Activations
from padiff.recorder.calls import Call, Calls
from padiff.recorder.following import Following
from padiff.recorder.plan import Draft
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.tracer import Tracer


class Planning:
    """The plan of one step. Until `begin` there is none.

    Attributes:
        following: the step, as it follows a plan; `None`: it follows none.
        draft: what a plan for the next step is made of; `None`: none is.
    """

    def __init__(
        self, framework: Framework, records: RecordBuffer, tracer: Tracer, calls: Calls, activations: Activations
    ) -> None:
        self._framework, self._records, self._tracer = framework, records, tracer
        self._calls, self._activations = calls, activations
        self.following: Following | None = None
        self.draft: Draft | None = None

    def begin(self, about: tuple[Any, ...]) -> None:
        """Follow the plan that there is; or where this step may be like those to come, write down what it does.

        Args:
            about: what has to be the same for a step to follow a plan, by identity.
        """
        records, known = self._records, self._records.known
        if known.plan is not None and known.plan.fits(about) and not len(records) and not len(records.copier.samples):
            self.following = Following(
                known.plan, self._framework, records, self._tracer, self._calls, self._activations
            )
        elif known.steady:
            self.draft = self._activations.draft = Draft(about, self._framework, records, self._tracer)

    def model_begins(self, key: int, call: Call) -> None:
        """The outermost layer is called, and what goes in was looked at."""
        if self.following is not None and not self.following.model_begins(key, call):
            self.following.leave()
        if self.draft is not None:
            self.draft.begun(key, call, True)

    def model_ends(self, key: int, output: Any) -> bool:
        """Its call has ended. Whether that was expected, and so is written down."""
        if self.following is None or self.following.ends(key, output):
            return self.following is not None
        self.following.leave()
        return False

    def leave(self) -> None:
        """Something has come that no plan knows: go on without one, and make none of this step."""
        self.draft = self._activations.draft = None
        if self.following is not None:
            self.following.leave()

    def write(self) -> None:
        """Have all written down that has come."""
        if self.following is not None:
            self.following.write()

    def settle(self) -> None:
        """Nothing more is to come: have all written down, and all known where less has come than was expected."""
        if self.following is not None and not self.following.whole:
            self.following.leave()
        self.write()

    def end(self) -> None:
        """The step is over: keep what the next one is expected to do."""
        known = self._records.known
        if self.following is not None:
            known.plan = known.plan if self.following.whole else None
            self.following.end()
        elif self.draft is not None:
            known.plan = self.draft.plan()
        self.following = self.draft = self._activations.draft = None
