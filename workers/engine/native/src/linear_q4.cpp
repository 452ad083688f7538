// 4-bit weights times rows that are quantised to 16 bits in groups of 32, each with its own scale:
//
//     weight = scale * value + minimum,  input = step * integer
//     sum over a group of weight * input = scale * step * sum(value * integer)
//                                        + minimum * step * sum(integer)
//
// The sums in integers are exact, so the order inside a group makes no difference: only the inputs'
// rounding does, by a 30,000th of the largest in a group. (8 bits are half as much work, but turned
// near ties of tokens: a divergence of 0.004. With few rows reading the weights takes longer than
// any arithmetic.)
#include "integer_kernel.h"
#include "linear_kinds.h"

namespace mesh {
namespace {

constexpr float kLargest = 32767.0f;

// Of integers: pairs as a shift brings them, 0 2 1 3 4 6 5 7.
constexpr int kOrder = _MM_SHUFFLE(3, 1, 2, 0);

// A group of an input row, prepared.
struct FourBitInputs {
  float step;
  float sum;  // step * the sum of all integers
  int16_t integers[kGroup];  // each eight in the order above
};

// The integer sums of a group: 16 outputs for each row. Each 16 bits hold four values, so a shift
// and a mask bring a pair of inputs for 8 outputs. A sum is at most 15 * 32,767 * 32 < 2^24.
template <int Rows>
MESH_INLINE void multiply_values(const std::byte* values, const FourBitInputs* const (&rows)[Rows],
                                 PairSums (&sums)[Rows][2]) {
  constexpr int kShifts[4] = {0, 8, 4, 12};
  const __m256i lowest = _mm256_set1_epi16(15);
#pragma GCC unroll 4
  for (int word = 0; word < kGroup / 8; ++word) {
    const auto* from = reinterpret_cast<const __m256i*>(values) + 2 * word;
    const __m256i bits[2] = {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      __m256i weights[2] = {_mm256_srli_epi16(bits[0], kShifts[part]),
                            _mm256_srli_epi16(bits[1], kShifts[part])};
      if (part < 3)  // the highest four bits stand alone
        for (__m256i& half : weights) half = _mm256_and_si256(half, lowest);
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        const __m256i inputs = splat_pair(rows[row]->integers + 8 * word + 2 * part);
        sums[row][0].add(weights[0], inputs);
        sums[row][1].add(weights[1], inputs);
      }
    }
  }
}

template <class FormatOfWeights>
struct FourBitGroup {
  using Format = FormatOfWeights;
  using Inputs = FourBitInputs;
  using Panel = QuantisedPanel<Format>;

  static Inputs prepare(const float* row) {
    Inputs inputs;
    int sum;
    inputs.step = round_inputs(row, kLargest, inputs.integers, sum);
    inputs.sum = inputs.step * static_cast<float>(sum);
    for (int i = 0; i < kGroup; i += 16) {
      auto* const place = reinterpret_cast<__m256i*>(inputs.integers + i);
      const __m256i integers = _mm256_loadu_si256(place);
      const __m256i halfway = _mm256_shufflelo_epi16(integers, kOrder);
      _mm256_storeu_si256(place, _mm256_shufflehi_epi16(halfway, kOrder));
    }
    return inputs;
  }

  template <int Rows>
  static MESH_INLINE void add(const std::byte* group, const Inputs* const (&rows)[Rows],
                              __m256 (&of)[Rows][2]) {
    PairSums sums[Rows][2];
    multiply_values<Rows>(group + Panel::kValuesAt, rows, sums);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256 scale = load_8_halves(group + 16 * half);
      const __m256 minimum = Format::kHasMinimum
                                 ? load_8_halves(group + Panel::kScaleBytes + 16 * half)
                                 : _mm256_mul_ps(scale, _mm256_set1_ps(-Format::kZero));
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        const __m256 steps = _mm256_mul_ps(scale, _mm256_broadcast_ss(&rows[row]->step));
        __m256& sum = of[row][half];
        sum = _mm256_fmadd_ps(sums[row][half].floats(), steps, sum);
        sum = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(&rows[row]->sum), sum);
      }
    }
  }
};

}  // namespace

const LinearKernel& q4_0_kernel() {
  static const IntegerKernel<FourBitGroup<Q4_0>> kernel;
  return kernel;
}

const LinearKernel& q4_1_kernel() {
  static const IntegerKernel<FourBitGroup<Q4_1>> kernel;
  return kernel;
}

}  // namespace mesh
