"""Causes that are computed: predictions of the candidate's record under a cause, compared with the actual record.

* `hypothesis` defines a hypothesis, `proof` decides if it explains the record, `engine` tries those that apply.
* `diff_context` holds the input of hypotheses: the first diff, its step, and the records of the steps around it.
* Each other module has the hypotheses of one group, or the arithmetic that a group uses.
"""
