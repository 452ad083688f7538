// Products of pairs of bfloat16 values: the one place with AVX512-BF16 in it.
//
// MESH_BF16_DOT is 1 where input rows are rounded to bfloat16: on processors with the instruction,
// or when set so to test that form of the program elsewhere.
#pragma once

#include "bf16.h"

#ifndef MESH_BF16_DOT
#ifdef __AVX512BF16__
#define MESH_BF16_DOT 1
#else
#define MESH_BF16_DOT 0
#endif
#endif

namespace mesh {

// The first (0) or second (1) members of kWidth pairs, as floats.
template <int Member>
inline Vec widen_member(IntVec pairs) {
  return as_floats(Member == 0 ? pairs << 16 : pairs & static_cast<int32_t>(0xffff0000));
}

// One pair, in all lanes.
inline IntVec splat_pair(const Bf16* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return IntVec{} + bits;
}

// The instruction in terms of others: the second members' product is added first.
inline Vec add_pair_products_emulated(Vec sums, IntVec a, IntVec b) {
  sums = fma(widen_member<1>(a), widen_member<1>(b), sums);
  return fma(widen_member<0>(a), widen_member<0>(b), sums);
}

// sums + a[0] * b[0] + a[1] * b[1] for kWidth pairs.
inline Vec add_pair_products(Vec sums, IntVec a, IntVec b) {
#if defined(__AVX512BF16__) && MESH_VECTOR_WIDTH == 16
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  return add_pair_products_emulated(sums, a, b);
#endif
}

}  // namespace mesh
