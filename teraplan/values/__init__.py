"""What a step, a machine and a plan are: frozen values, in the order in which they come.

step_trace       a measured step: sites, tensors with their windows, updates
recomputed_step  the step that it becomes where activations are computed again
hardware         the machine: tiers, links, budgets
plan             what leaves when, where to, and when it comes back
run_record       what a step that ran under a plan did
graph_table      what a pair of compiled graphs says about itself
status           what a session answers when it is asked
"""
