"""The paper's tables, figures and sections, each computed from the package by one command."""
