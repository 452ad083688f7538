#include "linear.h"

#include <algorithm>

#include "linear_kinds.h"

namespace mesh {
namespace {

constexpr size_t kWeightBytesPerTask = 192 << 10;  // stay in the second-level cache with some rows
constexpr int kRowsPerTask = 96;                   // read every weight once for so many rows

int rows_per_preparing_task(int num_rows) { return std::max(4, num_rows / 64); }

InputRows prepare_rows(const LinearKernel& kernel, int num_inputs, InputRows inputs, int num_rows,
                       Array<std::byte>& prepared, ThreadTeam& team) {
  const size_t bytes = kernel.prepared_bytes(num_inputs);
  if (bytes == 0) return inputs;
  const size_t stride = (bytes + 63) / 64 * 64 + 64;  // not a power of two: rows share no cache set
  prepared.reserve(stride * static_cast<size_t>(num_rows));
  std::byte* const first = prepared.data();
  const int rows_per_task = rows_per_preparing_task(num_rows);
  team.run((num_rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int begin = static_cast<int>(task) * rows_per_task;
    const int end = std::min(begin + rows_per_task, num_rows);
    for (int row = begin; row < end; ++row)
      kernel.prepare(inputs.row<float>(row), num_inputs, first + static_cast<size_t>(row) * stride);
  });
  return {first, stride};
}

// Few panels: every thread gets several tasks, so that one that was interrupted holds up none.
int panels_per_task(const LinearKernel& kernel, const PackedLinear& weights, int num_threads) {
  const auto fit = static_cast<int>(kWeightBytesPerTask / kernel.panel_bytes(weights.num_inputs));
  const int share = (weights.num_panels() + 3 * num_threads - 1) / (3 * num_threads);
  const int panels = std::max(1, std::min(fit, share));
  return panels > 4 ? panels / 4 * 4 : panels;
}

}  // namespace

PackedLinear::PackedLinear(WeightKind kind, int num_outputs, int num_inputs)
    : kind(kind), num_outputs(num_outputs), num_inputs(num_inputs) {
  const auto num_panels = static_cast<size_t>(this->num_panels());
  data = Array<std::byte>(num_panels * kernel_of(kind)->panel_bytes(num_inputs));
  bias = Array<float>(num_panels * static_cast<size_t>(kernel_of(kind)->panel_outputs()));
}

int PackedLinear::num_panels() const {
  const int outputs = kernel_of(kind)->panel_outputs();
  return (num_outputs + outputs - 1) / outputs;
}

const LinearKernel* kernel_of(WeightKind kind) {
  switch (kind) {
    case WeightKind::kFp32:
      return &fp32_kernel();
    case WeightKind::kBf16:
      return &bf16_kernel();
    case WeightKind::kQ4_0:
      return &q4_0_kernel();
    case WeightKind::kQ4_1:
      return &q4_1_kernel();
    case WeightKind::kQ8_0:
      return &q8_0_kernel();
    case WeightKind::kExactQ4_0:
      return &exact_q4_0_kernel();
    case WeightKind::kExactQ4_1:
      return &exact_q4_1_kernel();
    case WeightKind::kExactQ8_0:
      return &exact_q8_0_kernel();
    default:
      return nullptr;
  }
}

void multiply(const PackedLinear& weights, InputRows inputs, int num_rows, OutputRows outputs,
              Array<std::byte>& prepared, ThreadTeam& team) {
  const LinearKernel& kernel = *kernel_of(weights.kind);
  inputs = prepare_rows(kernel, weights.num_inputs, inputs, num_rows, prepared, team);
  const int num_panels = weights.num_panels();
  const int panels = panels_per_task(kernel, weights, team.size());
  const int num_ranges = (num_panels + panels - 1) / panels;
  const int num_slices = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  team.run(static_cast<int64_t>(num_ranges) * num_slices, [&](int64_t task) {
    const int range = static_cast<int>(task % num_ranges);
    const int slice = static_cast<int>(task / num_ranges);
    const Tile tile = {slice * kRowsPerTask, std::min((slice + 1) * kRowsPerTask, num_rows),
                       range * panels, std::min((range + 1) * panels, num_panels)};
    kernel.multiply(weights, inputs, outputs, tile);
  });
}

}  // namespace mesh
