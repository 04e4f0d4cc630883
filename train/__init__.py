"""Training, averaging and evaluation of translation models. Sections 5 and 6.1."""
