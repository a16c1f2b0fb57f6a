// An allocator of large CPU tensors that keeps what is freed, and never holds more than was once in use.
//
// Ranges of pages are cut from the smallest free range that suffices, and merged with their neighbours when they are
// freed. When none suffices, free ranges go back to the system first, as many bytes as would take alive and free
// together beyond the most that was ever alive; then new pages are mapped. Small requests are the default allocator's.
//
// Knuth, The Art of Computer Programming, volume 1, section 2.5: best fit, with boundaries merged.

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr size_t kHugePage = 2 << 20;

size_t up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

void give_back(uintptr_t start, size_t bytes) { munmap(reinterpret_cast<void*>(start), bytes); }

class Pool final : public c10::Allocator {
 public:
  Pool(size_t smallest, bool huge_pages) : smallest_(smallest), huge_pages_(huge_pages) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < smallest_) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* data = take(up(bytes, page_));
    if (data == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);  // which says why, and raises
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &Pool::free, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Pool::free; }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

 private:
  using Ranges = std::map<uintptr_t, size_t>;  // start -> bytes

  static void free(void* data);

  void* take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto fitting = by_size_.lower_bound({bytes, 0});
    uintptr_t start;
    if (fitting != by_size_.end()) {
      start = fitting->second;
      const size_t rest = fitting->first - bytes;
      remove(free_.find(start));
      if (rest > 0) add(start + bytes, rest);
    } else {
      const size_t most = std::max(most_alive_bytes_, alive_bytes_ + bytes);
      const size_t after = alive_bytes_ + bytes + free_bytes_;
      if (after > most) give_back_smallest(after - most);
      start = map(bytes);
      if (start == 0) {
        give_back_smallest(free_bytes_);
        start = map(bytes);
      }
      if (start == 0) return nullptr;
    }
    alive_[start] = bytes;
    alive_bytes_ += bytes;
    most_alive_bytes_ = std::max(most_alive_bytes_, alive_bytes_);
    return reinterpret_cast<void*>(start);
  }

  // Begins where a huge page can, so that the kernel uses them. 0 where there is no memory.
  uintptr_t map(size_t bytes) {
    const size_t mapped = bytes + kHugePage;
    void* data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return 0;
    const auto begin = reinterpret_cast<uintptr_t>(data);
    const uintptr_t start = up(begin, kHugePage);
    if (start > begin) give_back(begin, start - begin);
    if (begin + mapped > start + bytes) give_back(start + bytes, begin + mapped - start - bytes);
    if (huge_pages_) madvise(reinterpret_cast<void*>(start), bytes, MADV_HUGEPAGE);
    return start;
  }

  void give_back_smallest(size_t bytes) {
    while (bytes > 0 && !by_size_.empty()) {
      const auto [size, start] = *by_size_.begin();
      const size_t given = std::min(size, bytes);
      remove(free_.find(start));
      give_back(start + size - given, given);
      if (size > given) add(start, size - given);
      bytes -= given;
    }
  }

  bool took_back(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = alive_.find(reinterpret_cast<uintptr_t>(data));
    if (found == alive_.end()) return false;
    uintptr_t start = found->first;
    size_t bytes = found->second;
    alive_.erase(found);
    alive_bytes_ -= bytes;
    auto next = free_.lower_bound(start);
    if (next != free_.end() && start + bytes == next->first) {
      bytes += next->second;
      next = remove(next);
    }
    if (next != free_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == start) {
        start = previous->first;
        bytes += previous->second;
        remove(previous);
      }
    }
    add(start, bytes);
    return true;
  }

  void add(uintptr_t start, size_t bytes) {
    free_.emplace(start, bytes);
    by_size_.emplace(bytes, start);
    free_bytes_ += bytes;
  }

  Ranges::iterator remove(Ranges::iterator range) {
    by_size_.erase({range->second, range->first});
    free_bytes_ -= range->second;
    return free_.erase(range);
  }

  const size_t smallest_;
  const bool huge_pages_;
  const size_t page_ = sysconf(_SC_PAGESIZE);
  std::mutex mutex_;
  std::unordered_map<uintptr_t, size_t> alive_;
  Ranges free_;
  std::set<std::pair<size_t, uintptr_t>> by_size_;  // of the free ranges
  size_t alive_bytes_ = 0, free_bytes_ = 0, most_alive_bytes_ = 0;
};

Pool* pool = nullptr;

void Pool::free(void* data) {
  if (pool->took_back(data)) {
    c10::profiledCPUMemoryReporter().Delete(data);
  } else {
    c10::GetDefaultCPUAllocator()->raw_deleter()(data);
  }
}

}  // namespace

// From now on torch's CPU tensors of `smallest_bytes` or more come from a pool, for good.
extern "C" void lean_ft_host_pool_install(size_t smallest_bytes, bool huge_pages) {
  if (pool != nullptr) return;
  pool = new Pool(smallest_bytes, huge_pages);
  c10::SetCPUAllocator(pool, 255);
}
