// Vectors of floats, of the width that the compiler's target has: 8 lanes (AVX2) or 16 (AVX-512).
//
// MESH_VECTOR_WIDTH=16 also compiles for AVX2, out of pairs of registers: slow, but the same
// program as on a wider machine, so that it can be tested on a narrow one.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifndef MESH_VECTOR_WIDTH
#ifdef __AVX512F__
#define MESH_VECTOR_WIDTH 16
#else
#define MESH_VECTOR_WIDTH 8
#endif
#endif

// For what only runs well when its arrays are registers.
#define MESH_INLINE inline __attribute__((always_inline))

namespace mesh {

constexpr int kWidth = MESH_VECTOR_WIDTH;
static_assert(kWidth == 8 || kWidth == 16, "vectors have 8 or 16 lanes");

// Dimensions that vectors run along are multiples of this, whatever the width.
constexpr int kGranule = 16;

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));

namespace detail {
typedef float LooseVec __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int32_t LooseIntVec __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef uint16_t LooseHalfVec __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));
}  // namespace detail

inline Vec load(const float* from) { return *reinterpret_cast<const detail::LooseVec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<detail::LooseVec*>(to) = value; }
inline IntVec load_words(const void* from) {
  return *reinterpret_cast<const detail::LooseIntVec*>(from);
}

// (`Vec{} + value` would be an addition: it turns -0 into 0.)
inline Vec splat(float value) {
#if MESH_VECTOR_WIDTH == 8
  return _mm256_set1_ps(value);
#else
  return Vec{value, value, value, value, value, value, value, value,
             value, value, value, value, value, value, value, value};
#endif
}
inline Vec as_floats(IntVec bits) { return reinterpret_cast<Vec>(bits); }
inline IntVec as_bits(Vec value) { return reinterpret_cast<IntVec>(value); }
inline Vec vector_max(Vec a, Vec b) { return a > b ? a : b; }

// a * b + c, rounded once. Said explicitly (the compiler fuses nothing by itself), so that every
// instance of a template rounds alike.
inline Vec fma(Vec a, Vec b, Vec c) {
#if MESH_VECTOR_WIDTH == 8
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#else
  struct Halves {
    __m256 low, high;
  } x, y, z;
  std::memcpy(&x, &a, sizeof a);
  std::memcpy(&y, &b, sizeof b);
  std::memcpy(&z, &c, sizeof c);
  z.low = _mm256_fmadd_ps(x.low, y.low, z.low);
  z.high = _mm256_fmadd_ps(x.high, y.high, z.high);
  std::memcpy(&c, &z, sizeof c);
  return c;
#endif
}

// One bit per lane of what a comparison gave, lane 0 the lowest.
inline uint32_t lanes_of(IntVec truth) {
#if MESH_VECTOR_WIDTH == 8
  return static_cast<uint32_t>(_mm256_movemask_ps(as_floats(truth)));
#elif defined(__AVX512F__)
  const auto words = reinterpret_cast<__m512i>(truth);
  return _mm512_test_epi32_mask(words, words);
#else
  struct Halves {
    __m256 low, high;
  } halves;
  std::memcpy(&halves, &truth, sizeof truth);
  return static_cast<uint32_t>(_mm256_movemask_ps(halves.low)) |
         static_cast<uint32_t>(_mm256_movemask_ps(halves.high)) << 8;
#endif
}

inline float sum_lanes(Vec value) {
  float lanes[kWidth];
  store(lanes, value);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

inline float max_lanes(Vec value) {
  float lanes[kWidth];
  store(lanes, value);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane)
      lanes[lane] = lanes[lane] > lanes[lane + half] ? lanes[lane] : lanes[lane + half];
  return lanes[0];
}

// Sums of vectors' lanes, of four vectors at a time: `quads_of` gives the sums inside each group of
// four lanes, of vector i in lane i of the group, and `join_quads` adds up the groups of as many
// quads as make kWidth sums.
inline Vec quads_of(const Vec (&rows)[4]) {
#if MESH_VECTOR_WIDTH == 8
#define MESH_SHUFFLE(a, b, k) \
  __builtin_shufflevector(a, b, k, k + 2, 8 + k, 10 + k, 4 + k, 6 + k, 12 + k, 14 + k)
#else
#define MESH_SHUFFLE(a, b, k)                                                                   \
  __builtin_shufflevector(a, b, k, k + 2, 16 + k, 18 + k, 4 + k, 6 + k, 20 + k, 22 + k, 8 + k, \
                          10 + k, 24 + k, 26 + k, 12 + k, 14 + k, 28 + k, 30 + k)
#endif
  // Halves of two rows side by side, then quarters of four.
  const Vec first = MESH_SHUFFLE(rows[0], rows[1], 0) + MESH_SHUFFLE(rows[0], rows[1], 1);
  const Vec second = MESH_SHUFFLE(rows[2], rows[3], 0) + MESH_SHUFFLE(rows[2], rows[3], 1);
  return MESH_SHUFFLE(first, second, 0) + MESH_SHUFFLE(first, second, 1);
#undef MESH_SHUFFLE
}

inline Vec join_quads(const Vec (&quads)[kWidth / 4]) {
#if MESH_VECTOR_WIDTH == 8
  return __builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
#define MESH_QUADS(a, b, i, j)                                                                  \
  __builtin_shufflevector(a, b, i, i + 1, i + 2, i + 3, j, j + 1, j + 2, j + 3, 16 + i, 17 + i, \
                          18 + i, 19 + i, 16 + j, 17 + j, 18 + j, 19 + j)
  const Vec low = MESH_QUADS(quads[0], quads[1], 0, 8) + MESH_QUADS(quads[0], quads[1], 4, 12);
  const Vec high = MESH_QUADS(quads[2], quads[3], 0, 8) + MESH_QUADS(quads[2], quads[3], 4, 12);
  return MESH_QUADS(low, high, 0, 8) + MESH_QUADS(low, high, 4, 12);
#undef MESH_QUADS
#endif
}

// e^x to about one unit in the last place; exactly 1 at 0. Below -87 it stays at 1e-38.
inline Vec exponential(Vec x) {
  x = vector_max(x, splat(-87.3f));
  x = x < splat(88.3f) ? x : splat(88.3f);
  const Vec rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no fraction bits
  const Vec shifted = fma(x, splat(1.44269504f), rounder);
  const Vec power = shifted - rounder;
  Vec rest = fma(power, splat(-0.693359375f), x);  // ln 2 in two parts
  rest = fma(power, splat(2.12194440e-4f), rest);
  Vec series = splat(1.9875691500e-4f);  // Taylor's, with coefficients fitted on [-0.35, 0.35]
  series = fma(series, rest, splat(1.3981999507e-3f));
  series = fma(series, rest, splat(8.3334519073e-3f));
  series = fma(series, rest, splat(4.1665795894e-2f));
  series = fma(series, rest, splat(1.6666665459e-1f));
  series = fma(series, rest, splat(5.0000001201e-1f));
  const Vec value = fma(series, rest * rest, rest + 1.0f);
  const IntVec exponent = (as_bits(shifted) - as_bits(rounder) + 127) << 23;
  return value * as_floats(exponent);
}

}  // namespace mesh
