// Weights as floats: panel | input | output of the panel.
#include "bf16.h"
#include "linear_kinds.h"
#include "panel_product.h"

namespace mesh {
namespace {

struct FloatWeights {
  using Row = float;
  using Item = float;
  static constexpr int kDepth = 1;
  static constexpr int kMostSums = kWidth == 8 ? 12 : 24;

  template <int Rows, int Panels>
  static void step(const float* const (&rows)[Rows], int input, const float* const (&items)[Panels],
                   Sums<Rows, Panels>& sums) {
    Vec weights[2 * Panels];
    for (int p = 0; p < Panels; ++p) {
      const float* from = items[p] + static_cast<size_t>(input) * kPanelOutputs;
      fetch_ahead<Rows>(from);
      weights[2 * p] = load(from);
      weights[2 * p + 1] = load(from + kWidth);
    }
    for (int row = 0; row < Rows; ++row) {
      const Vec value = splat(rows[row][input]);
      for (int v = 0; v < 2 * Panels; ++v)
        sums.of[row][v] = fma(value, weights[v], sums.of[row][v]);
    }
  }
};

using Product = PanelProduct<FloatWeights>;

class Fp32Kernel final : public LinearKernel {
 public:
  int panel_outputs() const override { return kPanelOutputs; }
  size_t panel_bytes(int num_inputs) const override { return Product::panel_bytes(num_inputs); }
  const char* refusal(int) const override { return nullptr; }

  bool pack(PackedLinear& weights, int first_output, int num_rows, const void* source,
            SourceKind source_kind) const override {
    if (source_kind == SourceKind::kFp32)
      pack_rows(weights, first_output, num_rows, static_cast<const float*>(source));
    else if (source_kind == SourceKind::kBf16)
      pack_rows(weights, first_output, num_rows, static_cast<const Bf16*>(source));
    else
      return false;
    return true;
  }

  void unpack(const PackedLinear& weights, int output, float* row) const override {
    const float* from = reinterpret_cast<const float*>(weights.data.data()) + place(weights, output);
    for (int input = 0; input < weights.num_inputs; ++input)
      row[input] = from[static_cast<size_t>(input) * kPanelOutputs];
  }

  size_t prepared_bytes(int) const override { return 0; }
  void prepare(const float*, int, std::byte*) const override {}

  void multiply(const PackedLinear& weights, InputRows inputs, OutputRows outputs,
                Tile tile) const override {
    Product(weights, inputs, outputs).multiply(tile);
  }

 private:
  // Where the weight of input 0 lies.
  static size_t place(const PackedLinear& weights, int output) {
    const size_t panel = static_cast<size_t>(output / kPanelOutputs);
    return panel * kPanelOutputs * static_cast<size_t>(weights.num_inputs) +
           static_cast<size_t>(output % kPanelOutputs);
  }

  template <class Source>
  static void pack_rows(PackedLinear& weights, int first_output, int num_rows,
                        const Source* source) {
    auto* const packed = reinterpret_cast<float*>(weights.data.data());
    in_packed_order(first_output, num_rows, weights.num_inputs,
                    [&](int output, int input, size_t number) {
                      packed[place(weights, output) + static_cast<size_t>(input) * kPanelOutputs] =
                          to_float(source[number]);
                    });
  }
};

}  // namespace

const LinearKernel& fp32_kernel() {
  static const Fp32Kernel kernel;
  return kernel;
}

}  // namespace mesh
