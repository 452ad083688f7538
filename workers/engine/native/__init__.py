"""The native path: the Llama family as one C++ call per step.

supports     which models it can run, and why not others
compiler     C++ sources to a library in the user's cache, once per machine
library      that library's functions
blueprint    what must be known of a model beside its weights
tensors      its weights, of a loaded model or of files
quantised    the same in blocks of 4 or 8 bits
weights      all of them, packed into the library's form
rope         rotations, as transformers' own module computes them
scan         what sampling asks of a whole vocabulary
runner       a Runner for the engine
self_test    both paths on one prompt: what differs is not used
first_load   a model as transformers loads it, and what that answers to the self-test
memory       the same from the user's cache, so that the next start does without transformers
load         all of these in order, or the reason why not
src/         the C++ sources; ``abi.h`` is their interface

``compiler`` alone needs no torch.
"""
