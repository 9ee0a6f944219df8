"""When a diff passes: the policies, and what they know of rounding."""
