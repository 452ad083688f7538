"""HTTP in front, the bus behind. A request passes these files in this order:

app         routes, drain, one log line per request
call        body in, answer out, the client that leaves
endpoints   chat and completions, from body to answer
metering    whose request it is, what it pays (pipeline/access)
convert     OpenAI's body -> InferenceRequest
generate    the token streams behind one answer
sse         deltas -> events                answers   deltas -> one JSON answer
chunks      what those events are           logprobs  in OpenAI's two forms
errors      of HTTP alone                   limits    bounds
note        what another bridge must know   resume    a stream read on, through any bridge
windows     requests without a client       ports     what is needed of the rest of the mesh
"""
