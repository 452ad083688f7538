// Memory of packed weights: one behind the other in huge pages.
//
// A step reads every weight once, from end to end. A matrix of a small model fills no huge page by
// itself, and in pages of 4 KiB the walks to them take a fifth of a step.
#pragma once

#include <cstddef>
#include <memory>

namespace mesh {

// `size` bytes that start as zero, aligned for cache lines. They come out of a region that
// later ones share; it is given back when the last of them is gone.
class WeightMemory {
 public:
  WeightMemory() = default;
  explicit WeightMemory(size_t size);

  std::byte* data() { return bytes_.get(); }
  const std::byte* data() const { return bytes_.get(); }
  size_t size() const { return size_; }

 private:
  std::shared_ptr<std::byte> bytes_;
  size_t size_ = 0;
};

}  // namespace mesh
