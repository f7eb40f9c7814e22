"""Small models in plain PyTorch for tests and measurements.

Each module has a configuration, `build(config)` that gives the same parameters every time, and
`batch(config, batch_size, step)` that gives the same data every time. Every model is called as
`model(inputs, targets)` and returns its loss, a scalar, so that the whole forward pass is compiled.
"""
