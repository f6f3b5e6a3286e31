#include "memory.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <c10/util/Exception.h>

#include "device.h"

namespace simulated_npu {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::Stat;

constexpr size_t kAlignment = 64;

struct Block {
  void* data;
  size_t size;
  c10::DeviceIndex device;
};

// What is in use is what is reserved: freed memory goes back to the host at once.
template <typename Change>
void change_bytes(DeviceStats& stats, Change change) {
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
    change((*bytes)[all]);
  }
}

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    initialize();
    const c10::Device device(kNpu, current_device());
    if (size == 0) {
      return {nullptr, nullptr, &release, device};
    }
    void* data = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "the host has no ", size, " bytes for ", device);
    const std::lock_guard<std::mutex> lock(mutex_);
    change_bytes(stats_[device.index()], [size](Stat& stat) { stat.increase(size); });
    return {data, new Block{data, size, device.index()}, &release, device};
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }

  bool initialized() override {
    return simulated_npu::initialized();
  }

  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_.at(device);
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    change_bytes(stats_.at(device), [](Stat& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    change_bytes(stats_.at(device), [](Stat& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto used = static_cast<size_t>(getDeviceStats(device).allocated_bytes[all].current);
    return {kTotalMemory - std::min(used, kTotalMemory), kTotalMemory};
  }

 private:
  static void release(void* context);

  std::mutex mutex_;
  std::array<DeviceStats, kMaxDevices> stats_;
};

// Never destroyed: tensors may outlive static objects.
Memory& the_memory() {
  static auto* memory = new Memory();
  return *memory;
}

void Memory::release(void* context) {
  auto* block = static_cast<Block*>(context);
  std::free(block->data);
  auto& memory = the_memory();
  {
    const std::lock_guard<std::mutex> lock(memory.mutex_);
    change_bytes(memory.stats_[block->device], [block](Stat& stat) { stat.decrease(block->size); });
  }
  delete block;
}

const bool memory_is_registered = [] {
  c10::SetAllocator(kNpu, &the_memory());
  return true;
}();

} // namespace

c10::DeviceAllocator& memory() {
  return the_memory();
}

} // namespace simulated_npu
