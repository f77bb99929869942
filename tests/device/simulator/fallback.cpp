// Fallback: every other operation, as its CPU kernel on the same memory, run when its stream gets there.
//
// What comes out is known before: the operation is called on meta tensors for the shapes, memory is allocated, and a
// task is given that reads and writes it. Where shapes depend on data (`nonzero`) or the result is no tensor (`equal`),
// the host waits, as CUDA's does. Random operations draw a seed from the device's generator when they are given.
#include <ATen/ATen.h>
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

struct Call {
  const c10::OperatorHandle& op;
  const Stack given;
  const std::string name = c10::toString(op.operator_name());
  int device = -1;
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

  void translate(const IValue& value, bool write) {
    host.push_back(value.isDevice() ? IValue(c10::Device(at::kCPU)) : value.isGenerator() ? IValue()
                   : replaced(value, [&](const Tensor& t) { return used(t, write); }));
  }

  std::function<Stack()> kernel() {
    const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
    // The CPU's layer norm has its statistics in the dtype of its input and weight, CUDA's in fp32.
    const bool is_layer_norm = name == "aten::native_layer_norm_backward";
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return [op = op, host = host, cpu, is_layer_norm] {
      Stack stack = host;
      const IValue& typed = is_layer_norm && host[5].isTensor() ? host[5] : host[1];
      for (size_t i : {3, 4}) if (is_layer_norm) stack[i] = stack[i].toTensor().to(typed.toTensor().scalar_type());
      op.redispatchBoxed(cpu, &stack);
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
};

static void put(const IValue& to, const IValue& computed) {  // what only CUDA's kernel saves stays as it is
  if (to.isTensor() && to.toTensor().defined() && (computed.toTensor().numel() || !to.toTensor().numel()))
    to.toTensor().copy_(computed.toTensor());
  if (to.isTensorList())
    for (size_t i = 0; i < to.toListRef().size(); i++) put(to.toListRef()[i], computed.toListRef()[i]);
}

static void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto &arguments = op.schema().arguments(), &returns = op.schema().returns();
  Call call{op, Stack(stack->end() - arguments.size(), stack->end())};
  torch::jit::drop(*stack, arguments.size());
  call.find_device();
  const c10::DeviceGuard guard(c10::Device(kind(), call.device));
  const int queue = current_queue(call.device);
  bool tensors = true, views = false, shapes = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    const bool writes = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    call.translate(call.given[i], writes);
    shapes |= writes && arguments[i].kwarg_only() && call.given[i].isTensor() && !call.given[i].toTensor().numel();
  }
  for (const auto& result : returns) {
    tensors &= result.type()->isSubtypeOf(*c10::TensorType::get()) ||
               result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    views |= result.alias_info() && !result.alias_info()->isWrite();
    shapes |= !result.alias_info() || !result.alias_info()->isWrite();
  }
  std::function<Stack()> run;
  if (!tensors || (shapes && !call.find_shapes())) {
    TORCH_CHECK(!views, call.name, ": a view without a meta kernel");
    auto computed = std::make_shared<Stack>();
    launch(queue, call.uses, {call.name, [computed, kernel = call.kernel()] { *computed = kernel(); }});
    wait_for_queues({queue}, call.name);
    call.results = *computed, call.uses.clear(), shapes = false;
    run = [computed] { return *computed; };
  }
  auto resized = [&](size_t i, const Tensor& shape) {
    const Tensor out = call.given[i].toTensor();
    if (out.sizes() == shape.sizes()) return out;
    out.resize_(shape.sizes());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
    call.host[i] = call.used(out, true);
    return out;
  };
  Stack written(returns.size());
  for (size_t r = 0; r < returns.size(); r++) {
    const auto* alias = returns[r].alias_info();
    if (alias && alias->isWrite()) {
      const size_t i = call.argument_of(*alias);
      const bool may_grow = shapes && call.given[i].isTensor();
      stack->push_back(may_grow ? IValue(resized(i, call.results[r].toTensor())) : call.given[i]);
    } else if (alias) {
      const Tensor base = call.given[call.argument_of(*alias)].toTensor();
      stack->push_back(replaced(call.results[r], [&](const Tensor& m) {
        return base.as_strided(m.sizes(), m.strides(), base.storage_offset() + m.storage_offset());
      }));
    } else {
      stack->push_back(replaced(call.results[r], [&](const Tensor& m) {
        return empty_strided(m.sizes(), m.strides(), m.scalar_type(), {}, c10::Device(kind(), call.device), {});
      }));
      written[r] = replaced(stack->back(), [&](const Tensor& t) { return call.used(t, true); });
    }
  }
  if (views) return;
  if (!run) run = call.kernel();
  launch(queue, call.uses, {call.name, [written, run] {
    const Stack computed = run();
    for (size_t r = 0; r < written.size(); r++) put(written[r], computed[r]);
  }});
}

static torch::Library everything(torch::Library::IMPL, "_", key(), __FILE__, __LINE__);
static torch::Library kernels(torch::Library::IMPL, "aten", key(), __FILE__, __LINE__);
static const bool registered = [] {
  everything.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const char* name : {"convolution", "convolution_backward"})  // else torch would ask for cuDNN's
    kernels.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  return true;
}();

}  // namespace sim
