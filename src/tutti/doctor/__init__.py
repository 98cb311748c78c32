"""Is this machine healthy and well configured? Checks with what was seen, expected, and the cure."""
