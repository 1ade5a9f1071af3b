"""The decisions, each in a file of its own: what a plan leaves open is set between two passes."""
