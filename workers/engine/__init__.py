"""The inference engine: ``step()`` = schedule, run, sample, report.

api          what a worker may ask of an engine, and what a runner must do for it
sequence     one choice's tokens and how many of them are in the KV cache
block_pool   which block belongs to whom; prefix reuse
cached_blocks  which cached block goes first
reuse        what a sequence need not compute
arrivals     blocks on their way from the host tier into the pool
line         who stands where among those that wait
scheduler    who computes what in the next step
batch        a step's chunks on a runner
engine       the step
books        that all of it adds up
output       token ids to text, stop strings
build        from a model folder to a torch engine
sources      where models come from: folder, GGUF file, built-in name, hub
convert      from a GGUF file to a model folder
loader       from a folder to a model in memory
probe        what a model keeps per token, found by running it; what is refused
kv_layout    how keys and values lie in a block; the fingerprint
kv_pool      the pool as tensors
runner       the torch runner: any decoder of transformers over paged KV
forward      one forward pass over a packed batch
attention    paged attention in transformers' registry
paged_step   one step's view of the pool; the cache object that models write to
device       the same on CUDA: blocks on the device, copied when they are exchanged
sampler      logits to tokens
candidates   the likeliest tokens in order, without a sort of the vocabulary
penalties    bias, penalties, ends that come too early
simulated    a runner without a model, for fleets and faults
thread       the one thread that owns the engine
"""
