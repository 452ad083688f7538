// Floats to quantised blocks, for models that don't come quantised.
#include <algorithm>

#include "abi.h"
#include "gguf_blocks.h"
#include "simd.h"

namespace mesh {
namespace {

constexpr int kVecs = kGroup / kWidth;
constexpr int kTries = 8;          // ranges that are tried for a group
constexpr float kTryStep = 0.4f;   // how many steps wider each is divided than the one before
constexpr float kHighest = 15.0f;  // of a 4-bit value

struct Numbers {
  Vec of[kVecs];
};

struct Line {  // weight = scale * value + minimum
  float scale;
  float minimum;
};

Numbers load_numbers(const float* from) {
  Numbers numbers;
  for (int v = 0; v < kVecs; ++v) numbers.of[v] = load(from + v * kWidth);
  return numbers;
}

float sum_of(const Numbers& a) {
  Vec sum = {};
  for (const Vec& vec : a.of) sum += vec;
  return sum_lanes(sum);
}

float sum_of_products(const Numbers& a, const Numbers& b) {
  Vec sum = {};
  for (int v = 0; v < kVecs; ++v) sum = fma(a.of[v], b.of[v], sum);
  return sum_lanes(sum);
}

// To the nearest whole number; right up to 2^22.
Vec nearest(Vec numbers) {
  const Vec rounder = splat(12582912.0f);  // 1.5 * 2^23 leaves no fraction bits
  return numbers + rounder - rounder;
}

// The 4-bit value nearest to each weight on a line.
Numbers values_on(Line line, const Numbers& weights) {
  const float inverse = line.scale != 0.0f ? 1.0f / line.scale : 0.0f;
  Numbers values;
  for (int v = 0; v < kVecs; ++v) {
    const Vec value = nearest((weights.of[v] - line.minimum) * inverse);
    const Vec above = vector_max(value, splat(0.0f));
    values.of[v] = above < kHighest ? above : splat(kHighest);
  }
  return values;
}

// The line with the least squared error for given values.
Line fit(const Numbers& weights, const Numbers& values, Line otherwise) {
  const float sum_w = sum_of(weights), sum_v = sum_of(values);
  const float spread = kGroup * sum_of_products(values, values) - sum_v * sum_v;
  if (spread <= 0.0f) return otherwise;
  const float scale = (kGroup * sum_of_products(weights, values) - sum_w * sum_v) / spread;
  return {scale, (sum_w - scale * sum_v) / kGroup};
}

Line rounded_to_halves(Line line) {
  return {half_to_float(float_to_half(line.scale)), half_to_float(float_to_half(line.minimum))};
}

float squared_error(const Numbers& weights, const Numbers& values, Line line) {
  Numbers errors;
  for (int v = 0; v < kVecs; ++v)
    errors.of[v] = fma(values.of[v], splat(line.scale), splat(line.minimum)) - weights.of[v];
  return sum_of_products(errors, errors);
}

void store_values(const Numbers& values, int8_t* to) {
  float floats[kGroup];
  for (int v = 0; v < kVecs; ++v) store(floats + v * kWidth, values.of[v]);
  for (int i = 0; i < kGroup; ++i) to[i] = static_cast<int8_t>(floats[i]);
}

// Tries the whole range of the weights and narrower ones (extremes are then cut off), fits a line
// to each try's values, rounds it to halves and keeps the one that errs least.
Group quantise_q4_1(const float* from) {
  const Numbers weights = load_numbers(from);
  const auto [low, high] = std::minmax_element(from, from + kGroup);
  Group best = {};
  float least = -1.0f;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    const Line first = {(*high - *low) / (kHighest + kTryStep * static_cast<float>(attempt - 1)),
                        *low};
    const Line line = rounded_to_halves(fit(weights, values_on(first, weights), first));
    const Numbers values = values_on(line, weights);
    const float error = squared_error(weights, values, line);
    if (least >= 0.0f && error >= least) continue;
    least = error;
    best.scale = float_to_half(line.scale);
    best.minimum = float_to_half(line.minimum);
    store_values(values, best.values);
  }
  return best;
}

Group quantise_q8_0(const float* from) {
  float largest = 0.0f;
  for (int i = 0; i < kGroup; ++i) largest = std::max(largest, from[i] < 0 ? -from[i] : from[i]);
  Group group = {};
  group.scale = float_to_half(largest / 127.0f);
  const float scale = half_to_float(group.scale);
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  Numbers values = load_numbers(from);
  for (Vec& vec : values.of) {
    const Vec value = vector_max(nearest(vec * inverse), splat(-127.0f));
    vec = value < 127.0f ? value : splat(127.0f);
  }
  store_values(values, group.values);
  return group;
}

template <class Format>
void quantise(const float* weights, int64_t num_groups, std::byte* blocks) {
  for (int64_t group = 0; group < num_groups; ++group) {
    const Group made = Format::kBits == 8 ? quantise_q8_0(weights) : quantise_q4_1(weights);
    write_block<Format>(made, blocks);
    weights += kGroup;
    blocks += Format::kBlockBytes;
  }
}

}  // namespace
}  // namespace mesh

const char* mesh_quantise(int32_t kind, const float* weights, int64_t num_groups, void* blocks) {
  auto* const to = static_cast<std::byte*>(blocks);
  switch (static_cast<mesh::SourceKind>(kind)) {
    case mesh::SourceKind::kQ4_1:
      mesh::quantise<mesh::Q4_1>(weights, num_groups, to);
      return nullptr;
    case mesh::SourceKind::kQ8_0:
      mesh::quantise<mesh::Q8_0>(weights, num_groups, to);
      return nullptr;
    default:
      return "only Q4_1 and Q8_0 are made here";
  }
}
