// 4-bit weights times rows that are quantised to 8 bits in groups of 32, each with its own scale:
//
//     weight = scale * value + minimum,  input = step * integer
//     sum over a group of weight * input = scale * step * sum(value * integer)
//                                        + minimum * step * sum(integer)
//
// The sums in integers are exact, so the order inside a group makes no difference: only the inputs'
// rounding does (relative error of a group about 1/250 of its largest input). It halves the time of
// many rows against floats; with few rows reading the weights takes longer than any arithmetic.
#include "integer_dot.h"
#include "linear_kinds.h"
#include "quantised_kernel.h"

namespace mesh {
namespace {

constexpr int kMostRows = 4;  // more sums than that do not stay in 16 registers
constexpr float kLargest = 127.0f;

// A group of an input row, prepared.
struct Inputs {
  float step;
  float sum;  // step * the sum of all integers
  int8_t integers[kGroup];
};

// The integer sums of a group: 16 outputs for each row. A value is at most 15 and an integer at
// most 127, so 16 products (a lane's share of a group) fit 16 bits: 15 * 127 * 16 = 30,480.
template <int Rows>
MESH_INLINE void multiply_values(const std::byte* values, const Inputs* const (&rows)[Rows],
                                 ByteSums (&sums)[Rows][2]) {
  const __m256i lower = _mm256_set1_epi8(15);
#pragma GCC unroll 4
  for (int word = 0; word < kGroup / 8; ++word) {
    __m256i low[2], high[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto* from = reinterpret_cast<const __m256i*>(values) + 2 * word + half;
      const __m256i both = _mm256_loadu_si256(from);
      low[half] = _mm256_and_si256(both, lower);
      high[half] = _mm256_and_si256(_mm256_srli_epi16(both, 4), lower);
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const __m256i first = splat_four(rows[row]->integers + 8 * word);
      const __m256i second = splat_four(rows[row]->integers + 8 * word + 4);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        sums[row][half].add(low[half], first, high[half], second);
    }
  }
}

template <class Format, int Rows>
MESH_INLINE void multiply_panel(const std::byte* panel, int num_groups, const Inputs* (&rows)[Rows],
                                __m256 (&of)[Rows][2]) {
  using Panel = QuantisedPanel<Format>;
  for (int group = 0; group < num_groups; ++group, panel += Panel::kGroupBytes) {
    prefetch<Panel::kGroupBytes>(panel);
    ByteSums sums[Rows][2];
    multiply_values<Rows>(panel + Panel::kValuesAt, rows, sums);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256 scale = load_8_halves(panel + 16 * half);
      const __m256 minimum = Format::kHasMinimum
                                 ? load_8_halves(panel + Panel::kScaleBytes + 16 * half)
                                 : _mm256_mul_ps(scale, _mm256_set1_ps(-Format::kZero));
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        const __m256 steps = _mm256_mul_ps(scale, _mm256_broadcast_ss(&rows[row]->step));
        __m256& sum = of[row][half];
        sum = _mm256_fmadd_ps(sums[row][half].floats(), steps, sum);
        sum = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(&rows[row]->sum), sum);
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) ++rows[row];
  }
}

template <class Format>
class Q4Kernel final : public QuantisedKernel<Format> {
 public:
  using Panel = QuantisedPanel<Format>;

  size_t prepared_bytes(int num_inputs) const override {
    return static_cast<size_t>(num_inputs / kGroup) * sizeof(Inputs);
  }

  void prepare(const float* row, int num_inputs, std::byte* prepared) const override {
    for (int input = 0; input < num_inputs; input += kGroup, prepared += sizeof(Inputs)) {
      Inputs inputs;
      int sum;
      inputs.step = round_inputs(row + input, kLargest, inputs.integers, sum);
      inputs.sum = inputs.step * static_cast<float>(sum);
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
    const std::byte* from =
        weights.data.data() + static_cast<size_t>(panel) * Panel::bytes(weights.num_inputs);
    multiply_panel<Format, Rows>(from, weights.num_inputs / kGroup, rows, sums);
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
      end_panel(weights, panel, sums[row], outputs.row(first_row + row));
  }
};

}  // namespace

const LinearKernel& q4_0_kernel() {
  static const Q4Kernel<Q4_0> kernel;
  return kernel;
}

const LinearKernel& q4_1_kernel() {
  static const Q4Kernel<Q4_1> kernel;
  return kernel;
}

}  // namespace mesh
