// Weights as bfloat16: panel | pair of inputs | output of the panel | input of the pair.
//
// Pairs are what `vdpbf16ps` multiplies. Where a processor has it, input rows are rounded to
// bfloat16 too; elsewhere a pair is widened in registers (a shift and a mask, which cost nothing
// beside the multiplications) and rows stay floats.
#include "bf16.h"
#include "bf16_pairs.h"
#include "linear_kinds.h"
#include "panel_product.h"

namespace mesh {
namespace {

#if MESH_BF16_DOT
constexpr bool kRoundsInputs = true;
#else
constexpr bool kRoundsInputs = false;
#endif

// Input rows stay floats.
struct WidenedWeights {
  using Row = float;
  using Item = Bf16;
  static constexpr int kDepth = 2;
  // With 12, one goes back and forth to memory and halves the speed (43 of 100 GFLOP/s, not 90).
  static constexpr int kMostSums = kWidth == 8 ? 10 : 24;

  template <int Rows, int Panels>
  static void step(const float* const (&rows)[Rows], int input, const Bf16* const (&items)[Panels],
                   Sums<Rows, Panels>& sums) {
    add<Rows, Panels, 0>(rows, input, items, sums);
    add<Rows, Panels, 1>(rows, input, items, sums);
  }

 private:
  template <int Rows, int Panels, int Member>
  static void add(const float* const (&rows)[Rows], int input, const Bf16* const (&items)[Panels],
                  Sums<Rows, Panels>& sums) {
    Vec weights[2 * Panels];
    for (int p = 0; p < Panels; ++p) {
      const Bf16* from = items[p] + static_cast<size_t>(input) * kPanelOutputs;
      if (Member == 0) fetch_ahead<Rows>(from);
      weights[2 * p] = widen_member<Member>(load_words(from));
      weights[2 * p + 1] = widen_member<Member>(load_words(from + 2 * kWidth));
    }
    for (int row = 0; row < Rows; ++row) {
      const Vec value = splat(rows[row][input + Member]);
      for (int v = 0; v < 2 * Panels; ++v)
        sums.of[row][v] = fma(value, weights[v], sums.of[row][v]);
    }
  }
};

// Input rows are rounded to bfloat16.
struct PairedWeights {
  using Row = Bf16;
  using Item = Bf16;
  static constexpr int kDepth = 2;
  static constexpr int kMostSums = kWidth == 8 ? 12 : 24;

  template <int Rows, int Panels>
  static void step(const Bf16* const (&rows)[Rows], int input, const Bf16* const (&items)[Panels],
                   Sums<Rows, Panels>& sums) {
    IntVec weights[2 * Panels];
    for (int p = 0; p < Panels; ++p) {
      const Bf16* from = items[p] + static_cast<size_t>(input) * kPanelOutputs;
      fetch_ahead<Rows>(from);
      weights[2 * p] = load_words(from);
      weights[2 * p + 1] = load_words(from + 2 * kWidth);
    }
    for (int row = 0; row < Rows; ++row) {
      const IntVec pair = splat_pair(rows[row] + input);
      for (int v = 0; v < 2 * Panels; ++v)
        sums.of[row][v] = add_pair_products(sums.of[row][v], pair, weights[v]);
    }
  }
};

using Product = PanelProduct<std::conditional_t<kRoundsInputs, PairedWeights, WidenedWeights>>;

class Bf16Kernel final : public LinearKernel {
 public:
  int panel_outputs() const override { return kPanelOutputs; }
  size_t panel_bytes(int num_inputs) const override { return Product::panel_bytes(num_inputs); }

  const char* refusal(int num_inputs) const override {
    return num_inputs % kGranule == 0 ? nullptr : "bf16 weights need rows of a multiple of 16";
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
    const Bf16* from = reinterpret_cast<const Bf16*>(weights.data.data()) + place(weights, output);
    for (int input = 0; input < weights.num_inputs; ++input)
      row[input] = to_float(from[offset(input)]);
  }

  size_t prepared_bytes(int num_inputs) const override {
    return kRoundsInputs ? static_cast<size_t>(num_inputs) * sizeof(Bf16) : 0;
  }

  void prepare(const float* row, int num_inputs, std::byte* prepared) const override {
    auto* const to = reinterpret_cast<Bf16*>(prepared);
    for (int input = 0; input < num_inputs; input += kWidth)
      store_items(to + input, load(row + input));
  }

  void multiply(const PackedLinear& weights, InputRows inputs, OutputRows outputs,
                Tile tile) const override {
    Product(weights, inputs, outputs).multiply(tile);
  }

 private:
  // Where the weight of input 0 lies.
  static size_t place(const PackedLinear& weights, int output) {
    const size_t panel = static_cast<size_t>(output / kPanelOutputs);
    return panel * kPanelOutputs * static_cast<size_t>(weights.num_inputs) +
           2 * static_cast<size_t>(output % kPanelOutputs);
  }

  // And how far from there that of another input does.
  static size_t offset(int input) {
    return static_cast<size_t>(input / 2) * 2 * kPanelOutputs + static_cast<size_t>(input % 2);
  }

  template <class Source>
  static void pack_rows(PackedLinear& weights, int first_output, int num_rows,
                        const Source* source) {
    auto* const packed = reinterpret_cast<Bf16*>(weights.data.data());
    in_packed_order(first_output, num_rows, weights.num_inputs,
                    [&](int output, int input, size_t number) {
                      packed[place(weights, output) + offset(input)] =
                          to_bf16(to_float(source[number]));
                    });
  }
};

}  // namespace

const LinearKernel& bf16_kernel() {
  static const Bf16Kernel kernel;
  return kernel;
}

}  // namespace mesh
