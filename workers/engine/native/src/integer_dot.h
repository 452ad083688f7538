// Sums of products of 16-bit integers for 8 outputs at a time, and what goes with them.
//
// MESH_PAIR_DOT is 1 where the processor multiplies two pairs and adds them to a sum in one
// instruction (`vpdpwssd`, of AVX512-VNNI or AVX-VNNI). Sums of integers are exact: with or without
// it the results are the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "quantised_panel.h"

#ifndef MESH_PAIR_DOT
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define MESH_PAIR_DOT 1
#else
#define MESH_PAIR_DOT 0
#endif
#endif

namespace mesh {

inline __m256i splat_pair(const int16_t* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return _mm256_set1_epi32(bits);
}

inline __m256 load_8_halves(const std::byte* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// 8 sums of products of pairs.
class PairSums {
 public:
  void add(__m256i a, __m256i b) {
#if MESH_PAIR_DOT && defined(__AVX512VNNI__) && defined(__AVX512VL__)
    sums_ = _mm256_dpwssd_epi32(sums_, a, b);
#elif MESH_PAIR_DOT
    sums_ = _mm256_dpwssd_avx_epi32(sums_, a, b);
#else
    sums_ = _mm256_add_epi32(sums_, _mm256_madd_epi16(a, b));
    // Not to be put off: a compiler that adds up all products at the end keeps none in registers.
    asm("" : "+x"(sums_));
#endif
  }

  __m256 floats() const { return _mm256_cvtepi32_ps(sums_); }

 private:
  __m256i sums_ = _mm256_setzero_si256();
};

// Rounds 32 inputs to integers of at most `most` in size; returns what one of them stands for.
template <class Integer>
inline float round_inputs(const float* row, float most, Integer* integers, int& sum) {
  typedef Integer Narrow __attribute__((vector_size(kWidth * sizeof(Integer)), aligned(1)));
  Vec sizes = {};
  for (int i = 0; i < kGroup; i += kWidth) {
    const Vec values = load(row + i);
    sizes = vector_max(sizes, vector_max(values, -values));
  }
  const float largest = max_lanes(sizes);
  // Inputs so small that their inverse is no number count as zeros.
  const float inverse = largest > 1e-30f ? most / largest : 0.0f;
  const Vec rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no fraction bits
  IntVec sums = {};
  for (int i = 0; i < kGroup; i += kWidth) {
    const IntVec rounded = as_bits(fma(load(row + i), splat(inverse), rounder)) - as_bits(rounder);
    sums += rounded;
    const auto narrow = __builtin_convertvector(rounded, Narrow);
    std::memcpy(integers + i, &narrow, sizeof narrow);
  }
  sum = 0;
  for (int lane = 0; lane < kWidth; ++lane) sum += sums[lane];
  return largest > 1e-30f ? largest / most : 0.0f;
}

// Fetches what will be read soon; the processor's own guesses stop at the end of each page.
template <size_t Bytes>
inline void prefetch(const std::byte* from) {
  constexpr size_t kAhead = 2560;
  for (size_t at = 0; at < Bytes; at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead + at, _MM_HINT_T0);
}

inline void begin_panel(const PackedLinear& weights, int panel, __m256 (&sums)[2]) {
  const float* bias = weights.bias.data() + static_cast<size_t>(panel) * kQuantisedOutputs;
  sums[0] = _mm256_loadu_ps(bias);
  sums[1] = _mm256_loadu_ps(bias + 8);
}

// Stores a panel's results, as many as there are outputs. `row` is the whole output row.
inline void end_panel(const PackedLinear& weights, int panel, const __m256 (&sums)[2], float* row) {
  float values[kQuantisedOutputs];
  _mm256_storeu_ps(values, sums[0]);
  _mm256_storeu_ps(values + 8, sums[1]);
  const int first = panel * kQuantisedOutputs;
  const auto count = static_cast<size_t>(std::min(kQuantisedOutputs, weights.num_outputs - first));
  std::memcpy(row + first, values, count * sizeof(float));
}

template <int Most, class Body>
inline void call_with(int number, const Body& body) {
  if constexpr (Most > 1) {
    if (number < Most) return call_with<Most - 1>(number, body);
  }
  body(std::integral_constant<int, Most>());
}

// Calls body(number of rows, first row, panel) for all of a tile: each panel for all rows, in as
// few groups of at most MostRows as there can be, of sizes as equal as can be.
template <int MostRows, class Body>
inline void for_each_group(Tile tile, const Body& body) {
  const int num_rows = tile.end_row - tile.first_row;
  const int num_groups = (num_rows + MostRows - 1) / MostRows;
  for (int panel = tile.first_panel; panel < tile.end_panel; ++panel)
    for (int group = 0; group < num_groups; ++group) {
      const int first = tile.first_row + num_rows * group / num_groups;
      const int end = tile.first_row + num_rows * (group + 1) / num_groups;
      call_with<MostRows>(end - first, [&](auto rows) { body(rows, first, panel); });
    }
}

}  // namespace mesh
