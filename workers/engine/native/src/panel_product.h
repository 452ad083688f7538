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

// With so many rows or fewer a panel is used for all of them before the next one.
constexpr int kFewRows = 48;

// Where weights are fetched from memory while others are multiplied with: so far behind these, and
// so many bytes further at each step of the product.
struct Ahead {
  ptrdiff_t distance;
  ptrdiff_t step;
};

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

  static constexpr int kStepBytes = Weights::kDepth * kPanelOutputs * int{sizeof(Item)};

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
    // As few groups of rows as registers allow, of sizes as equal as can be.
    const int num_groups = (tile.end_row - tile.first_row + kMostRows - 1) / kMostRows;
    const bool are_few = tile.end_row - tile.first_row <= kFewRows;
    const int num_panels = num_groups > 1 && are_few ? 1 : tile.end_panel - tile.first_panel;
    for (int begin = 0; begin < depth_; begin += kInputsPerPass) {
      const int end = std::min(begin + kInputsPerPass, depth_);
      for (Tile part = tile; part.first_panel < tile.end_panel; part.first_panel = part.end_panel) {
        part.end_panel = std::min(part.first_panel + num_panels, tile.end_panel);
        for (int group = 0; group < num_groups; ++group)
          multiply_group(group, num_groups, part, begin, end);
      }
    }
  }

 private:
  static constexpr int kNear = 3072;  // bytes: what memory brings while so many are multiplied with

  // Few rows leave registers: then several panels at once keep the arithmetic units busy.
  static constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  void multiply_group(int group, int num_groups, Tile tile, int begin, int end) const {
    const int num_rows = tile.end_row - tile.first_row;
    const int first = tile.first_row + num_rows * group / num_groups;
    const int last = tile.first_row + num_rows * (group + 1) / num_groups;
    Ahead ahead = {kNear, kStepBytes};
    if (num_groups > 1 && tile.end_panel - tile.first_panel == 1) {
      // Each group fetches its share of the next panel: memory and arithmetic are always busy.
      const ptrdiff_t pass_bytes = ptrdiff_t{end - begin} / Weights::kDepth * kStepBytes;
      ahead = {static_cast<ptrdiff_t>(panel_bytes(weights_.num_inputs)) +
                   pass_bytes * group / num_groups,
               kStepBytes / num_groups};
    }
    multiply_rows<kMostRows>(last - first, first, tile, begin, end, ahead);
  }

  template <int Rows>
  void multiply_rows(int num_rows, int first_row, Tile tile, int begin, int end,
                     Ahead ahead) const {
    if constexpr (Rows > 1) {
      if (num_rows < Rows)
        return multiply_rows<Rows - 1>(num_rows, first_row, tile, begin, end, ahead);
    }
    constexpr int kPanels = panels_at_once(Rows);
    int panel = tile.first_panel;
    for (; panel + kPanels <= tile.end_panel; panel += kPanels)
      multiply_panels<Rows, kPanels>(first_row, panel, begin, end, ahead);
    if constexpr (kPanels > 1) {
      for (; panel < tile.end_panel; ++panel)
        multiply_panels<Rows, 1>(first_row, panel, begin, end, ahead);
    }
  }

  // Not inlined: inside its callers the compiler runs out of registers for the sums.
  template <int Rows, int Panels>
  [[gnu::noinline]] void multiply_panels(int first_row, int first_panel, int begin, int end,
                                         Ahead ahead) const {
    Sums<Rows, Panels> sums;
    const Row* rows[Rows];
    const Item* items[Panels];
    const char* fetched[Panels];
    for (int row = 0; row < Rows; ++row) rows[row] = inputs_.row<Row>(first_row + row);
    for (int p = 0; p < Panels; ++p) {
      items[p] = panel_items(first_panel + p);
      fetched[p] = reinterpret_cast<const char*>(items[p] + begin * kPanelOutputs) + ahead.distance;
      for (int row = 0; row < Rows; ++row)
        begin_sums(first_row + row, first_panel + p, begin, sums.of[row][2 * p],
                   sums.of[row][2 * p + 1]);
    }
    for (int input = begin; input < end; input += Weights::kDepth) {
      // With one row it is memory that limits, and more requests only get in its way.
      for (int p = 0; p < Panels && Rows > 1; ++p) {
        __builtin_prefetch(fetched[p]);
        fetched[p] += ahead.step;
      }
      Weights::template step<Rows, Panels>(rows, input, items, sums);
    }
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
