#include "model.h"

#include <algorithm>
#include <chrono>

#include "bf16.h"
#include "rows.h"

namespace mesh {
namespace {

constexpr int kFloatsPerTask = 8192;  // of row-by-row work: some microseconds

// Adds the time from its making to its end to `seconds`.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), start_(Clock::now()) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  const Clock::time_point start_;
};

}  // namespace

Model::Model(const ModelShape& shape, int num_threads)
    : shape(shape),
      team(num_threads),
      layers_(static_cast<size_t>(shape.num_layers)),
      kv_shape_(kv_shape()) {}

void Model::Rows::reserve(int num_rows, int size) {
  const size_t wanted = static_cast<size_t>((size + kGranule - 1) / kGranule * kGranule) + kGranule;
  stride = wanted;
  items.reserve(static_cast<size_t>(num_rows) * stride);
}

void Model::run(const Batch& batch) {
  begin(batch);
  embed();
  for (int number = 0; number < shape.num_layers; ++number) {
    attention_part(number);
    mlp_part(layers_[static_cast<size_t>(number)]);
  }
  finish(batch.logits);
}

void Model::begin(const Batch& batch) {
  batch_ = &batch;
  num_rows_ = batch.num_rows;
  spans_.assign(batch.spans, batch.spans + batch.num_spans);
  const int num_head_items = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
  hidden_.reserve(num_rows_, shape.hidden_size);
  normed_.reserve(num_rows_, shape.hidden_size);
  delta_.reserve(num_rows_, shape.hidden_size);
  heads_.reserve(num_rows_, num_head_items);
  attended_.reserve(num_rows_, shape.num_heads * shape.head_dim);
  wide_.reserve(num_rows_, 2 * shape.intermediate_size);
  place_rows();
  plan_attention();
}

void Model::place_rows() {
  span_of_row_.resize(static_cast<size_t>(num_rows_));
  for (size_t number = 0; number < spans_.size(); ++number) {
    const auto first = span_of_row_.begin() + spans_[number].first_row;
    std::fill(first, first + spans_[number].count, static_cast<int32_t>(number));
  }
}

void Model::plan_attention() {
  attention_tasks_.clear();
  const int size = positions_per_block(group());
  for (size_t number = 0; number < spans_.size(); ++number) {
    const int end = spans_[number].start + spans_[number].count;
    for (int first = spans_[number].start; first < end; first += size)
      attention_tasks_.push_back({static_cast<int>(number), first, std::min(first + size, end)});
  }
  // The longest first: what is left at the end is shared evenly.
  std::stable_sort(attention_tasks_.begin(), attention_tasks_.end(),
                   [](const AttentionTask& a, const AttentionTask& b) {
                     return a.end_position > b.end_position;
                   });
  head_shares_ = head_shares(static_cast<int>(attention_tasks_.size()));
}

// Into how many pieces a task's query heads are shared out. One task after the other keeps a thread
// busy where there are many, and all heads of a kv head read the same. But where even those are so
// few that some threads would have one more to compute than others, each gets as many query heads.
int Model::head_shares(int num_tasks) const {
  if (num_tasks >= 4 * team.size()) return 1;
  const bool are_even = num_tasks * shape.num_kv_heads % team.size() == 0;
  const bool are_enough = num_tasks * shape.num_kv_heads >= 4 * team.size();
  if (num_tasks > 1 || are_even || are_enough) return shape.num_kv_heads;
  return std::min(team.size(), shape.num_heads);
}

// In the last layer keys and values were the last thing that other rows were needed for.
void Model::keep_wanted_rows() {
  std::vector<Span> kept;
  for (const Span& span : spans_) {
    if (span.logits_row < 0) continue;
    const int from = span.first_row + span.count - 1;
    const int to = static_cast<int>(kept.size());  // never behind `from`
    if (from != to) {
      std::copy_n(hidden_.row(from), shape.hidden_size, hidden_.row(to));
      std::copy_n(heads_.row(from), shape.num_heads * shape.head_dim, heads_.row(to));
    }
    kept.push_back({to, 1, span.start + span.count - 1, span.first_block, span.logits_row});
  }
  spans_ = std::move(kept);
  num_rows_ = static_cast<int>(spans_.size());
  place_rows();
  plan_attention();
}

template <class Body>
void Model::for_rows(int floats_per_row, const Body& body) {
  const Stopwatch watch(times.rows);
  const int rows_per_task = std::max(1, kFloatsPerTask / floats_per_row);
  team.run((num_rows_ + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int first = static_cast<int>(task) * rows_per_task;
    const int end = std::min(first + rows_per_task, num_rows_);
    for (int row = first; row < end; ++row) body(row);
  });
}

void Model::embed() {
  const PackedLinear& weights = embedding.empty() ? *head.front() : *embedding.front();
  const LinearKernel& kernel = *kernel_of(weights.kind);
  for_rows(shape.hidden_size,
           [&](int row) { kernel.unpack(weights, batch_->token_ids[row], hidden_.row(row)); });
}

void Model::attention_part(int number) {
  const Layer& layer = layers_[static_cast<size_t>(number)];
  normalise(layer.input_norm, number > 0);
  project(layer.query_key_value, normed_, {heads_.items.data(), heads_.stride}, times.linear);
  prepare_heads(layer, number);
  if (number == shape.num_layers - 1) keep_wanted_rows();
  attend_all(layer, number);
  project(layer.output, attended_, {delta_.items.data(), delta_.stride}, times.linear);
}

void Model::mlp_part(const Layer& layer) {
  normalise(layer.post_norm, true);
  project(layer.gate_up, normed_, {wide_.items.data(), wide_.stride}, times.linear);
  for_rows(2 * shape.intermediate_size, [&](int row) {
    float* gates = wide_.row(row);
    gated(gates, gates + shape.intermediate_size, shape.intermediate_size, gates);
  });
  project(layer.down, wide_, {delta_.items.data(), delta_.stride}, times.linear);
}

void Model::finish(float* logits) {
  normalise(final_norm, true);
  // Logits are wanted in an order of their own: rows are moved to where theirs go.
  Rows ordered;
  ordered.reserve(num_rows_, shape.hidden_size);
  for (const Span& span : spans_)
    std::copy_n(normed_.row(span.first_row), shape.hidden_size, ordered.row(span.logits_row));
  const auto stride = static_cast<size_t>(shape.vocab_size);
  project(head, ordered, {logits, stride}, times.linear);
}

void Model::project(const Parts& parts, Rows& from, OutputRows to, double& seconds) {
  const Stopwatch watch(seconds);
  for (const auto& part : parts) {
    multiply(*part, from.inputs(), num_rows_, to, prepared_, team);
    to.data += part->num_outputs;
  }
}

// Adds what the last linear layer gave to the residual stream, and normalises that.
void Model::normalise(const Array<float>& weights, bool adds_delta) {
  for_rows(shape.hidden_size, [&](int row) {
    float* hidden = hidden_.row(row);
    if (adds_delta) add_row(hidden, delta_.row(row), shape.hidden_size);
    rms_norm(hidden, weights.data(), shape.hidden_size, shape.norm_epsilon, normed_.row(row));
  });
}

// Queries and keys are normalised and rotated; keys and values are written to the pool.
void Model::prepare_heads(const Layer& layer, int number) {
  const int size = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
  for_rows(size, [&](int row) {
    if (shape.kv_kind == KvKind::kFp32)
      prepare_row<float>(layer, number, row);
    else
      prepare_row<Bf16>(layer, number, row);
  });
}

template <class Item>
void Model::prepare_row(const Layer& layer, int number, int row) {
  const Span& span = spans_[static_cast<size_t>(span_of_row_[static_cast<size_t>(row)])];
  const int position = span.start + row - span.first_row;
  const int head_dim = shape.head_dim;
  const size_t half = static_cast<size_t>(head_dim / 2);
  const float* cosines = batch_->cosines + static_cast<size_t>(position) * half;
  const float* sines = batch_->sines + static_cast<size_t>(position) * half;
  float* item = heads_.row(row);
  for (int head = 0; head < shape.num_heads + shape.num_kv_heads; ++head, item += head_dim) {
    const Array<float>& norm = head < shape.num_heads ? layer.query_norm : layer.key_norm;
    if (norm.size() > 0) rms_norm(item, norm.data(), head_dim, shape.norm_epsilon, item);
    rotate(item, cosines, sines, head_dim);
  }
  const float* keys = heads_.row(row) + shape.num_heads * head_dim;
  const float* values = keys + shape.num_kv_heads * head_dim;
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    const KvHead<Item> kv(static_cast<Item*>(batch_->pool), kv_shape_,
                          batch_->block_tables + span.first_block, number, head);
    const KvRun<Item> place = kv.run(position);
    for (int at = 0; at < head_dim; at += kWidth) {
      store_items(place.keys + at, load(keys + head * head_dim + at));
      store_items(place.values + at, load(values + head * head_dim + at));
    }
  }
}

void Model::attend_all(const Layer& layer, int number) {
  const Stopwatch watch(times.attention);
  const auto num_tasks = static_cast<int64_t>(attention_tasks_.size()) * head_shares_;
  team.run(num_tasks, [&](int64_t at) {
    const AttentionTask& task = attention_tasks_[static_cast<size_t>(at / head_shares_)];
    const int share = static_cast<int>(at % head_shares_);
    if (shape.kv_kind == KvKind::kFp32)
      attend_task<float>(layer, number, task, share);
    else
      attend_task<Bf16>(layer, number, task, share);
  });
}

template <class Item>
void Model::attend_task(const Layer& layer, int number, const AttentionTask& task, int share) {
  const Span& span = spans_[static_cast<size_t>(task.span)];
  const int row = span.first_row + task.first_position - span.start;
  const QueryBlock block = {task.first_position,
                            task.end_position,
                            shape.num_heads * share / head_shares_,
                            shape.num_heads * (share + 1) / head_shares_,
                            group(),
                            heads_.row(row),
                            attended_.row(row),
                            heads_.stride,
                            attended_.stride,
                            shape.score_scale,
                            layer.window};
  const KvHeads<Item> heads = {static_cast<Item*>(batch_->pool), kv_shape_,
                               batch_->block_tables + span.first_block, number};
  attend(block, heads, shape.head_dim);
}

}  // namespace mesh
