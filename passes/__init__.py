"""The only code that edits FX graphs."""
