"""The recorder of running jobs, and the explanations that are made from its rings."""
