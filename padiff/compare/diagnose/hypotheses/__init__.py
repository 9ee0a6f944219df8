"""Causes that are computed: what the candidate would have recorded if a cause were true, held against what it did.

* `hypothesis` says what a hypothesis is, `proof` when it explains what was recorded, `engine` tries those that apply.
* `scene` is what they look at: the first diff, its step, and what the steps around it recorded.
* Each other module has the hypotheses of a group, or is what one of them computes with.
"""
