"""How fast a step can be at best, whatever the plan.

`bound` is quick and is part of every plan; `relaxation` solves a linear program over the groups of
`checkpoints`, which takes longer and is tighter.
"""
