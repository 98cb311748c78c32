"""Memory and time of a layout before it runs, and the search for the best layout."""
