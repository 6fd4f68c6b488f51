"""Whole studies: many runs from one short file, packed into one program where their shapes allow it."""
