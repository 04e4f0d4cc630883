"""The web page: the model, its attention and its positional encoding, to be played with."""
