"""What `make demo` runs: one GPT under unlimited and under little memory, compared bit by bit."""
