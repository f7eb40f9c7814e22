"""A CUDA device: pinned host memory, streams, staging. `runtime` is all that is asked of CUDA."""
