"""``padiff mcp``: five read-only tools on run folders, for agents."""
