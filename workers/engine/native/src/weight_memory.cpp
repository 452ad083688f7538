#include "weight_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

namespace mesh {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kRegion = size_t{32} << 20;
constexpr size_t kLine = 64;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

std::shared_ptr<std::byte> make_region(size_t bytes) {
  void* const memory = std::aligned_alloc(kHugePage, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  madvise(memory, bytes, MADV_HUGEPAGE);  // a hint; may be refused
  return {static_cast<std::byte*>(memory), [](std::byte* region) { std::free(region); }};
}

// Gives out one region after another.
class Regions {
 public:
  std::shared_ptr<std::byte> take(size_t bytes) {
    bytes = round_up(std::max(bytes, kLine), kLine);
    const std::lock_guard lock(mutex_);
    std::shared_ptr<std::byte> region = newest_.lock();
    if (region == nullptr || size_ - used_ < bytes) {
      size_ = round_up(std::max(bytes, kRegion), kHugePage);
      used_ = 0;
      region = make_region(size_);
      newest_ = region;
    }
    std::byte* const part = region.get() + used_;
    used_ += bytes;
    return {region, part};  // keeps the whole region
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<std::byte> newest_;
  size_t size_ = 0, used_ = 0;
};

}  // namespace

WeightMemory::WeightMemory(size_t size) : size_(size) {
  static Regions regions;
  bytes_ = regions.take(size);
  std::memset(bytes_.get(), 0, size);
}

}  // namespace mesh
