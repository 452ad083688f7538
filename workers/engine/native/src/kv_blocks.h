// Where keys and values lie in the pool. The layout is that of workers/engine/kv_layout.py:
//
//     [block][layer][keys | values][kv head][offset in block][head_dim]
#pragma once

#include <cstddef>
#include <cstdint>

namespace mesh {

struct KvShape {
  int num_layers;
  int num_kv_heads;
  int head_dim;
  int block_size;

  // Items from one block, or one head's tokens, to the next.
  size_t head_items() const { return static_cast<size_t>(block_size) * head_dim; }
  size_t block_items() const {
    return head_items() * static_cast<size_t>(num_kv_heads) * 2 * static_cast<size_t>(num_layers);
  }
};

// Tokens that lie behind each other: [count, head_dim] keys and values.
template <class Item>
struct KvRun {
  Item* keys;
  Item* values;
  int count;
};

// One kv head of one layer of one sequence. `Item` is float or Bf16.
template <class Item>
class KvHead {
 public:
  KvHead(Item* pool, const KvShape& shape, const int32_t* block_table, int layer, int head)
      : shape_(shape), block_table_(block_table), block_items_(shape.block_items()) {
    const auto first = static_cast<size_t>(2 * layer * shape.num_kv_heads + head);
    keys_ = pool + first * shape.head_items();
    values_ = keys_ + static_cast<size_t>(shape.num_kv_heads) * shape.head_items();
  }

  // What lies from `position` to the end of its block.
  KvRun<Item> run(int position) const {
    const auto block = static_cast<size_t>(block_table_[position / shape_.block_size]);
    const int within = position % shape_.block_size;
    const size_t offset = block * block_items_ + static_cast<size_t>(within * shape_.head_dim);
    return {keys_ + offset, values_ + offset, shape_.block_size - within};
  }

 private:
  const KvShape& shape_;
  const int32_t* block_table_;
  const size_t block_items_;
  Item* keys_;
  Item* values_;
};

// All kv heads of one layer of one sequence.
template <class Item>
struct KvHeads {
  Item* pool;
  const KvShape& shape;
  const int32_t* block_table;
  int layer;

  KvHead<Item> head(int number) const { return {pool, shape, block_table, layer, number}; }
};

}  // namespace mesh
