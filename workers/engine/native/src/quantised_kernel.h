// What the kinds of quantised weights have in common: packing and unpacking.
#pragma once

#include "bf16.h"
#include "quantised_panel.h"

namespace mesh {

template <class Format>
constexpr SourceKind kBlocksOf = Format::kBits == 8        ? SourceKind::kQ8_0
                                 : Format::kHasMinimum ? SourceKind::kQ4_1
                                                       : SourceKind::kQ4_0;

template <class Format>
class QuantisedKernel : public LinearKernel {
 public:
  using Panel = QuantisedPanel<Format>;

  int panel_outputs() const override { return kQuantisedOutputs; }
  size_t panel_bytes(int num_inputs) const override { return Panel::bytes(num_inputs); }

  const char* refusal(int num_inputs) const override {
    return num_inputs % kGroup == 0 ? nullptr : "quantised weights need rows of a multiple of 32";
  }

  // Blocks of the same format are taken as they are; floats are quantised here, but not to Q4_0,
  // which Q4_1 beats.
  bool pack(PackedLinear& weights, int first_output, int num_rows, const void* source,
            SourceKind source_kind) const override {
    if (source_kind == kBlocksOf<Format>)
      pack_blocks(weights, first_output, num_rows, static_cast<const std::byte*>(source));
    else if (kQuantises && source_kind == SourceKind::kFp32)
      pack_numbers(weights, first_output, num_rows, static_cast<const float*>(source));
    else if (kQuantises && source_kind == SourceKind::kBf16)
      pack_numbers(weights, first_output, num_rows, static_cast<const Bf16*>(source));
    else
      return false;
    return true;
  }

  void unpack(const PackedLinear& weights, int output, float* row) const override {
    for (int first = 0; first < weights.num_inputs; first += kGroup) {
      const std::byte* from =
          weights.data.data() + Panel::group_at(output, first / kGroup, weights.num_inputs);
      const Group group = Panel::read(from, output % kQuantisedOutputs);
      const float scale = half_to_float(group.scale), minimum = half_to_float(group.minimum);
      for (int i = 0; i < kGroup; ++i)
        row[first + i] =
            scale * (static_cast<float>(group.values[i]) - Format::kZero) + minimum;
    }
  }

 private:
  static constexpr bool kQuantises = Format::kBits == 8 || Format::kHasMinimum;

  static void pack_blocks(PackedLinear& weights, int first_output, int num_rows,
                          const std::byte* source) {
    for (int row = 0; row < num_rows; ++row)
      for (int group = 0; group < weights.num_inputs / kGroup; ++group) {
        put(weights, first_output + row, group, read_block<Format>(source));
        source += Format::kBlockBytes;
      }
  }

  template <class Number>
  static void pack_numbers(PackedLinear& weights, int first_output, int num_rows,
                           const Number* source) {
    for (int row = 0; row < num_rows; ++row)
      for (int group = 0; group < weights.num_inputs / kGroup; ++group) {
        float numbers[kGroup];
        for (float& number : numbers) number = to_float(*source++);
        put(weights, first_output + row, group,
            Format::kBits == 8 ? quantise_q8_0(numbers) : quantise_q4_1(numbers));
      }
  }

  static void put(PackedLinear& weights, int output, int group, const Group& content) {
    std::byte* to = weights.data.data() + Panel::group_at(output, group, weights.num_inputs);
    Panel::write(content, output % kQuantisedOutputs, to);
  }
};

}  // namespace mesh
