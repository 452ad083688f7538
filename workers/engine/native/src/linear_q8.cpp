// 8-bit weights times rows that are quantised to 16 bits in groups of 32, each with its own scale.
//
// Pairs of 16-bit numbers are multiplied and added as fast as pairs of bytes whose product needs 16
// bits anyway; the inputs' rounding is a 30,000th of the largest in a group, which is no more than
// that of the floats around it. The sums in integers are exact.
#include "integer_dot.h"
#include "linear_kinds.h"
#include "quantised_kernel.h"

namespace mesh {
namespace {

using Panel = QuantisedPanel<Q8_0>;

constexpr int kMostRows = 4;
constexpr float kLargest = 32767.0f;

// A group of an input row, prepared. A sum of 32 products is at most 128 * 32,767 * 32 < 2^31.
struct Inputs {
  float step;
  int16_t integers[kGroup];
};

// Adds a group's products to the panel's outputs of each row.
template <int Rows>
MESH_INLINE void multiply_group(const std::byte* group, const Inputs* const (&rows)[Rows],
                                __m256 (&of)[Rows][2]) {
  PairSums sums[Rows][2];
  const auto* values = reinterpret_cast<const __m128i*>(group + Panel::kValuesAt);
#pragma GCC unroll 16
  for (int pair = 0; pair < kGroup / 2; ++pair, values += 2) {
    const __m256i weights[2] = {_mm256_cvtepi8_epi16(_mm_loadu_si128(values)),
                                _mm256_cvtepi8_epi16(_mm_loadu_si128(values + 1))};
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const __m256i inputs = splat_pair(rows[row]->integers + 2 * pair);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) sums[row][half].add(weights[half], inputs);
    }
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256 scale = load_8_halves(group + 16 * half);
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const __m256 steps = _mm256_mul_ps(scale, _mm256_broadcast_ss(&rows[row]->step));
      of[row][half] = _mm256_fmadd_ps(sums[row][half].floats(), steps, of[row][half]);
    }
  }
}

class Q8Kernel final : public QuantisedKernel<Q8_0> {
 public:
  size_t prepared_bytes(int num_inputs) const override {
    return static_cast<size_t>(num_inputs / kGroup) * sizeof(Inputs);
  }

  void prepare(const float* row, int num_inputs, std::byte* prepared) const override {
    for (int input = 0; input < num_inputs; input += kGroup, prepared += sizeof(Inputs)) {
      Inputs inputs;
      int sum;
      inputs.step = round_inputs(row + input, kLargest, inputs.integers, sum);
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
      multiply_group<Rows>(group, rows, sums);
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) ++rows[row];
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
      end_panel(weights, panel, sums[row], outputs.row(first_row + row));
  }
};

}  // namespace

const LinearKernel& q8_0_kernel() {
  static const Q8Kernel kernel;
  return kernel;
}

}  // namespace mesh
