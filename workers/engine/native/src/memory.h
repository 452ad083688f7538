// Memory that vectors and huge pages like.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include <sys/mman.h>

namespace mesh {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// An array of plain items that is aligned for vectors, and for huge pages when it is large
// (weights are read once per step, from end to end: fewer page walks). Its items start as zero.
template <class Item>
class Array {
 public:
  Array() = default;
  explicit Array(size_t size) : size_(size) {
    const size_t alignment = size * sizeof(Item) >= kHugePage ? kHugePage : 64;
    const size_t bytes = (size * sizeof(Item) + alignment) / alignment * alignment;
    void* memory = std::aligned_alloc(alignment, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    if (alignment == kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);  // a hint; may be refused
    __builtin_memset(memory, 0, bytes);
    items_.reset(static_cast<Item*>(memory));
  }

  // Contents are lost when it has to grow.
  void reserve(size_t size) {
    if (size > size_) *this = Array(size);
  }

  Item* data() { return items_.get(); }
  const Item* data() const { return items_.get(); }
  size_t size() const { return size_; }
  Item& operator[](size_t index) { return items_.get()[index]; }
  const Item& operator[](size_t index) const { return items_.get()[index]; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  std::unique_ptr<Item, Free> items_;
  size_t size_ = 0;
};

}  // namespace mesh
