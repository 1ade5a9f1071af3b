"""The proof of pipelines: each rank runs the actions of its row."""
