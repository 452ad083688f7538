// A decoder of the Llama family over paged keys and values: one call computes one packed batch.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "kv_blocks.h"
#include "linear.h"
#include "thread_team.h"

namespace mesh {

// Numbers are part of the C interface, as are the structs below.
enum class KvKind : int32_t { kFp32 = 0, kBf16 = 1 };

struct ModelShape {
  int32_t num_layers;
  int32_t hidden_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t intermediate_size;
  int32_t vocab_size;
  int32_t block_size;
  KvKind kv_kind;
  float norm_epsilon;
  float score_scale;
};

// A sequence's share of a batch: rows [first_row, first_row + count) hold the tokens at positions
// [start, start + count).
struct Span {
  int32_t first_row;
  int32_t count;
  int32_t start;
  int32_t first_block;  // where its block table begins in Batch::block_tables
  int32_t logits_row;   // where its last row's logits go; -1: they are not wanted
};

struct Batch {
  int32_t num_rows;
  int32_t num_spans;
  const int32_t* token_ids;  // [num_rows]
  const Span* spans;         // [num_spans], in the order of their rows
  const int32_t* block_tables;
  const float* cosines;  // [positions, head_dim / 2]: rotations, scaled as the model wants them
  const float* sines;
  void* pool;     // blocks, of the model's KvKind
  float* logits;  // [rows with logits, vocab_size]
};

// Seconds spent since the model was made, of the thread that calls `run`.
struct Times {
  double linear;
  double attention;
  double rows;  // norms, rotations, gates, residuals, embeddings
};

// Linear layers by what they do; several parts of one follow each other in its outputs.
using Parts = std::vector<std::unique_ptr<PackedLinear>>;

struct Layer {
  Array<float> input_norm;
  Array<float> post_norm;
  Array<float> query_norm;  // empty: queries and keys are not normalised
  Array<float> key_norm;
  int window = 1 << 30;  // tokens that a query sees, itself included
  Parts query_key_value;
  Parts output;
  Parts gate_up;
  Parts down;
};

class Model {
 public:
  Model(const ModelShape& shape, int num_threads);

  Layer& layer(int number) { return layers_[static_cast<size_t>(number)]; }

  // Computes a batch: writes its keys and values into the pool and the wanted logits. A row's
  // results depend on its own sequence alone, bit for bit.
  void run(const Batch& batch);

  const ModelShape shape;
  Parts embedding;  // empty: the head's weights
  Parts head;
  Array<float> final_norm;
  Times times = {};
  ThreadTeam team;

 private:
  // Rows of floats, padded so that rows of a power of two don't share cache sets.
  struct Rows {
    Array<float> items;
    size_t stride = 0;

    void reserve(int num_rows, int size);
    float* row(int64_t number) { return items.data() + static_cast<size_t>(number) * stride; }
    InputRows inputs() const {
      return {reinterpret_cast<const std::byte*>(items.data()), stride * sizeof(float)};
    }
  };

  // Some positions of one span, attended together: all heads of them, or some at a time.
  struct AttentionTask {
    int span;
    int first_position, end_position;
  };

  void begin(const Batch& batch);
  void place_rows();
  void plan_attention();
  int head_shares(int num_tasks) const;
  void keep_wanted_rows();
  void embed();
  void attention_part(int number);
  void mlp_part(const Layer& layer);
  void finish(float* logits);
  void project(const Parts& parts, Rows& from, OutputRows to, double& seconds);
  void normalise(const Array<float>& weights, bool adds_delta);
  void prepare_heads(const Layer& layer, int number);
  template <class Item>
  void prepare_row(const Layer& layer, int number, int row);
  template <class Item>
  void attend_task(const Layer& layer, int number, const AttentionTask& task, int share);
  void attend_all(const Layer& layer, int number);
  template <class Body>
  void for_rows(int floats_per_row, const Body& body);

  KvShape kv_shape() const {
    return {shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_size};
  }
  int group() const { return shape.num_heads / shape.num_kv_heads; }

  std::vector<Layer> layers_;
  const KvShape kv_shape_;

  // Of the batch that runs.
  const Batch* batch_ = nullptr;
  int num_rows_ = 0;  // those that are still computed
  std::vector<Span> spans_;
  std::vector<int32_t> span_of_row_;
  std::vector<AttentionTask> attention_tasks_;
  int head_shares_ = 1;  // into how many pieces a task's query heads are shared out
  Rows hidden_;    // the residual stream
  Rows normed_;    // what the next linear layer reads
  Rows heads_;     // queries, keys, values
  Rows attended_;
  Rows wide_;      // gates, then gates times ups
  Rows delta_;     // what is added to the residual stream next
  Array<std::byte> prepared_;
};

}  // namespace mesh
