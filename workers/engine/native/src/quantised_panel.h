// How quantised weights lie in memory: a panel is 16 outputs, group after group of 32 inputs.
//
//     16 scales | 16 minima (Q4_1) | values        halves, then as follows
//
//     4 bits: 4 words w of 16 outputs of 4 bytes b; lower half: input 8w + b, upper: 8w + 4 + b
//     8 bits: 16 pairs p of 16 outputs of 2 bytes b: input 2p + b
//
// The same bits as in the file, moved so that one load brings what 8 outputs need for the same
// inputs, and so that a panel is read from end to end: pairs of inputs, for the multiplication of
// 16-bit integers, are bytes side by side, or a shift away from each other.
#pragma once

#include "gguf_blocks.h"
#include "linear.h"
#include "simd.h"

namespace mesh {

constexpr int kQuantisedOutputs = 16;

template <class Format>
struct QuantisedPanel {
  static constexpr size_t kScaleBytes = kQuantisedOutputs * sizeof(uint16_t);
  static constexpr size_t kValuesAt = Format::kHasMinimum ? 2 * kScaleBytes : kScaleBytes;
  static constexpr size_t kGroupBytes = kValuesAt + kQuantisedOutputs * kGroup * Format::kBits / 8;

  static size_t bytes(int num_inputs) {
    return static_cast<size_t>(num_inputs / kGroup) * kGroupBytes;
  }

  // Where the group of an output lies together with those of the panel's others.
  static size_t group_at(int output, int group, int num_inputs) {
    return static_cast<size_t>(output / kQuantisedOutputs) * bytes(num_inputs) +
           static_cast<size_t>(group) * kGroupBytes;
  }

  // `lane`: which of the panel's outputs. The values' places must be zero.
  static void write(const Group& group, int lane, std::byte* to) {
    std::memcpy(to + 2 * lane, &group.scale, sizeof group.scale);
    if (Format::kHasMinimum)
      std::memcpy(to + kScaleBytes + 2 * lane, &group.minimum, sizeof group.minimum);
    for (int input = 0; input < kGroup; ++input) {
      const auto value = static_cast<uint8_t>(group.values[input]);
      to[kValuesAt + byte_of(input, lane)] |= static_cast<std::byte>(value << shift_of(input));
    }
  }

  static Group read(const std::byte* from, int lane) {
    Group group = {};
    std::memcpy(&group.scale, from + 2 * lane, sizeof group.scale);
    if (Format::kHasMinimum)
      std::memcpy(&group.minimum, from + kScaleBytes + 2 * lane, sizeof group.minimum);
    for (int input = 0; input < kGroup; ++input) {
      const auto byte = static_cast<uint8_t>(from[kValuesAt + byte_of(input, lane)]);
      group.values[input] = static_cast<int8_t>(
          Format::kBits == 8 ? byte : byte >> shift_of(input) & 15);
    }
    return group;
  }

 private:
  static size_t byte_of(int input, int lane) {
    if (Format::kBits == 8)
      return static_cast<size_t>((input / 2 * kQuantisedOutputs + lane) * 2 + input % 2);
    return static_cast<size_t>((input / 8 * kQuantisedOutputs + lane) * 4 + input % 4);
  }

  static int shift_of(int input) { return Format::kBits == 4 && input % 8 >= 4 ? 4 : 0; }
};

// Scales or minima of kWidth outputs.
inline Vec load_halves(const std::byte* from) {
#if defined(__AVX512F__) && MESH_VECTOR_WIDTH == 16
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  float lanes[kWidth];
  for (int lane = 0; lane < kWidth; lane += 8)
    _mm256_storeu_ps(lanes + lane, _mm256_cvtph_ps(_mm_loadu_si128(
                                       reinterpret_cast<const __m128i*>(from + 2 * lane))));
  return load(lanes);
#endif
}

}  // namespace mesh
