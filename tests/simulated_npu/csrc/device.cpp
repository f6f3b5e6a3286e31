#include "device.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#include <c10/util/Exception.h>

namespace simulated_npu {
namespace {

thread_local c10::DeviceIndex current = 0;
std::atomic<bool> used{false};

} // namespace

c10::DeviceIndex device_count() {
  static const c10::DeviceIndex count = [] {
    const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (visible == nullptr) {
      return kMaxDevices;
    }
    const std::string list(visible);
    if (list.empty() || list == "-1") {
      return c10::DeviceIndex(0);
    }
    const auto listed = 1 + std::count(list.begin(), list.end(), ',');
    return static_cast<c10::DeviceIndex>(std::min<long>(listed, kMaxDevices));
  }();
  return count;
}

c10::DeviceIndex current_device() {
  return current;
}

void set_current_device(c10::DeviceIndex index) {
  if (index < 0) {
    return;
  }
  TORCH_CHECK(index < device_count(), "npu:", int(index), " asked for, and this process sees ", int(device_count()));
  current = index;
}

bool initialized() {
  return used;
}

void initialize() {
  used = true;
}

} // namespace simulated_npu
