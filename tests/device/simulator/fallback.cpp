// Fallback: every other operation, as its CPU kernel on the same memory, run when its stream gets there.
//
// What comes out is known before: the operation is called on meta tensors for the shapes, memory is allocated, and a
// task is given that reads and writes it. Where shapes depend on data (`nonzero`) or the result is no tensor (`equal`),
// the host waits, as CUDA's does. Random operations draw a seed from the device's generator when they are given.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <iomanip>
#include <sstream>
#include <unordered_map>

#include "simulator.h"

namespace sim {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

template <class Each> static IValue replaced(const IValue& value, Each each) {  // each tensor in it, by another
  if (value.isTensor()) return value.toTensor().defined() ? IValue(each(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? each(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(each(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// The CPU's layer norm has its statistics in the dtype of its input and weight, CUDA's in fp32.
static void to_dtypes_of_cpu(const std::string& name, Stack& arguments) {
  if (name != "aten::native_layer_norm_backward") return;
  const auto dtype = (arguments[5].isTensor() ? arguments[5] : arguments[1]).toTensor().scalar_type();
  for (size_t statistic : {3, 4}) arguments[statistic] = arguments[statistic].toTensor().to(dtype);
}

// Of an embedding bag, CUDA's saves for its backward where each index belongs, and no index of a maximum it has not.
static void to_results_of_cuda(const std::string& name, const Stack& arguments, Stack& results) {
  if (name != "aten::_embedding_bag" && name != "aten::_embedding_bag_forward_only") return;
  const Tensor offsets = arguments[2].toTensor(), bag_sizes = results[2].toTensor();
  const Tensor places = at::arange(arguments[1].toTensor().numel(), offsets.options());
  results[1] = at::searchsorted(offsets, places, /*out_int32=*/false, /*right=*/true).sub(1);
  results[2] = at::constant_pad_nd(bag_sizes, {0, offsets.numel() - bag_sizes.numel()});
  if (arguments[4].toInt() != 2) results[3] = at::empty({0}, offsets.options());
}

struct Call {
  const c10::OperatorHandle& op;
  const Stack given;
  const std::string name = c10::toString(op.operator_name());
  int device = -1;
  bool views = false;  // the results are views of arguments: nothing is to run
  bool tensors = true, has_shapes = true;  // the results are tensors; their shapes are those of arguments
  std::vector<Use> uses;
  Stack host, results;  // the arguments as the kernel sees them; tensors with the shapes of the results

  Tensor used(const Tensor& tensor, bool write) {
    if (on_device(tensor)) return uses.push_back(use_of(tensor, write)), host_view(tensor);
    TORCH_CHECK(tensor.is_cpu() && (tensor.dim() == 0 || name.find("index") != std::string::npos), name,
                ": Expected all tensors to be on the same device, but found at least two devices, ", tensor.device(),
                " and ", c10::Device(kind(), device));
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();  // it is read now
  }

  void find_device() {
    for (const IValue& value : given) {
      if (value.isDevice() && value.toDevice().type() == kind()) device = std::max<int>(value.toDevice().index(), 0);
      replaced(value, [&](const Tensor& tensor) {
        if (!on_device(tensor)) return tensor;
        TORCH_CHECK(device < 0 || device == tensor.get_device(), name, ": Expected all tensors to be on the same ",
                    "device, but found at least two devices, ", device, " and ", tensor.get_device());
        device = tensor.get_device();
        return tensor;
      });
    }
    if (device < 0) device = current_device;
  }

  void read_arguments() {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      const bool writes = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      const IValue& value = given[i];
      if (writes && arguments[i].kwarg_only() && value.isTensor() && !value.toTensor().numel()) has_shapes = false;
      host.push_back(value.isDevice() ? IValue(c10::Device(at::kCPU)) : value.isGenerator() ? IValue()
                     : replaced(value, [&](const Tensor& t) { return used(t, writes); }));
    }
    for (const auto& result : op.schema().returns()) {
      const bool is_argument = result.alias_info() && result.alias_info()->isWrite();
      tensors &= result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                 result.type()->isSubtypeOf(*c10::ListType::ofTensors());
      views |= result.alias_info() && !is_argument;
      has_shapes &= is_argument;
    }
  }

  std::function<Stack()> kernel() {
    const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return [op = op, host = host, name = name, cpu] {
      Stack stack = host;
      to_dtypes_of_cpu(name, stack);
      op.redispatchBoxed(cpu, &stack);
      to_results_of_cuda(name, host, stack);
      return stack;
    };
    const auto place = op.schema().argumentIndexWithName("generator");
    const bool named = place && given[*place].isGenerator();
    at::Generator generator = named ? given[*place].toGenerator() : default_generator(device);
    std::lock_guard lock(generator.mutex());
    const uint64_t seed = generator.get<at::CPUGeneratorImpl>()->random64();
    return [op = op, host = host, cpu, place, seed] {
      Stack stack = host;
      if (place) return stack[*place] = at::detail::createCPUGenerator(seed), op.redispatchBoxed(cpu, &stack), stack;
      at::Generator shared = at::detail::getDefaultCPUGenerator();  // the only one that such a kernel uses
      const Tensor before = shared.get_state();
      shared.set_current_seed(seed);
      op.redispatchBoxed(cpu, &stack);
      shared.set_state(before);
      return stack;
    };
  }

  bool find_shapes() {  // `results`; false where the data decides, or nobody knows
    static std::unordered_map<std::string, Stack> known;  // a meta kernel in Python takes 0.1 to 0.4 ms
    static std::mutex mutex;
    std::ostringstream call;
    call << std::setprecision(17) << name;
    Stack meta;
    for (const IValue& value : given) {
      bool plain = !value.isGenerator();
      auto to_meta = [&](const Tensor& t) {
        plain = false;
        call << " " << t.scalar_type() << t.sizes() << t.strides() << t.storage_offset() << on_device(t);
        return on_device(t) ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
      };
      meta.push_back(value.isDevice() ? IValue(c10::Device(at::kMeta)) : plain ? replaced(value, to_meta) : IValue());
      if (plain) call << " " << value;
    }
    std::unique_lock lock(mutex);
    if (auto found = known.find(call.str()); found != known.end()) return results = found->second, true;
    lock.unlock();
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
    } catch (const std::exception&) {
      return false;
    }
    lock.lock();
    results = known[call.str()] = meta;
    return true;
  }

  size_t argument_of(const c10::AliasInfo& alias) const {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].alias_info() && arguments[i].alias_info()->beforeSets() == alias.beforeSets()) return i;
    TORCH_CHECK(false, name, ": a result that is none of the arguments");
  }

  IValue written_argument(size_t i, const IValue& shape) {  // an empty out= grows
    if (has_shapes || !given[i].isTensor()) return given[i];
    const Tensor out = given[i].toTensor(), like = shape.toTensor();
    if (out.sizes() == like.sizes()) return out;
    out.resize_(like.sizes());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
    host[i] = used(out, true);
    return out;
  }

  IValue result(size_t r, IValue& written) {  // `written`: what the kernel's result is to be copied to, if anything
    const auto* alias = op.schema().returns()[r].alias_info();
    if (alias && alias->isWrite()) return written_argument(argument_of(*alias), has_shapes ? IValue() : results[r]);
    if (alias) return replaced(results[r], [base = given[argument_of(*alias)].toTensor()](const Tensor& like) {
      return base.as_strided(like.sizes(), like.strides(), base.storage_offset() + like.storage_offset());
    });
    const IValue fresh = replaced(results[r], [&](const Tensor& like) {
      return empty_strided(like.sizes(), like.strides(), like.scalar_type(), {}, c10::Device(kind(), device), {});
    });
    written = replaced(fresh, [&](const Tensor& tensor) { return used(tensor, true); });
    return fresh;
  }
};

static void put(const IValue& to, const IValue& computed) {  // what only CUDA's kernel saves stays as it is
  if (to.isTensor() && to.toTensor().defined() && (computed.toTensor().numel() || !to.toTensor().numel()))
    to.toTensor().copy_(computed.toTensor());
  if (to.isTensorList())
    for (size_t i = 0; i < to.toListRef().size(); i++) put(to.toListRef()[i], computed.toListRef()[i]);
}

static void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const size_t arguments = op.schema().arguments().size(), returns = op.schema().returns().size();
  Call call{op, Stack(stack->end() - arguments, stack->end())};
  torch::jit::drop(*stack, arguments);
  call.find_device();
  call.read_arguments();
  const c10::DeviceGuard guard(c10::Device(kind(), call.device));
  const int queue = current_queue(call.device);
  std::function<Stack()> run;
  if (!call.tensors || (!call.has_shapes && !call.find_shapes())) {
    TORCH_CHECK(!call.views, call.name, ": a view without a meta kernel");
    auto computed = std::make_shared<Stack>();
    launch(queue, call.uses, {call.name, [computed, kernel = call.kernel()] { *computed = kernel(); }});
    wait_for_queues({queue}, call.name);
    call.uses.clear(), call.results = *computed;
    run = [computed] { return *computed; };
  }
  Stack written(returns);
  for (size_t r = 0; r < returns; r++) stack->push_back(call.result(r, written[r]));
  if (call.views) return;
  if (!run) run = call.kernel();
  launch(queue, call.uses, {call.name, [written, run] {
    const Stack computed = run();
    for (size_t r = 0; r < written.size(); r++) put(written[r], computed[r]);
  }});
}

static torch::Library everything(torch::Library::IMPL, "_", key(), __FILE__, __LINE__);
static torch::Library kernels(torch::Library::IMPL, "aten", key(), __FILE__, __LINE__);
static const bool fallback_registered = [] {
  everything.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const char* name : {"convolution", "convolution_backward"})  // else torch would ask for cuDNN's
    kernels.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  return true;
}();

}  // namespace sim
