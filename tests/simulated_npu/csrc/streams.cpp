// Streams and events. A kernel has run when its call returns, so there is never anything to wait for; what counts
// is which stream is current and when an event was recorded.
#include <array>
#include <atomic>
#include <chrono>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.h"

namespace simulated_npu {
namespace {

using Clock = std::chrono::steady_clock;

thread_local std::array<c10::StreamId, kMaxDevices> current_streams{}; // 0 is a device's default stream
std::atomic<c10::StreamId> next_stream{1};

c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, device), id);
}

// An index for a device that may come without one.
c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kNpu;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_current_device(device.index());
    return before;
  }

  c10::Device getDevice() const override {
    return c10::Device(kNpu, current_device());
  }

  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), current_streams.at(index_of(device)));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index_of(device), 0);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(index_of(device), next_stream++);
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(index_of(device), next_stream++);
  }

  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = getStream(to.device());
    current_streams.at(to.device_index()) = to.id();
    return before;
  }

  bool queryStream(const c10::Stream&) const override {
    return true;
  }

  void synchronizeStream(const c10::Stream&) const override {}

  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point();
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }

  void block(void*, const c10::Stream&) const override {}

  bool queryEvent(void*) const override {
    return true;
  }

  void synchronizeEvent(void*) const override {}

  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto passed = *static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from);
    return std::chrono::duration<double, std::milli>(passed).count();
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace
} // namespace simulated_npu
