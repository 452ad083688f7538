// Blocks of quantised weights as they stand in a GGUF file: 32 weights share a scale.
//
//     Q4_0    half scale |              16 bytes    weight = scale * (value - 8)
//     Q4_1    half scale | half minimum 16 bytes    weight = scale * value + minimum
//     Q8_0    half scale |              32 bytes    weight = scale * value, signed
//
// Byte i of the 16 holds value i in its lower four bits, value i + 16 in its upper four.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mesh {

constexpr int kGroup = 32;

inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

// 32 weights, taken apart: weight = scale * value + minimum.
struct Group {
  uint16_t scale;    // half precision
  uint16_t minimum;  // half precision; Q4_1 alone has it
  int8_t values[kGroup];
};

struct Q4_0 {
  static constexpr int kBits = 4;
  static constexpr bool kHasMinimum = false;
  static constexpr float kZero = 8.0f;  // the value that stands for no weight
  static constexpr size_t kBlockBytes = 18;
};

struct Q4_1 {
  static constexpr int kBits = 4;
  static constexpr bool kHasMinimum = true;
  static constexpr float kZero = 0.0f;
  static constexpr size_t kBlockBytes = 20;
};

struct Q8_0 {
  static constexpr int kBits = 8;
  static constexpr bool kHasMinimum = false;
  static constexpr float kZero = 0.0f;
  static constexpr size_t kBlockBytes = 34;
};

template <class Format>
inline Group read_block(const std::byte* block) {
  Group group = {};
  std::memcpy(&group.scale, block, sizeof group.scale);
  if (Format::kHasMinimum) std::memcpy(&group.minimum, block + 2, sizeof group.minimum);
  const std::byte* values = block + (Format::kHasMinimum ? 4 : 2);
  if constexpr (Format::kBits == 8) {
    std::memcpy(group.values, values, kGroup);
  } else {
    for (int i = 0; i < kGroup / 2; ++i) {
      const auto both = static_cast<uint8_t>(values[i]);
      group.values[i] = static_cast<int8_t>(both & 15);
      group.values[i + kGroup / 2] = static_cast<int8_t>(both >> 4);
    }
  }
  return group;
}

template <class Format>
inline void write_block(const Group& group, std::byte* block) {
  std::memcpy(block, &group.scale, sizeof group.scale);
  if (Format::kHasMinimum) std::memcpy(block + 2, &group.minimum, sizeof group.minimum);
  std::byte* values = block + (Format::kHasMinimum ? 4 : 2);
  if constexpr (Format::kBits == 8) {
    std::memcpy(values, group.values, kGroup);
  } else {
    for (int i = 0; i < kGroup / 2; ++i)
      values[i] = static_cast<std::byte>(group.values[i] | group.values[i + kGroup / 2] << 4);
  }
}

}  // namespace mesh
