// Runs the products of quantised weights over many shapes and prints a checksum of the results' bits,
// for builds with sanitizers and of other vector widths. Buffers have exactly the sizes asked for.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "abi.h"
#include "gguf_blocks.h"
#include "linear.h"

using namespace mesh;

namespace {

std::mt19937 generator(1);

struct Kinds {
  WeightKind fast, exact;
  SourceKind source;
  size_t block_bytes;
};

constexpr Kinds kAllKinds[] = {
    {WeightKind::kQ4_0, WeightKind::kExactQ4_0, SourceKind::kQ4_0, Q4_0::kBlockBytes},
    {WeightKind::kQ4_1, WeightKind::kExactQ4_1, SourceKind::kQ4_1, Q4_1::kBlockBytes},
    {WeightKind::kQ8_0, WeightKind::kExactQ8_0, SourceKind::kQ8_0, Q8_0::kBlockBytes},
};

float random_float() { return static_cast<float>(generator() % 2001) / 1000.0f - 1.0f; }

std::vector<float> random_floats(size_t count) {
  std::vector<float> made(count);
  for (float& item : made) item = random_float();
  return made;
}

std::vector<std::byte> random_blocks(const Kinds& kinds, size_t count) {
  std::vector<std::byte> made(count * kinds.block_bytes);
  for (std::byte& byte : made) byte = static_cast<std::byte>(generator());
  for (size_t block = 0; block < count; ++block)
    for (size_t half = 0; half < (kinds.source == SourceKind::kQ4_1 ? 2 : 1); ++half) {
      const uint16_t bits = float_to_half(random_float());
      std::memcpy(made.data() + block * kinds.block_bytes + 2 * half, &bits, sizeof bits);
    }
  return made;
}

void demand(const char* error) {
  if (error == nullptr) return;
  std::fprintf(stderr, "failed: %s\n", error);
  std::exit(1);
}

uint64_t checksum_of(WeightKind kind, const Kinds& kinds, int num_outputs, int num_inputs,
                     int num_rows) {
  const LinearKernel& kernel = *kernel_of(kind);
  PackedLinear linear(kind, num_outputs, num_inputs);
  const auto blocks = random_blocks(kinds, static_cast<size_t>(num_outputs) * num_inputs / kGroup);
  if (!kernel.pack(linear, 0, num_outputs, blocks.data(), kinds.source)) demand("not packed");
  for (int output = 0; output < num_outputs; ++output) linear.bias[output] = random_float();
  const auto rows = random_floats(num_rows * num_inputs);
  std::vector<float> results(static_cast<size_t>(num_rows) * num_outputs), row(num_inputs);
  ThreadTeam team(1 + num_rows % 3);
  Array<std::byte> prepared;
  multiply(linear, {reinterpret_cast<const std::byte*>(rows.data()), num_inputs * sizeof(float)},
           num_rows, {results.data(), static_cast<size_t>(num_outputs)}, prepared, team);
  kernel.unpack(linear, num_outputs - 1, row.data());
  results.insert(results.end(), row.begin(), row.end());
  uint64_t sum = 0;
  for (const float result : results) {
    uint32_t bits;
    std::memcpy(&bits, &result, sizeof bits);
    sum = sum * 1099511628211u + bits;
  }
  return sum;
}

uint64_t checksum_of_quantising(SourceKind kind, size_t block_bytes, int num_groups) {
  auto weights = random_floats(static_cast<size_t>(num_groups) * kGroup);
  std::fill_n(weights.begin(), kGroup, 0.5f);  // one number repeated
  std::vector<unsigned char> blocks(static_cast<size_t>(num_groups) * block_bytes);
  demand(mesh_quantise(static_cast<int>(kind), weights.data(), num_groups, blocks.data()));
  uint64_t sum = 0;
  for (const unsigned char byte : blocks) sum = sum * 1099511628211u + byte;
  return sum;
}

}  // namespace

int main() {
  for (const Kinds& kinds : kAllKinds)
    for (const WeightKind kind : {kinds.fast, kinds.exact})
      for (const int num_rows : {1, 2, 3, 5, 8, 97})
        for (const int num_outputs : {1, 16, 33, 70}) {
          const int num_inputs = kGroup * (1 + num_outputs % 5);
          std::printf("%d %d %d: %016llx\n", static_cast<int>(kind), num_rows, num_outputs,
                      static_cast<unsigned long long>(
                          checksum_of(kind, kinds, num_outputs, num_inputs, num_rows)));
        }
  for (const Kinds& kinds : {kAllKinds[1], kAllKinds[2]})
    std::printf("quantised %d: %016llx\n", static_cast<int>(kinds.source),
                static_cast<unsigned long long>(
                    checksum_of_quantising(kinds.source, kinds.block_bytes, 50)));
}
