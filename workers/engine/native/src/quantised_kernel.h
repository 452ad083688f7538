// What the kinds of quantised weights have in common: packing and unpacking.
#pragma once

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

  // Takes blocks of the same format, as they are.
  bool pack(PackedLinear& weights, int first_output, int num_rows, const void* source,
            SourceKind source_kind) const override {
    if (source_kind != kBlocksOf<Format>) return false;
    const auto* block = static_cast<const std::byte*>(source);
    for (int output = first_output; output < first_output + num_rows; ++output)
      for (int group = 0; group < weights.num_inputs / kGroup; ++group) {
        std::byte* to = weights.data.data() + Panel::group_at(output, group, weights.num_inputs);
        Panel::write(read_block<Format>(block), output % kQuantisedOutputs, to);
        block += Format::kBlockBytes;
      }
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
};

}  // namespace mesh
