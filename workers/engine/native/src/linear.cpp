#include "linear.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "linear_kinds.h"

namespace mesh {
namespace {

constexpr size_t kWeightBytesPerTask = 192 << 10;  // stay in the second-level cache with some rows
constexpr int kRowsPerTask = 96;                   // read every weight once for so many rows
constexpr int kFewRows = 8;                        // take as long as their weights take to read
constexpr int kFirstShare = 90;                    // % of the panels, in the threads' first ranges
constexpr size_t kFetchedFirst = 2560;             // bytes, before a product fetches by itself
constexpr size_t kLine = 64;

int rows_per_preparing_task(int num_rows) { return std::max(4, num_rows / 64); }

InputRows prepare_rows(const LinearKernel& kernel, int num_inputs, InputRows inputs, int num_rows,
                       Array<std::byte>& prepared, ThreadTeam& team) {
  const size_t bytes = kernel.prepared_bytes(num_inputs);
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
// the last one; a thread that was interrupted holds up none. With few rows the first range of each
// thread is nearly all of its share: memory is read fastest from end to end, and every range that
// is shared out takes time.
std::vector<int> range_ends(const PackedLinear& weights, int num_rows, int num_threads) {
  const int num_panels = weights.num_panels();
  const LinearKernel& kernel = *kernel_of(weights.kind);
  const size_t panel_bytes = kernel.panel_bytes(weights.num_inputs);
  const int least = std::max(1, kernel.panels_at_once() / num_rows);
  const bool are_few = num_rows <= kFewRows;
  const int cached = static_cast<int>(kWeightBytesPerTask / panel_bytes);
  const int most = std::max(least, are_few ? num_panels : cached);
  std::vector<int> ends;
  for (int end = 0; end < num_panels;) {
    const bool is_first = are_few && static_cast<int>(ends.size()) < num_threads;
    const int share = is_first ? num_panels * kFirstShare / (100 * num_threads)
                               : (num_panels - end) / (2 * num_threads);
    const int size = std::clamp(share, least, most) / least * least;
    ends.push_back(end = std::min(end + size, num_panels));
  }
  return ends;
}

// A single row is prepared by every thread for itself. That takes less time than to get from
// another core what it has just written, a line at a time, while it reads the same. Meanwhile the
// first weights are fetched.
InputRows prepare_own(const LinearKernel& kernel, const PackedLinear& weights, InputRows inputs,
                      int first_panel, uint64_t call) {
  thread_local Array<std::byte> prepared;
  thread_local uint64_t prepared_for = 0;
  const std::byte* const first =
      weights.data.data() +
      static_cast<size_t>(first_panel) * kernel.panel_bytes(weights.num_inputs);
  for (size_t at = 0; at < kFetchedFirst; at += kLine) __builtin_prefetch(first + at);
  if (prepared_for != call) {
    const auto* const row = inputs.row<float>(0);
    for (int at = 0; at < weights.num_inputs; at += int{kLine / sizeof(float)})
      __builtin_prefetch(row + at);
    prepared.reserve(kernel.prepared_bytes(weights.num_inputs));
    kernel.prepare(row, weights.num_inputs, prepared.data());
    prepared_for = call;
  }
  return {prepared.data(), prepared.size()};
}

// A number that no call before had.
uint64_t next_call() {
  static std::atomic<uint64_t> num_calls{0};
  return num_calls.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

PackedLinear::PackedLinear(WeightKind kind, int num_outputs, int num_inputs)
    : kind(kind), num_outputs(num_outputs), num_inputs(num_inputs) {
  const auto num_panels = static_cast<size_t>(this->num_panels());
  data = WeightMemory(num_panels * kernel_of(kind)->panel_bytes(num_inputs));
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
  const bool is_prepared = kernel.prepared_bytes(weights.num_inputs) > 0;
  const uint64_t own = is_prepared && num_rows == 1 ? next_call() : 0;
  if (is_prepared && !own)
    inputs = prepare_rows(kernel, weights.num_inputs, inputs, num_rows, prepared, team);
  const std::vector<int> ends = range_ends(weights, num_rows, team.size());
  const auto num_ranges = static_cast<int64_t>(ends.size());
  const int num_slices = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  team.run(num_ranges * num_slices, [&](int64_t task) {
    const auto range = static_cast<size_t>(task % num_ranges);
    const int slice = static_cast<int>(task / num_ranges);
    const Tile tile = {slice * kRowsPerTask, std::min((slice + 1) * kRowsPerTask, num_rows),
                       range > 0 ? ends[range - 1] : 0, ends[range]};
    const InputRows rows =
        own ? prepare_own(kernel, weights, inputs, tile.first_panel, own) : inputs;
    kernel.multiply(weights, rows, outputs, tile);
  });
}

}  // namespace mesh
