"""Training loops: recording behind a host's callbacks, comparing while two runs grow, streaming."""
