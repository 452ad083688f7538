"""Fleets of workers on virtual time: the mesh's own decisions, workers that are made of costs.

fleet_plan   the file that says what there is
events       virtual time
prompts      what prompts have in common
engine       a worker's steps: extents, decode_batch, sequence
worker       a worker on the mesh: what it takes, hands over and says
control      a control process: the real fleet, index, outlook and placement
run          a whole run: ``simulate(plan, trace, options)``
report       what came of it
"""
