"""What a model is to padiff: its tree of layers, which of them are meant, and what of two frameworks is the same."""
