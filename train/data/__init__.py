"""Parallel text: loading, encoding, filtering and batching. Section 5.1."""
