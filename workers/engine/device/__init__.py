"""The engine on a device with memory of its own: CUDA.

select      which device a worker computes on
choice      which attention a device and a model allow, and in which order they are tried
needs       what a model's attention asks for, found by running it
inputs      one step's numbers in one array: one copy to the device
buckets     sizes to which steps of decodes are padded
batch       what attention must know of a step
backends    attention over the paged pool, four ways behind one signature
triton_decode  one of them: a kernel for steps of decodes
check       each way against plain attention, at load
step        the cache object that models write to
graphs      steps recorded once per bucket and replayed
runner      the runner; copies between the device's pool and the shared one
load        from a model in memory to that runner
"""
