"""One module for each command, imported only when that command runs."""
