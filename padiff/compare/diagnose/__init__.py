"""The likely cause of the first diff, and the functions and values that look for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from padiff.system.lazily import names_from

if TYPE_CHECKING:
    from padiff.compare.diagnose.explained_later import cause_found_later
    from padiff.compare.diagnose.first import described, scene_of, with_proof
    from padiff.compare.diagnose.followups.followup_context import FollowupContext
    from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
    from padiff.compare.diagnose.pinned_choices import contradicted
    from padiff.compare.diagnose.place import Evidence, Place
    from padiff.compare.diagnose.settings import before_the_first, settings_first, shows
    from padiff.compare.diagnose.shifted import calls_in_training_mode, evaluated_calls
else:
    # Imported on first access: these modules are a third of a comparison's imports, and runs that match need none of
    # them.
    __getattr__ = names_from(
        __name__,
        {
            "DiffContext": "padiff.compare.diagnose.hypotheses.diff_context",
            "FollowupContext": "padiff.compare.diagnose.followups.followup_context",
            "Evidence": "padiff.compare.diagnose.place",
            "Place": "padiff.compare.diagnose.place",
            "before_the_first": "padiff.compare.diagnose.settings",
            "cause_found_later": "padiff.compare.diagnose.explained_later",
            "calls_in_training_mode": "padiff.compare.diagnose.shifted",
            "evaluated_calls": "padiff.compare.diagnose.shifted",
            "contradicted": "padiff.compare.diagnose.pinned_choices",
            "described": "padiff.compare.diagnose.first",
            "scene_of": "padiff.compare.diagnose.first",
            "settings_first": "padiff.compare.diagnose.settings",
            "shows": "padiff.compare.diagnose.settings",
            "with_proof": "padiff.compare.diagnose.first",
        },
    )

__all__ = [
    "DiffContext",
    "FollowupContext",
    "Evidence",
    "Place",
    "before_the_first",
    "calls_in_training_mode",
    "cause_found_later",
    "contradicted",
    "described",
    "evaluated_calls",
    "scene_of",
    "settings_first",
    "shows",
    "with_proof",
]
