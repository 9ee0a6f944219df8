"""The judge of a port: two runs checked in a fixed order, and a receipt that another person can verify.

`checks` makes the rows, `scope` names everything that was not compared or compared otherwise, `receipt` holds the
result, `verify` makes it again.
"""

from padiff.port_check.checks import port_check
from padiff.port_check.receipt import (
    Options,
    Receipt,
    changes,
    contradictions,
    other_recordings,
    read_receipt,
    receipt_json,
    table_lines,
    to_markdown,
)

__all__ = [
    "Options",
    "Receipt",
    "changes",
    "contradictions",
    "other_recordings",
    "port_check",
    "read_receipt",
    "receipt_json",
    "table_lines",
    "to_markdown",
]
