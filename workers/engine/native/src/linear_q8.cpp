// 8-bit weights times rows that are quantised to 16 bits in groups of 32, each with its own scale.
//
// Pairs of 16-bit numbers are multiplied and added as fast as pairs of bytes whose product needs 16
// bits anyway; the inputs' rounding is a 30,000th of the largest in a group, which is no more than
// that of the floats around it. The sums in integers are exact.
#include "integer_kernel.h"
#include "linear_kinds.h"

namespace mesh {
namespace {

constexpr float kLargest = 32767.0f;

// A group of an input row, prepared. A sum of 32 products is at most 128 * 32,767 * 32 < 2^31.
struct EightBitInputs {
  float step;
  int16_t integers[kGroup];
};

struct EightBitGroup {
  using Format = Q8_0;
  using Inputs = EightBitInputs;
  using Panel = QuantisedPanel<Format>;

  static Inputs prepare(const float* row) {
    Inputs inputs;
    int sum;
    inputs.step = round_inputs(row, kLargest, inputs.integers, sum);
    return inputs;
  }

  template <int Rows>
  static MESH_INLINE void add(const std::byte* group, const Inputs* const (&rows)[Rows],
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
};

}  // namespace

const LinearKernel& q8_0_kernel() {
  static const IntegerKernel<EightBitGroup> kernel;
  return kernel;
}

}  // namespace mesh
