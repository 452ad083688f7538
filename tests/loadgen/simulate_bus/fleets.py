"""A small fleet and a trace, as files."""

from __future__ import annotations

from schemas.profiles import StepCosts

COSTS = StepCosts(
    prefill_base_ms=0.0,
    prefill_token_ms=0.01,
    prefill_square_ms=0.0,
    decode_base_ms=0.5,
    decode_context_ms=0.0,
    decode_sequence_ms=0.0,
)
_COSTS = ", ".join(f"{name} = {getattr(COSTS, name)}" for name in StepCosts.__struct_fields__)
FLEET = f"""
model = "tiny"
routers = 1

[[workers]]
name = "prefill"
role = "prefill"
count = 6
kv_tokens = 8192
costs = {{ {_COSTS} }}

[[workers]]
name = "decode"
role = "decode"
count = 6
kv_tokens = 8192
costs = {{ {_COSTS} }}
"""
TRACE = """
duration_s = 2
seed = 1

[[part]]
kind = "shared-prefix"
rate = 20
input_len = 600
output_len = 6
"""
