"""Whether a plan holds: an oracle that shares no code with planners and simulation.

`check_plan` looks at all of it, the others at what is computed again and at updates on the host.
"""
