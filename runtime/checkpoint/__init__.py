"""Checkpoints on disk, and weights in files of Hugging Face."""
