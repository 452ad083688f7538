// Weights as bfloat16: panel | pair of inputs | output of the panel | input of the pair.
//
// Pairs are what `vdpbf16ps` multiplies. Where a processor has it, input rows are rounded to
// bfloat16 too; elsewhere a pair is widened in registers (a shift and a mask, which cost nothing
// beside the multiplications) and rows stay floats.
#include "bf16_pairs.h"
#include "linear_kinds.h"
#include "panel_kernel.h"

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

using Bf16Kernel = PanelKernel<std::conditional_t<kRoundsInputs, PairedWeights, WidenedWeights>>;

}  // namespace

const LinearKernel& bf16_kernel() {
  static const Bf16Kernel kernel;
  return kernel;
}

}  // namespace mesh
