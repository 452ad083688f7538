// What a model does to one row of floats at a time. Dimensions are multiples of kGranule.
#pragma once

#include <cmath>

#include "bf16.h"

namespace mesh {

// to = from / rms(from) * weights
inline void rms_norm(const float* from, const float* weights, int size, float epsilon, float* to) {
  Vec squares = {};
  for (int at = 0; at < size; at += kWidth) {
    const Vec value = load(from + at);
    squares = fma(value, value, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(size);
  const Vec scale = splat(1.0f / std::sqrt(mean + epsilon));
  for (int at = 0; at < size; at += kWidth)
    store(to + at, load(from + at) * scale * load(weights + at));
}

inline void add_row(float* to, const float* from, int size) {
  for (int at = 0; at < size; at += kWidth) store(to + at, load(to + at) + load(from + at));
}

// Rotates one head in place: cosines and sines are [head_dim / 2], halves are paired.
inline void rotate(float* head, const float* cosines, const float* sines, int head_dim) {
  const int half = head_dim / 2;
  int at = 0;
  for (; at + kWidth <= half; at += kWidth) {
    const Vec x = load(head + at), y = load(head + half + at);
    const Vec cosine = load(cosines + at), sine = load(sines + at);
    store(head + at, x * cosine - y * sine);
    store(head + half + at, y * cosine + x * sine);
  }
  for (; at < half; ++at) {  // half of 80 is no multiple of 16
    const float x = head[at], y = head[half + at];
    head[at] = x * cosines[at] - y * sines[at];
    head[half + at] = y * cosines[at] + x * sines[at];
  }
}

// to = silu(gate) * up
inline void gated(const float* gate, const float* up, int size, float* to) {
  for (int at = 0; at < size; at += kWidth) {
    const Vec value = load(gate + at);
    store(to + at, value / (exponential(-value) + 1.0f) * load(up + at));
  }
}

}  // namespace mesh
