// bfloat16: the upper half of a float.
#pragma once

#include "simd.h"

namespace mesh {

struct Bf16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(Bf16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to the nearest, ties to even; not-a-number stays so.
inline Bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// kWidth items, widened.
inline Vec load_items(const float* from) { return load(from); }
inline Vec load_items(const Bf16* from) {
#if MESH_VECTOR_WIDTH == 8  // by name: of a conversion in general six instructions would be made
  const auto words = reinterpret_cast<IntVec>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  const auto words = __builtin_convertvector(*reinterpret_cast<const detail::LooseHalfVec*>(from),
                                             IntVec);
#endif
  return as_floats(words << 16);
}

// kWidth items, rounded where the type is narrower.
inline void store_items(float* to, Vec value) { store(to, value); }
inline void store_items(Bf16* to, Vec value) {
  const IntVec bits = as_bits(value);
  const IntVec rounded = bits + 0x7fff + (bits >> 16 & 1);
  const IntVec kept = value == value ? rounded : (bits | 0x400000);
  const HalfVec halves = __builtin_convertvector(kept >> 16, HalfVec);
  *reinterpret_cast<detail::LooseHalfVec*>(to) = halves;
}

}  // namespace mesh
