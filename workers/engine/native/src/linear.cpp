#include "linear.h"

#include <algorithm>
#include <vector>

#include "linear_kinds.h"

namespace mesh {
namespace {

constexpr size_t kWeightBytesPerTask = 192 << 10;  // stay in the second-level cache with some rows
constexpr int kRowsPerTask = 96;                   // read every weight once for so many rows
constexpr int kPanelsAtOnce = 4;                   // of a single row, for the sake of arithmetic

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

// The ends of ranges of panels, each a thread's task. They shrink, so that no thread waits long for
// the last one; a thread that was interrupted holds up none.
std::vector<int> range_ends(const PackedLinear& weights, int num_rows, int num_threads) {
  const size_t panel_bytes = kernel_of(weights.kind)->panel_bytes(weights.num_inputs);
  const int least = std::max(1, kPanelsAtOnce / num_rows);
  const int most = std::max(least, static_cast<int>(kWeightBytesPerTask / panel_bytes));
  std::vector<int> ends;
  for (int end = 0, num_panels = weights.num_panels(); end < num_panels;) {
    const int share = (num_panels - end) / (2 * num_threads);
    const int size = std::clamp(share, least, most) / least * least;
    ends.push_back(end = std::min(end + size, num_panels));
  }
  return ends;
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
  if (num_rows == 0) return;
  const LinearKernel& kernel = *kernel_of(weights.kind);
  inputs = prepare_rows(kernel, weights.num_inputs, inputs, num_rows, prepared, team);
  const std::vector<int> ends = range_ends(weights, num_rows, team.size());
  const auto num_ranges = static_cast<int64_t>(ends.size());
  const int num_slices = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  team.run(num_ranges * num_slices, [&](int64_t task) {
    const auto range = static_cast<size_t>(task % num_ranges);
    const int slice = static_cast<int>(task / num_ranges);
    const Tile tile = {slice * kRowsPerTask, std::min((slice + 1) * kRowsPerTask, num_rows),
                       range > 0 ? ends[range - 1] : 0, ends[range]};
    kernel.multiply(weights, inputs, outputs, tile);
  });
}

}  // namespace mesh
