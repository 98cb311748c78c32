"""Inference with a trained run: predictions for a data set, or text from prompts."""
