"""The stages of a rank and the actions of its row."""
