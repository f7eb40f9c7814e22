"""Parameters, gradients and optimizer state that leave memory and keep their addresses."""
