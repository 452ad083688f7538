// Weights as floats: panel | input | output of the panel.
#include "linear_kinds.h"
#include "panel_kernel.h"

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

using Fp32Kernel = PanelKernel<FloatWeights>;

}  // namespace

const LinearKernel& fp32_kernel() {
  static const Fp32Kernel kernel;
  return kernel;
}

}  // namespace mesh
