// Quantised weights times rows that are quantised too: what is the same for 4 and for 8 bits.
#pragma once

#include "integer_dot.h"
#include "quantised_kernel.h"

namespace mesh {

// Products of one format's groups. `Group` says how:
//
//     Format                            of the weights
//     Inputs                            a group of an input row, prepared
//     prepare(32 floats)                makes one
//     add<Rows>(weights, inputs, sums)  adds a group's products to 16 outputs of each row
template <class Group>
class IntegerKernel final : public QuantisedKernel<typename Group::Format> {
 public:
  using Panel = QuantisedPanel<typename Group::Format>;
  using Inputs = typename Group::Inputs;

  size_t prepared_bytes(int num_inputs) const override {
    return static_cast<size_t>(num_inputs / kGroup) * sizeof(Inputs);
  }

  void prepare(const float* row, int num_inputs, std::byte* prepared) const override {
    for (int input = 0; input < num_inputs; input += kGroup, prepared += sizeof(Inputs)) {
      const Inputs inputs = Group::prepare(row + input);
      std::memcpy(prepared, &inputs, sizeof inputs);
    }
  }

  void multiply(const PackedLinear& weights, InputRows inputs, OutputRows outputs,
                Tile tile) const override {
    for_each_group<kMostRows>(tile, [&](auto rows, int first_row, int panel) {
      multiply_rows<rows>(weights, inputs, outputs, first_row, panel);
    });
  }

 private:
  static constexpr int kMostRows = 4;  // more sums than that do not stay in 16 registers

  template <int Rows>
  static void multiply_rows(const PackedLinear& weights, InputRows inputs, OutputRows outputs,
                            int first_row, int panel) {
    const Inputs* rows[Rows];
    __m256 sums[Rows][2];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      rows[row] = inputs.row<Inputs>(first_row + row);
      begin_panel(weights, panel, sums[row]);
    }
    const std::byte* group =
        weights.data.data() + static_cast<size_t>(panel) * Panel::bytes(weights.num_inputs);
    for (int left = weights.num_inputs / kGroup; left > 0; --left, group += Panel::kGroupBytes) {
      prefetch<Panel::kGroupBytes>(group);
      Group::template add<Rows>(group, rows, sums);
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) ++rows[row];
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
      end_panel(weights, panel, sums[row], outputs.row(first_row + row));
  }
};

}  // namespace mesh
