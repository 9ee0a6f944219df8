"""``padiff run SCRIPT``: records a script of which no line changes."""
