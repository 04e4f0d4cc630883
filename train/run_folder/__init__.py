"""The run folder: what a run writes and reads back."""
