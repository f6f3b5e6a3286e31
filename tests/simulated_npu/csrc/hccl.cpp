#include "hccl.h"

#include <set>

#include "host.h"
#include "work.h"

namespace simulated_npu {
namespace {

using c10d::ReduceOp;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors hosts;
  for (const auto& tensor : tensors) {
    hosts.push_back(simulated_npu::on_host(tensor));
  }
  return hosts;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (const auto& list : lists) {
    hosts.push_back(on_host(list));
  }
  return hosts;
}

Tensor flat(const Tensors& tensors) {
  Tensors rows;
  for (const auto& tensor : tensors) {
    rows.push_back(tensor.reshape({-1}));
  }
  return at::cat(rows);
}

std::vector<int64_t> sizes(const Tensors& tensors) {
  std::vector<int64_t> sizes;
  for (const auto& tensor : tensors) {
    sizes.push_back(tensor.numel());
  }
  return sizes;
}

// HCCL reduces these types by these operations, and averages by dividing the sum; all else it refuses.
void check_reduction(const ReduceOp& op, const Tensors& tensors, const char* collective) {
  static const std::set<at::ScalarType> types{
      at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat};
  static const std::set<ReduceOp::RedOpType> operations{
      ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::AVG};
  TORCH_CHECK(operations.count(op) != 0, "HCCL ", collective, ": unsupported reduction ", int(op.op_));
  for (const auto& tensor : tensors) {
    TORCH_CHECK(types.count(tensor.scalar_type()) != 0,
        "HCCL ", collective, ": unsupported data type ", tensor.scalar_type());
  }
}

template <typename Options>
Options summing(Options options) {
  if (options.reduceOp == ReduceOp::AVG) {
    options.reduceOp = ReduceOp::SUM;
  }
  return options;
}

class Hccl final : public c10d::Backend {
 public:
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "hccl";
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }

  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }

  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }

  void abort() override {
    gloo_->abort();
  }

  void shutdown() override {
    gloo_->shutdown();
  }

  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = on_host(tensors);
    return pending(gloo_->broadcast(hosts, options), tensors);
  }

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check_reduction(options.reduceOp, tensors, "allreduce");
    auto hosts = on_host(tensors);
    return reduced(gloo_->allreduce(hosts, summing(options)), tensors, options.reduceOp);
  }

  Pending allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check_reduction(options.reduceOp, tensors, "allreduce");
    auto hosts = on_host(tensors);
    return reduced(gloo_->allreduce_coalesced(hosts, summing(options)), tensors, options.reduceOp);
  }

  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_reduction(options.reduceOp, tensors, "reduce");
    auto hosts = on_host(tensors);
    return reduced(gloo_->reduce(hosts, summing(options)), tensors, options.reduceOp);
  }

  Pending reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    check_reduction(options.reduceOp, outputs, "reduce_scatter");
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return reduced(
        gloo_->reduce_scatter(host_outputs, host_inputs, summing(options)), outputs, options.reduceOp);
  }

  Pending _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check_reduction(options.reduceOp, {output}, "reduce_scatter");
    auto host_output = simulated_npu::on_host(output);
    auto host_input = simulated_npu::on_host(input);
    return reduced(
        gloo_->_reduce_scatter_base(host_output, host_input, summing(options)), {output}, options.reduceOp);
  }

  Pending reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    check_reduction(options.reduceOp, outputs, "reduce_scatter");
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return reduced(
        gloo_->reduce_scatter_tensor_coalesced(host_outputs, host_inputs, summing(options)),
        outputs,
        options.reduceOp);
  }

  Pending allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return pending(gloo_->allgather(host_outputs, host_inputs, options), outputs.at(0));
  }

  Pending _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto host_output = simulated_npu::on_host(output);
    auto host_input = simulated_npu::on_host(input);
    return pending(gloo_->_allgather_base(host_output, host_input, options), {output});
  }

  Pending allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return pending(gloo_->allgather_into_tensor_coalesced(host_outputs, host_inputs, options), outputs);
  }

  Pending gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return pending(
        gloo_->gather(host_outputs, host_inputs, options), outputs.empty() ? Tensors() : outputs[0]);
  }

  Pending scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return pending(gloo_->scatter(host_outputs, host_inputs, options), outputs);
  }

  Pending alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto host_output = simulated_npu::on_host(output);
    auto host_input = simulated_npu::on_host(input);
    return pending(
        gloo_->alltoall_base(host_output, host_input, output_sizes, input_sizes, options), {output});
  }

  // By way of one tensor each way: gloo takes lists of equal sizes only.
  Pending alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto sent = flat(on_host(inputs));
    auto received = at::empty_like(flat(on_host(outputs)));
    auto input_sizes = sizes(inputs);
    auto output_sizes = sizes(outputs);
    auto spread = [hosts = on_host(outputs), received, output_sizes] {
      const auto parts = received.split_with_sizes(output_sizes);
      for (size_t i = 0; i < hosts.size(); ++i) {
        hosts[i].copy_(parts[i].view_as(hosts[i]));
      }
    };
    return pending(
        gloo_->alltoall_base(received, sent, output_sizes, input_sizes, options), outputs, std::move(spread));
  }

  Pending send(Tensors& tensors, int to, int tag) override {
    auto hosts = on_host(tensors);
    return pending(gloo_->send(hosts, to, tag), tensors);
  }

  Pending recv(Tensors& tensors, int from, int tag) override {
    auto hosts = on_host(tensors);
    return pending(gloo_->recv(hosts, from, tag), tensors);
  }

  Pending recvAnysource(Tensors& tensors, int tag) override {
    auto hosts = on_host(tensors);
    return pending(gloo_->recvAnysource(hosts, tag), tensors);
  }

  Pending barrier(const c10d::BarrierOptions& options) override {
    auto on_cpu = options;
    on_cpu.device = std::nullopt;
    on_cpu.device_ids.clear();
    return pending(gloo_->barrier(on_cpu), {});
  }

 private:
  static Pending pending(Pending gloo, Tensors outputs, std::function<void()> finish = nullptr) {
    return c10::make_intrusive<HcclWork>(std::move(gloo), std::move(outputs), std::move(finish));
  }

  Pending reduced(Pending gloo, const Tensors& outputs, const ReduceOp& op) {
    if (op != ReduceOp::AVG) {
      return pending(std::move(gloo), outputs);
    }
    auto average = [hosts = on_host(outputs), size = getSize()] {
      for (auto host : hosts) {
        host.div_(size);
      }
    };
    return pending(std::move(gloo), outputs, std::move(average));
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_hccl(c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<Hccl>(std::move(gloo));
}

} // namespace simulated_npu
