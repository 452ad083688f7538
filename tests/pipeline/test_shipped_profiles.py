"""The shipped profiles, derived again from the published figures that their sources name."""

from __future__ import annotations

import pytest

from pipeline.profile_files import shipped_profiles
from workers.engine.simulated import DEFAULT_COSTS

BF16 = {"a100": 312e12, "h100": 989e12, "h200": 989e12}  # FLOP/s, dense
FP8 = 1979e12
BYTES_PER_S = {"a100": 2.039e12, "h100": 3.35e12, "h200": 4.8e12}
MEMORY = {"a100": 80e9, "h100": 80e9, "h200": 141e9}
# Parameters, those of them outside the embedding, layers, width, bytes of a token's KV in BF16.
MODELS = {"8b": (8.03e9, 6.98e9, 32, 4096, 131072), "70b": (70.6e9, 68.5e9, 80, 8192, 327680)}
# vLLM: milliseconds of 128 steps of 8 sequences with 32 to 160 tokens.
STEPS_MS = {
    "a100-8b": 1579.3,
    "h100-8b": 997.5,
    "h200-8b": 834.1,
    "a100-70b": 3990.6,
    "h100-70b": 2444.5,
    "h200-70b": 2075.1,
}
# TensorRT-LLM 0.6.1: milliseconds to the first token after 128 and 2048, of LLaMA 7B and 70B.
FIRST_MS = {
    "a100-8b": (16, 133, 312e12),
    "a100-70b": (47, 377, 312e12),
    "h100-8b": (7, 36, FP8),
    "h100-70b": (26, 109, FP8),
}
NIM_FIRST_MS, NIM_TOKEN_MS = {500: 47.77, 5000: 406.77}, 18.58  # 70B in FP8 on two H100
WEIGHTS, KV, ATTENTION = 0.8, 0.65, 0.3  # shares of bandwidth, of bandwidth, of peak


def square_ms(gpu: str, model: str, num_gpus: int) -> float:
    _, _, layers, width, _ = MODELS[model]
    return 2 * layers * width / num_gpus / (ATTENTION * BF16[gpu]) * 1e3


def share_of_peak(gpu: str, model: str, num_gpus: int) -> float:
    gpu = "h100" if gpu == "h200" else gpu
    short_ms, long_ms, peak = FIRST_MS[f"{gpu}-{model}"]
    work = {"8b": 6.48e9, "70b": 68.5e9}[model]  # that of LLaMA 7B
    squares_ms = (2048**2 - 128**2) * square_ms(gpu, model, num_gpus)
    token_s = (long_ms - short_ms - squares_ms) / (2048 - 128) / 1e3
    return 2 * work / num_gpus / token_s / peak


@pytest.mark.parametrize(("model", "num_gpus"), [("8b", 1), ("70b", 4)])
@pytest.mark.parametrize("gpu", sorted(BF16))
def test_bf16_profiles_follow_from_published_figures(gpu: str, model: str, num_gpus: int) -> None:
    """Peak and bandwidth of the data sheets, first tokens of TensorRT-LLM, steps of vLLM."""
    params, work, _, _, kv_bytes = MODELS[model]
    name = f"{gpu}-llama-{model}" + ("" if num_gpus == 1 else f"-tp{num_gpus}")
    profile = shipped_profiles()[name]
    token_ms = 2 * work / num_gpus / (BF16[gpu] * share_of_peak(gpu, model, num_gpus)) * 1e3
    context_ms = kv_bytes / num_gpus / (KV * BYTES_PER_S[gpu]) * 1e3
    costs = profile.costs
    assert costs.prefill_token_ms == pytest.approx(token_ms, rel=1e-3)
    assert costs.prefill_square_ms == pytest.approx(square_ms(gpu, model, num_gpus), rel=1e-3)
    weights_ms = 2 * params / num_gpus / (WEIGHTS * BYTES_PER_S[gpu]) * 1e3
    assert costs.prefill_base_ms == pytest.approx(weights_ms, rel=1e-3)
    assert costs.decode_context_ms == pytest.approx(context_ms, rel=1e-3)
    assert costs.decode_sequence_ms == pytest.approx(token_ms / 2, rel=1e-3)
    step_ms = costs.decode_base_ms + 8 * costs.decode_sequence_ms + 8 * 96 * context_ms
    assert step_ms == pytest.approx(STEPS_MS[f"{gpu}-{model}"] / 128, rel=1e-3)
    assert profile.kv_token_bytes == kv_bytes
    room = (0.9 * MEMORY[gpu] - 2e9) * num_gpus - 2 * params
    assert 0 <= room / kv_bytes - profile.kv_tokens < 1000


def test_fp8_profiles_follow_from_published_figures() -> None:
    """Two H100 as NVIDIA NIM measured them; one GPU by the same share of its peak."""
    profiles = shipped_profiles()
    pair = profiles["h100-llama-70b-fp8-tp2"].costs
    for num_tokens, first_ms in NIM_FIRST_MS.items():
        predicted_ms = pair.prefill_base_ms + pair.prefill_token_ms * num_tokens
        predicted_ms += pair.prefill_square_ms * num_tokens**2
        assert predicted_ms == pytest.approx(first_ms, rel=1e-3)
    step_ms = pair.decode_base_ms + pair.decode_sequence_ms + 5000 * pair.decode_context_ms
    assert step_ms == pytest.approx(NIM_TOKEN_MS, rel=1e-3)
    for gpu in ("h100", "h200"):
        one, small = profiles[f"{gpu}-llama-70b-fp8"].costs, profiles[f"{gpu}-llama-8b"].costs
        assert one.prefill_token_ms == pytest.approx(2 * pair.prefill_token_ms, rel=1e-3)
        by_weights = 70.6e9 / (2 * 8.03e9)
        assert one.decode_base_ms == pytest.approx(by_weights * small.decode_base_ms, rel=1e-2)


def test_every_profile_says_where_it_is_from() -> None:
    """Name, hardware, room for KV, and a source: nothing is simulated on figures of nobody."""
    profiles = shipped_profiles()
    assert profiles["a100-opt-13b"].costs == DEFAULT_COSTS
    for name, profile in profiles.items():
        assert profile.name == name
        assert profile.hardware
        assert profile.kv_tokens > 50_000
        assert profile.kv_token_bytes > 0
        assert "published" in profile.source
        assert not profile.served, "a published figure is no worker's own"
