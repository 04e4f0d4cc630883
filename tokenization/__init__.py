"""The tokenizer, and the learning of its shared vocabulary."""
