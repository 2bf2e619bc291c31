// A CPU allocator for torch that counts live bytes and their peak.
//
// It sees every storage of a process, whichever code or thread made it: eager ops, the buffers of
// Inductor's generated code, resized storages, what a collective allocates. Sizes are those that
// malloc really gave, so what is added and what is taken away agree.

#include <atomic>
#include <malloc.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

namespace {

std::atomic<long long> live{0};
std::atomic<long long> peak{0};

long long size_of(void* block) {
  return static_cast<long long>(malloc_usable_size(block));
}

void release(void* block) {
  if (block == nullptr) {
    return;
  }
  live -= size_of(block);
  c10::free_cpu(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* block = c10::alloc_cpu(nbytes);
    if (block != nullptr) {
      const long long now = live += size_of(block);
      long long highest = peak.load();
      while (now > highest && !peak.compare_exchange_weak(highest, now)) {
      }
    }
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
} counting;

} // namespace

extern "C" {

void count_allocations() {
  c10::SetCPUAllocator(&counting, /*priority=*/1);
}

long long live_bytes() {
  return live.load();
}

long long peak_bytes() {
  return peak.load();
}

void restart_peak() {
  peak = live.load();
}
}
