"""The inference engine: ``step()`` = schedule, run, sample, report.

api          what a worker may ask of an engine, and what a runner must do for it
sequence     one choice's tokens and how many of them are in the KV cache
block_pool   which block belongs to whom; prefix reuse
scheduler    who computes what in the next step
engine       the step
output       token ids to text, stop strings
runner       the torch runner: any decoder of transformers over paged KV
attention    paged attention, the cache object that transformers' models write to
sampler      logits to tokens
loader       where models come from, what is refused
simulated    a runner without a model, for fleets and faults
thread       the one thread that owns the engine
"""
