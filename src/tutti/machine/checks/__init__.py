"""Is this machine healthy and well configured? Every check names its cure."""
