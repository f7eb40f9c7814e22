"""The code that Inductor has generated, as this process has loaded it."""
