// Device memory: the host's, counted per device.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace simulated_npu {

c10::DeviceAllocator& memory();

// What each device claims to have; nothing enforces it.
constexpr size_t kTotalMemory = size_t(64) << 30;

} // namespace simulated_npu
