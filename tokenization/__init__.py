"""Learns the shared vocabulary and holds the tokenizer that uses it."""
