// The devices of a process: how many it sees, which one is current, whether any was used.
#pragma once

#include <c10/core/Device.h>

namespace simulated_npu {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kMaxDevices = 8;

// All of them, or as many as ASCEND_RT_VISIBLE_DEVICES lists.
c10::DeviceIndex device_count();

// Of the calling thread. A negative index leaves it as it is.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

// Whether memory was allocated or a device selected.
bool initialized();
void initialize();

} // namespace simulated_npu
