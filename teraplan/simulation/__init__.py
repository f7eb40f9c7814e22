"""What a step would take: its idle periods, its memory curve, and its time on given links.

memory_curve, lifetimes   what is where, and for how long nobody needs it
placed_step               the step without the updates that run on the host
channels, step_events     links that carry one transfer after another, and who wants them when
simulator, simulate       the run itself, and the prediction that a plan carries
"""
