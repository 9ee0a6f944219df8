"""``padiff doctor``: proves that recording changes nothing, and that a run folder is whole."""
