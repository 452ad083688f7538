#include "scan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "simd.h"

namespace mesh {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kColumnsPerToken = 4;  // of the table whose columns' largest give the bound
constexpr int kVectorsPerSum = 8;
constexpr float kLeastExponent = -87.0f;  // e to this is lost beside a weight of 1

// kWidth items from `at` on; -inf behind the last one.
Vec load_padded(const float* items, int at, int count) {
  if (at + kWidth <= count) return load(items + at);
  float lanes[kWidth];
  std::fill_n(lanes, kWidth, kNone);
  std::copy(items + at, items + count, lanes);
  return load(lanes);
}

// (Of `a > b ? a : b` not-a-number is never the result while b is a number.)
float largest_of(const float* items, int count) {
  Vec most = splat(kNone);
  for (int at = 0; at < count; at += kWidth) most = vector_max(load_padded(items, at, count), most);
  return max_lanes(most);
}

int first_place_of(float value, const float* items, int count) {
  for (int at = 0; at < count; at += kWidth) {
    const uint32_t equal = lanes_of(load_padded(items, at, count) == splat(value));
    if (equal != 0) return at + __builtin_ctz(equal);
  }
  return 0;
}

Vec weights_of(Vec logits, float largest, float inverse_temperature) {
  const Vec exponents = (logits - largest) * inverse_temperature;
  return exponents > kLeastExponent ? exponential(exponents) : splat(0.0f);
}

// Sums of a few vectors are floats, what these add up to is not.
double weight_of(const float* items, int count, float largest, float inverse_temperature) {
  double lanes[kWidth] = {};
  for (int first = 0; first < count; first += kVectorsPerSum * kWidth) {
    const int end = std::min(count, first + kVectorsPerSum * kWidth);
    Vec sums = {};
    for (int at = first; at < end; at += kWidth)
      sums += weights_of(load_padded(items, at, count), largest, inverse_temperature);
    for (int lane = 0; lane < kWidth; ++lane) lanes[lane] += sums[lane];
  }
  return std::accumulate(lanes, lanes + kWidth, 0.0);
}

// Laid out as a table of so many columns: the largest of each. A last, unfilled line is left out.
void find_column_maxima(const float* items, int count, int num_columns,
                        std::vector<float>& maxima) {
  maxima.assign(static_cast<size_t>((num_columns + kWidth - 1) / kWidth * kWidth), kNone);
  for (const float* end = items + count / num_columns * num_columns; items < end;
       items += num_columns)
    for (int at = 0; at < num_columns; at += kWidth)
      store(maxima.data() + at,
            vector_max(load_padded(items, at, num_columns), load(maxima.data() + at)));
}

// A logit that `at_least` tokens of the row reach; -inf for all.
float bound_of(const float* row, int vocab_size, int at_least) {
  thread_local std::vector<float> maxima;
  if (at_least >= vocab_size) return kNone;
  // With one line to a column each logit would be the largest of its own.
  const int64_t num_columns = int64_t{kColumnsPerToken} * at_least;
  const bool is_table = 2 * num_columns <= vocab_size;
  const int columns = is_table ? static_cast<int>(num_columns) : vocab_size;
  find_column_maxima(row, vocab_size, columns, maxima);
  const auto place = maxima.begin() + (at_least - 1);
  std::nth_element(maxima.begin(), place, maxima.end(), std::greater<>());
  return *place;
}

// Integers in ascending order are logits in descending, ids in ascending order.
uint64_t sort_key(float logit, int id) {
  const float positive_zero = logit + 0.0f;  // -0 is 0
  uint32_t bits;
  std::memcpy(&bits, &positive_zero, sizeof bits);
  const uint32_t ascending = bits >> 31 ? ~bits : bits | uint32_t{1} << 31;
  return uint64_t{~ascending} << 32 | static_cast<uint32_t>(id);
}

// Puts the keys of all tokens that reach `bound` in order; false when there are more than `most`.
bool collect(const float* row, int vocab_size, float bound, size_t most,
             std::vector<uint64_t>& keys) {
  keys.clear();
  for (int at = 0; at < vocab_size; at += kWidth) {
    uint32_t reach = lanes_of(load_padded(row, at, vocab_size) >= splat(bound));
    for (; reach != 0; reach &= reach - 1) {
      if (keys.size() == most) return false;
      const int id = at + __builtin_ctz(reach);
      keys.push_back(sort_key(row[id], id));
    }
  }
  std::sort(keys.begin(), keys.end());
  return true;
}

void find_likeliest_of(const LogitRows& rows, int64_t number, const LikeliestTokens& tokens) {
  thread_local std::vector<uint64_t> keys;
  const float* row = rows.row(number);
  const float bound = bound_of(row, rows.vocab_size, tokens.at_least);
  const float least = std::max(bound, std::numeric_limits<float>::lowest());
  const auto most = static_cast<size_t>(tokens.capacity);
  const bool fits = collect(row, rows.vocab_size, least, most, keys);
  if (!fits) keys.clear();
  tokens.counts[number] = static_cast<int64_t>(keys.size());
  tokens.is_all[number] = fits && bound == kNone;
  for (size_t place = 0; place < keys.size(); ++place) {
    const auto id = static_cast<int64_t>(keys[place] & 0xffffffff);
    const size_t at = static_cast<size_t>(number) * static_cast<size_t>(tokens.capacity) + place;
    tokens.ids[at] = id;
    tokens.logits[at] = row[id];
  }
}

}  // namespace

void find_largest(const LogitRows& rows, int32_t* ids, ThreadTeam& team) {
  team.run(rows.num_rows, [&](int64_t number) {
    const float* row = rows.row(number);
    const float largest = largest_of(row, rows.vocab_size);
    ids[number] = largest == kNone ? 0 : first_place_of(largest, row, rows.vocab_size);
  });
}

void weigh_runs(const LogitRows& rows, const RunWeights& weights, ThreadTeam& team) {
  const int num_runs = (rows.vocab_size + kTokensPerRun - 1) / kTokensPerRun;
  team.run(rows.num_rows, [&](int64_t number) {
    const float* row = rows.row(number);
    const float largest = largest_of(row, rows.vocab_size);
    weights.largest[number] = largest;
    for (int run = 0; run < num_runs; ++run) {
      const int first = run * kTokensPerRun;
      weights.sums[number * num_runs + run] =
          weight_of(row + first, std::min(kTokensPerRun, rows.vocab_size - first), largest,
                    1.0f / weights.temperatures[number]);
    }
  });
}

void find_likeliest(const LogitRows& rows, LikeliestTokens& tokens, ThreadTeam& team) {
  team.run(rows.num_rows, [&](int64_t number) { find_likeliest_of(rows, number, tokens); });
  const auto num_rows = static_cast<size_t>(rows.num_rows);
  const auto capacity = static_cast<size_t>(tokens.capacity);
  size_t width = 1;
  for (size_t row = 0; row < num_rows; ++row)
    width = std::max(width, static_cast<size_t>(tokens.counts[row]));
  for (size_t row = 0; row < num_rows; ++row) {
    const auto count = static_cast<size_t>(tokens.counts[row]);
    std::fill_n(tokens.ids + row * capacity + count, width - count, 0);
    std::fill_n(tokens.logits + row * capacity + count, width - count, kNone);
  }
  tokens.width = static_cast<int32_t>(width);
}

}  // namespace mesh
