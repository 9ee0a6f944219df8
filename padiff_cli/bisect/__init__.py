"""``padiff bisect``: find what makes two trainings differ, among commits, versions, keys of a config or variables."""
