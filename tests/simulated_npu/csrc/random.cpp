#include "random.h"

#include <mutex>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>

#include "device.h"

namespace simulated_npu {
namespace {

class NpuGenerator final : public at::CPUGeneratorImpl {
 public:
  explicit NpuGenerator(c10::DeviceIndex index) {
    device_ = c10::Device(kNpu, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  NpuGenerator* clone_impl() const override {
    auto* clone = new NpuGenerator(device_.index());
    clone->set_state(*get_state());
    return clone;
  }
};

// Two threads that draw would otherwise swap each other's states into the CPU's generator.
std::mutex drawing;

} // namespace

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<NpuGenerator>(index < 0 ? current_device() : index);
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex device = 0; device < kMaxDevices; ++device) {
      made.push_back(new_generator(device));
    }
    return made;
  }();
  return generators.at(index < 0 ? current_device() : index);
}

DrawFrom::DrawFrom(at::Generator generator) : generator_(std::move(generator)) {
  drawing.lock();
  auto host = at::detail::getDefaultCPUGenerator();
  host_state_ = host.get_state();
  host.set_state(generator_.get_state());
}

DrawFrom::~DrawFrom() {
  auto host = at::detail::getDefaultCPUGenerator();
  generator_.set_state(host.get_state());
  host.set_state(host_state_);
  drawing.unlock();
}

} // namespace simulated_npu
