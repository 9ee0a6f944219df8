"""How layers are matched: evidence about two trees of layers, and the one assignment that fits it best."""
