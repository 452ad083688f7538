// Quantised weights times rows of floats, as exact as weights of floats: each weight is turned into
// the float that it stands for and multiplied as panel_product.h does, in the same order. So the
// result is that of fp32 weights, bit for bit; only less memory is read.
#include <algorithm>

#include "linear_kinds.h"
#include "quantised_kernel.h"

namespace mesh {
namespace {

constexpr int kVecs = kQuantisedOutputs / kWidth;  // in a panel
constexpr int kRowsPerPass = 96;                   // dequantise once for so many rows

// The weights of one group, [kGroup][kQuantisedOutputs].
template <class Format>
void dequantise(const std::byte* group, float* to, int row_stride) {
  using Panel = QuantisedPanel<Format>;
#pragma GCC unroll 2
  for (int v = 0; v < kVecs; ++v, to += kWidth) {
    const Vec scale = load_halves(group + 2 * kWidth * v);
    Vec minimum = splat(0.0f);
    if (Format::kHasMinimum) minimum = load_halves(group + Panel::kScaleBytes + 2 * kWidth * v);
    const auto put = [&](int input, IntVec values) {
      const Vec value = __builtin_convertvector(values, Vec) - splat(Format::kZero);
      store(to + input * row_stride, fma(value, scale, minimum));
    };
    const std::byte* from = group + Panel::kValuesAt;
    if constexpr (Format::kBits == 4) {
      for (int word = 0; word < kGroup / 8; ++word) {
        const IntVec bits = load_words(from + 4 * (kQuantisedOutputs * word + kWidth * v));
        for (int byte = 0; byte < 4; ++byte) {
          put(8 * word + byte, bits >> (8 * byte) & 15);
          put(8 * word + 4 + byte, bits >> (8 * byte + 4) & 15);
        }
      }
    } else {
      for (int pair = 0; pair < kGroup / 2; ++pair) {
        const auto halves = *reinterpret_cast<const detail::LooseHalfVec*>(
            from + 2 * (kQuantisedOutputs * pair + kWidth * v));
        const IntVec bits = __builtin_convertvector(halves, IntVec);
        put(2 * pair, bits << 24 >> 24);
        put(2 * pair + 1, bits << 16 >> 24);
      }
    }
  }
}

// Adds the products of one group's inputs to the sums of some rows.
template <int Rows, int Panels>
void add_group(const float* weights, const float* const (&rows)[Rows], int first_input,
               float* sums) {
  constexpr int kOutputs = Panels * kQuantisedOutputs;
  Vec of[Rows][Panels * kVecs];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < Panels * kVecs; ++v) of[row][v] = load(sums + row * kOutputs + v * kWidth);
  for (int input = 0; input < kGroup; ++input, weights += kOutputs) {
    Vec weight[Panels * kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < Panels * kVecs; ++v) weight[v] = load(weights + v * kWidth);
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const Vec value = splat(rows[row][first_input + input]);
#pragma GCC unroll 4
      for (int v = 0; v < Panels * kVecs; ++v) of[row][v] = fma(value, weight[v], of[row][v]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < Panels * kVecs; ++v) store(sums + row * kOutputs + v * kWidth, of[row][v]);
}

template <int Rows, int Panels>
void add_rows(const float* weights, InputRows inputs, int first_row, int num_rows, int first_input,
              float* sums) {
  int done = 0;
  for (; done + Rows <= num_rows; done += Rows) {
    const float* rows[Rows];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) rows[row] = inputs.row<float>(first_row + done + row);
    add_group<Rows, Panels>(weights, rows, first_input,
                            sums + done * Panels * kQuantisedOutputs);
  }
  if constexpr (Rows > 1) {
    if (done < num_rows)
      add_rows<Rows / 2, Panels>(weights, inputs, first_row + done, num_rows - done, first_input,
                                 sums + done * Panels * kQuantisedOutputs);
  }
}

template <class Format>
class DequantisedKernel final : public QuantisedKernel<Format> {
 public:
  size_t prepared_bytes(int) const override { return 0; }
  void prepare(const float*, int, std::byte*) const override {}

  void multiply(const PackedLinear& weights, InputRows inputs, OutputRows outputs,
                Tile tile) const override {
    for (int row = tile.first_row; row < tile.end_row; row += kRowsPerPass) {
      const int num_rows = std::min(kRowsPerPass, tile.end_row - row);
      int panel = tile.first_panel;
      // Two panels at once: twice as many chains of additions keep the units busy.
      for (; panel + 2 <= tile.end_panel; panel += 2)
        multiply_panels<2, 3>(weights, inputs, outputs, row, num_rows, panel);
      if (panel < tile.end_panel)
        multiply_panels<1, 6>(weights, inputs, outputs, row, num_rows, panel);
    }
  }

 private:
  template <int Panels, int Rows>
  static void multiply_panels(const PackedLinear& weights, InputRows inputs, OutputRows outputs,
                              int first_row, int num_rows, int first_panel) {
    using Panel = QuantisedPanel<Format>;
    constexpr int kOutputs = Panels * kQuantisedOutputs;
    alignas(64) float floats[kGroup * kOutputs];
    alignas(64) float sums[kRowsPerPass * kOutputs];
    const float* bias = weights.bias.data() + first_panel * kQuantisedOutputs;
    for (int row = 0; row < num_rows; ++row)
      std::memcpy(sums + row * kOutputs, bias, kOutputs * sizeof(float));
    for (int input = 0; input < weights.num_inputs; input += kGroup) {
      for (int p = 0; p < Panels; ++p) {
        const int output = (first_panel + p) * kQuantisedOutputs;
        const size_t at = Panel::group_at(output, input / kGroup, weights.num_inputs);
        dequantise<Format>(weights.data.data() + at, floats + p * kQuantisedOutputs, kOutputs);
      }
      add_rows<Rows, Panels>(floats, inputs, first_row, num_rows, input, sums);
    }
    const int first = first_panel * kQuantisedOutputs;
    const auto count = static_cast<size_t>(std::min(kOutputs, weights.num_outputs - first));
    for (int row = 0; row < num_rows; ++row)
      std::memcpy(outputs.row(first_row + row) + first, sums + row * kOutputs,
                  count * sizeof(float));
  }
};

}  // namespace

const LinearKernel& exact_q4_0_kernel() {
  static const DequantisedKernel<Q4_0> kernel;
  return kernel;
}

const LinearKernel& exact_q4_1_kernel() {
  static const DequantisedKernel<Q4_1> kernel;
  return kernel;
}

const LinearKernel& exact_q8_0_kernel() {
  static const DequantisedKernel<Q8_0> kernel;
  return kernel;
}

}  // namespace mesh
