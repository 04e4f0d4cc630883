"""The run folder: files that a run writes and reads back."""
