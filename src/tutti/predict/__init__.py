"""Inference with a trained run: predictions for a dataset, or text from prompts."""
