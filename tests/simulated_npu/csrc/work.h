// A collective under way.
#pragma once

#include <functional>
#include <mutex>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace simulated_npu {

class HcclWork final : public c10d::Work {
 public:
  // `finish` runs once, in the first thread that waits, when gloo is done.
  HcclWork(c10::intrusive_ptr<c10d::Work> gloo, std::vector<at::Tensor> outputs, std::function<void()> finish)
      : gloo_(std::move(gloo)), outputs_(std::move(outputs)), finish_(std::move(finish)) {}

  bool isCompleted() override {
    return gloo_->isCompleted();
  }

  bool isSuccess() const override {
    return gloo_->isSuccess();
  }

  std::exception_ptr exception() const override {
    return gloo_->exception();
  }

  int sourceRank() const override {
    return gloo_->sourceRank();
  }

  std::vector<at::Tensor> result() override {
    wait(kNoTimeout);
    return outputs_;
  }

  void synchronize() override {
    wait(kNoTimeout);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = gloo_->wait(timeout);
    std::call_once(finished_, [this] {
      if (finish_) {
        finish_();
      }
    });
    return done;
  }

  void abort() override {
    gloo_->abort();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  c10::intrusive_ptr<c10d::Work> gloo_;
  std::vector<at::Tensor> outputs_;
  std::function<void()> finish_;
  std::once_flag finished_;
};

} // namespace simulated_npu
