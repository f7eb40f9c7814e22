"""Measurements of teraplan and the programs they measure; see README.md beside this file."""
