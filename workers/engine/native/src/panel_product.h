// The product of rows and panels of weights, for weights that lie as floats or bfloat16.
//
// A panel is 2 * kWidth outputs; its weights lie input after input. `Weights` says how:
//
//     Row                 the type of a prepared input row's items
//     Item                the type of a packed weight
//     kDepth              inputs that are read together; padded with zeros
//     kMostSums           vectors of sums that stay in registers
//     step(row pointers, weights, sums)   adds the products of kDepth inputs
//
// Each sum is one chain of fused multiply-adds from the first input to the last, begun with the
// bias. Where a chain is cut into parts (to stay in the cache), its value so far is kept as a float
// in the output, which loses nothing. So a result depends on neither tile nor number of rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "simd.h"

namespace mesh {

constexpr int kPanelOutputs = 2 * kWidth;
constexpr int kInputsPerPass = 1536;             // a panel's part stays in the first-level cache

// How far ahead weights are fetched while several rows are multiplied: the arithmetic hides what the
// processor's own prefetching leaves (8 rows: 13.7 ms against 17.0 for 141 MB of weights on one
// core). With one row it is memory that limits, and more requests only get in its way.
constexpr int kFetchAhead = 1536;

template <int Rows>
inline void fetch_ahead(const void* weights) {
  if (Rows > 1) __builtin_prefetch(static_cast<const char*>(weights) + kFetchAhead);
}

// Calls body(output, input, number of the weight in row-major rows) for rows of weights in the order
// in which they are packed: panel after panel, input after input.
template <class Body>
inline void in_packed_order(int first_output, int num_rows, int num_inputs, const Body& body) {
  for (int first = 0; first < num_rows;) {
    const int room = kPanelOutputs - (first_output + first) % kPanelOutputs;
    const int end = std::min(first + room, num_rows);
    for (int input = 0; input < num_inputs; ++input)
      for (int row = first; row < end; ++row)
        body(first_output + row, input,
             static_cast<size_t>(row) * static_cast<size_t>(num_inputs) +
                 static_cast<size_t>(input));
    first = end;
  }
}

template <int Rows, int Panels>
struct Sums {
  Vec of[Rows][2 * Panels];
};

// Reads or writes the sums of one row in a panel, of which only `count` outputs may exist.
inline void load_sums(const float* from, int count, Vec& low, Vec& high) {
  float values[kPanelOutputs] = {};
  if (count < kPanelOutputs) {
    std::memcpy(values, from, static_cast<size_t>(count) * sizeof(float));
    from = values;
  }
  low = load(from);
  high = load(from + kWidth);
}

inline void store_sums(float* to, int count, Vec low, Vec high) {
  if (count >= kPanelOutputs) {
    store(to, low);
    store(to + kWidth, high);
    return;
  }
  float values[kPanelOutputs];
  store(values, low);
  store(values + kWidth, high);
  std::memcpy(to, values, static_cast<size_t>(count) * sizeof(float));
}

template <class Weights>
class PanelProduct {
 public:
  using Row = typename Weights::Row;
  using Item = typename Weights::Item;
  static constexpr int kMostRows = Weights::kMostSums / 2;

  static size_t padded_inputs(int num_inputs) {
    return static_cast<size_t>((num_inputs + Weights::kDepth - 1) / Weights::kDepth) *
           Weights::kDepth;
  }

  static size_t panel_bytes(int num_inputs) {
    return padded_inputs(num_inputs) * kPanelOutputs * sizeof(Item);
  }

  PanelProduct(const PackedLinear& weights, InputRows inputs, OutputRows outputs)
      : weights_(weights),
        inputs_(inputs),
        outputs_(outputs),
        depth_(static_cast<int>(padded_inputs(weights.num_inputs))) {}

  void multiply(Tile tile) const {
    for (int begin = 0; begin < depth_; begin += kInputsPerPass) {
      const int end = std::min(begin + kInputsPerPass, depth_);
      // As few groups of rows as registers allow, of sizes as equal as can be.
      const int num_rows = tile.end_row - tile.first_row;
      const int num_groups = (num_rows + kMostRows - 1) / kMostRows;
      for (int group = 0; group < num_groups; ++group) {
        const int first = tile.first_row + num_rows * group / num_groups;
        const int last = tile.first_row + num_rows * (group + 1) / num_groups;
        multiply_group<kMostRows>(last - first, first, tile, begin, end);
      }
    }
  }

 private:
  // Few rows leave registers: then several panels at once keep the arithmetic units busy.
  static constexpr int panels_at_once(int rows) {
    return rows == 1 ? 4 : 4 * rows <= Weights::kMostSums ? 2 : 1;
  }

  template <int Rows>
  void multiply_group(int num_rows, int first_row, Tile tile, int begin, int end) const {
    if constexpr (Rows > 1) {
      if (num_rows < Rows) return multiply_group<Rows - 1>(num_rows, first_row, tile, begin, end);
    }
    constexpr int kPanels = panels_at_once(Rows);
    int panel = tile.first_panel;
    for (; panel + kPanels <= tile.end_panel; panel += kPanels)
      multiply_panels<Rows, kPanels>(first_row, panel, begin, end);
    if constexpr (kPanels > 1) {
      for (; panel < tile.end_panel; ++panel) multiply_panels<Rows, 1>(first_row, panel, begin, end);
    }
  }

  // Not inlined: inside its callers the compiler runs out of registers for the sums.
  template <int Rows, int Panels>
  [[gnu::noinline]] void multiply_panels(int first_row, int first_panel, int begin, int end) const {
    Sums<Rows, Panels> sums;
    const Row* rows[Rows];
    const Item* items[Panels];
    for (int row = 0; row < Rows; ++row) rows[row] = inputs_.row<Row>(first_row + row);
    for (int p = 0; p < Panels; ++p) {
      items[p] = panel_items(first_panel + p);
      for (int row = 0; row < Rows; ++row)
        begin_sums(first_row + row, first_panel + p, begin, sums.of[row][2 * p],
                   sums.of[row][2 * p + 1]);
    }
    for (int input = begin; input < end; input += Weights::kDepth)
      Weights::template step<Rows, Panels>(rows, input, items, sums);
    for (int p = 0; p < Panels; ++p)
      for (int row = 0; row < Rows; ++row)
        store_sums(outputs_.row(first_row + row) + (first_panel + p) * kPanelOutputs,
                   num_outputs(first_panel + p), sums.of[row][2 * p], sums.of[row][2 * p + 1]);
  }

  void begin_sums(int row, int panel, int begin, Vec& low, Vec& high) const {
    if (begin == 0) {
      const float* bias = weights_.bias.data() + static_cast<size_t>(panel) * kPanelOutputs;
      low = load(bias);
      high = load(bias + kWidth);
    } else {
      load_sums(outputs_.row(row) + panel * kPanelOutputs, num_outputs(panel), low, high);
    }
  }

  int num_outputs(int panel) const { return weights_.num_outputs - panel * kPanelOutputs; }

  const Item* panel_items(int panel) const {
    const size_t bytes = panel_bytes(weights_.num_inputs);
    return reinterpret_cast<const Item*>(weights_.data.data() + static_cast<size_t>(panel) * bytes);
  }

  const PackedLinear& weights_;
  const InputRows inputs_;
  const OutputRows outputs_;
  const int depth_;
};

}  // namespace mesh
