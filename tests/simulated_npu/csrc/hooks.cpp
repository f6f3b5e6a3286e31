// What torch asks an accelerator for, beside its guard and its allocator.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>

#include "device.h"
#include "random.h"

namespace simulated_npu {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return device_count() > 0;
  }

  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return initialized();
  }

  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }

  void setCurrentDevice(c10::DeviceIndex index) const override {
    initialize();
    set_current_device(index);
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_device();
    set_current_device(index);
    return before;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }

  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return at::GetAllocator(at::kCPU); // the host reads all of its memory alike
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard on(storage.device());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace
} // namespace simulated_npu
