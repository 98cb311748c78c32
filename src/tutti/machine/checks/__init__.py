"""`tutti doctor`: checks of the health and configuration of machines. Every check names a cure."""
