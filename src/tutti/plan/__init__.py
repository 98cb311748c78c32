"""Predicts the memory and step time of layouts, and searches for the best layout."""
