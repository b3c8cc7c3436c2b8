"""Processes of one program that take batches together: what they agree on, and how they tell each other."""
