"""What planning can be tried on without hardware: machines by name, and steps of known models.

`machines` has the figures of accelerators, their links and disks, each with its source. `builder`
makes a trace from a list of operations, `costs` says how long an operation takes, `transformers`
and `convolutional` write down the steps of whole families of models. Nothing here imports torch.
"""
