"""The native path: the Llama family as one C++ call per step.

supports     which models it can run, and why not others
compiler     C++ sources to a library in the user's cache, once per machine
library      that library's functions
weights      a model's weights, packed into the library's form
rope         rotations, from transformers' own module
scan         what sampling asks of a whole vocabulary
runner       a Runner for the engine
self_test    both paths on one prompt: what differs is not used
load         all of these in order, or the reason why not
src/         the C++ sources; ``abi.h`` is their interface

``compiler`` alone needs no torch.
"""
