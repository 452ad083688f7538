// What weights that lie as floats or bfloat16 have in common, whatever their step of a product.
//
//     panel | kDepth inputs | output of the panel | input of the kDepth
#pragma once

#include "bf16.h"
#include "panel_product.h"

namespace mesh {

inline void narrow(float value, float& to) { to = value; }
inline void narrow(float value, Bf16& to) { to = to_bf16(value); }

// `Weights`: see panel_product.h.
template <class Weights>
class PanelKernel : public LinearKernel {
 public:
  using Product = PanelProduct<Weights>;
  using Row = typename Weights::Row;
  using Item = typename Weights::Item;

  int panel_outputs() const override { return kPanelOutputs; }
  int panels_at_once() const override { return 4; }
  size_t panel_bytes(int num_inputs) const override { return Product::panel_bytes(num_inputs); }

  const char* refusal(int num_inputs) const override {
    return num_inputs % kGranule == 0 || Weights::kDepth == 1
               ? nullptr
               : "bf16 weights need rows of a multiple of 16";
  }

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
    const auto* packed = reinterpret_cast<const Item*>(weights.data.data());
    for (int input = 0; input < weights.num_inputs; ++input)
      row[input] = to_float(packed[place(weights, output, input)]);
  }

  // Rows of floats are read as they are.
  size_t prepared_bytes(int num_inputs) const override {
    return std::is_same_v<Row, float> ? 0 : static_cast<size_t>(num_inputs) * sizeof(Row);
  }

  void prepare(const float* row, int num_inputs, std::byte* prepared) const override {
    auto* const to = reinterpret_cast<Row*>(prepared);
    for (int input = 0; input < num_inputs; input += kWidth)
      store_items(to + input, load(row + input));
  }

  void multiply(const PackedLinear& weights, InputRows inputs, OutputRows outputs,
                Tile tile) const override {
    Product(weights, inputs, outputs).multiply(tile);
  }

 private:
  static size_t place(const PackedLinear& weights, int output, int input) {
    constexpr auto kDepth = static_cast<size_t>(Weights::kDepth);
    const auto at = static_cast<size_t>(input), lane = static_cast<size_t>(output % kPanelOutputs);
    const size_t panel = static_cast<size_t>(output / kPanelOutputs);
    return panel * kPanelOutputs * Product::padded_inputs(weights.num_inputs) +
           at / kDepth * kDepth * kPanelOutputs + lane * kDepth + at % kDepth;
  }

  template <class Source>
  static void pack_rows(PackedLinear& weights, int first_output, int num_rows,
                        const Source* source) {
    auto* const packed = reinterpret_cast<Item*>(weights.data.data());
    in_packed_order(first_output, num_rows, weights.num_inputs,
                    [&](int output, int input, size_t number) {
                      narrow(to_float(source[number]), packed[place(weights, output, input)]);
                    });
  }
};

}  // namespace mesh
