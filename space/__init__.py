"""Web page to try the model, its attention, positional encodings and learning rates."""
