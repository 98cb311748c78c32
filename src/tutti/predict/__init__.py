"""What a trained model says: about a data set, sample by sample, or after a prompt."""
