"""Training, averaging and evaluation of translation models, as in sections 5 and 6.1."""
