"""``padiff fix``: proposes edits of the candidate's source, and tries each on a copy of the working folder."""
