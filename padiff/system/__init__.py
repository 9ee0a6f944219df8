"""The process around a training: environment variables, parent processes, other installed distributions."""
