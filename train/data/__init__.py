"""Parallel text: loaded, encoded, filtered and batched. Section 5.1."""
