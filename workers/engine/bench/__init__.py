"""Measuring an engine beside transformers, in one process and by turns.

plan        what to measure
measure     everything that ``mesh bench engine`` measures
timing      callables by turns, so that a busy moment of the machine hits all of them
ours        steps of one of our runners
reference   the same steps by transformers' own modules
fidelity    how far our logits are from transformers' in float32
"""
