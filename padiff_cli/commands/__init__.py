"""The commands: a module each, read only when its command is given."""
