// Tensors and copies: how the device's tensors are made and viewed, and what crosses between it and the host.
//
// A copy is work of the current stream. The host waits for it where CUDA's does: unless it is asked not to, and always
// where it would read or write memory of the host that is not pinned.
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/library.h>

#include "simulator.h"

namespace sim {

using at::IntArrayRef;
using at::Tensor;

std::map<std::string, int64_t> copied;

Use use_of(const Tensor& tensor, bool write) {
  char* low = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  const int64_t item = tensor.itemsize();
  Use use{{low, low, tensor.sizes().vec(), tensor.strides().vec(), tensor.is_non_overlapping_and_dense()}, write};
  if (!tensor.numel()) return use;
  for (auto& stride : use.where.strides) stride *= item;
  use.where.sizes.push_back(item), use.where.strides.push_back(1);
  for (size_t i = 0; i < use.where.sizes.size(); i++) use.where.high += (use.where.sizes[i] - 1) * use.where.strides[i];
  use.where.high++;
  return use;
}

Tensor host_view(const Tensor& tensor) {  // of the device's or pinned memory; it keeps nothing alive
  char* data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  std::lock_guard lock(state);
  if (Block* block = block_at(data); block && block->device_side) data = block->device_side + (data - block->start);
  return at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

static bool is_pinned(const Tensor& tensor) {
  std::lock_guard lock(state);
  Block* block = block_at(tensor.const_data_ptr());
  return block && block->device_side;
}

static Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(key());
  return at::detail::empty_generic(size, device_memory(), keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(key());
  return at::detail::empty_strided_generic(size, stride, device_memory(), keys, c10::dtype_or_default(dtype));
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  const int64_t kept = std::min(bytes, storage.nbytes());
  const auto bytes_there = at::TensorOptions(at::kByte).device(storage.device());
  c10::DataPtr fresh = device_memory()->allocate(bytes);
  if (kept)
    at::from_blob(fresh.get(), {kept}, bytes_there).copy_(at::from_blob(storage.mutable_data(), {kept}, bytes_there));
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

static const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t bytes = (self.storage_offset() + c10::multiply_integers(size)) * self.itemsize();
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

static void between(int earlier, int later) {
  std::unique_lock lock(state);
  const auto mark = record(earlier);
  lock.unlock();
  order(later, mark);
}

constexpr size_t STAGED = 64;  // bytes that a driver takes along at once, as torch's own optimizers bring their scalars

static Tensor& copy_(Tensor& to, const Tensor& given, bool non_blocking) {
  if (to.is_same(given) || !to.numel()) return to;
  const Tensor from = given.expand_as(to);
  const bool up = !on_device(from), down = !on_device(to), crosses = !up && !down && to.device() != from.device();
  const std::string way = up ? "host to device" : down ? "device to host" : "device to device";
  const int queue = current_queue((up ? to : from).get_device());
  // Memory of the host that is not pinned is read before the call returns; it is written before it returns.
  const Tensor source = up && non_blocking && !is_pinned(from) ? from.clone() : from;
  const Tensor read = host_view(source), written = host_view(to), kept = up ? source : down ? to : Tensor();
  if (non_blocking && ((up && to.nbytes() > STAGED && !is_pinned(from)) || (down && !is_pinned(to)))) {
    const std::string where = text(here());
    std::lock_guard lock(state);
    report("pageable\tcopy " + way + " at " + where + "\tthe host's memory is not pinned: it waits\t" +
           std::to_string(to.nbytes()) + " bytes");
  }
  // A copy of CUDA that is waited for casts on the host, in memory that it allocates there.
  const bool pinned = (up && is_pinned(from)) || (down && is_pinned(to));
  if (!non_blocking && pinned && to.dtype() != from.dtype() && to.nbytes() > STAGED) {
    const std::string where = text(here());
    std::lock_guard lock(state);
    report("pageable\tcopy " + way + " at " + where + "\tcasts on the host, in memory that is not pinned\t" +
           std::to_string(to.nbytes()) + " bytes");
  }
  if (crosses) between(current_queue(to.get_device()), queue);
  { std::lock_guard lock(state); copied[way] += to.nbytes(); }
  launch(queue, {use_of(source, false), use_of(to, true)}, {"copy " + way, [=] { (void)kept, written.copy_(read); }});
  if (crosses) between(queue, current_queue(to.get_device()));
  if ((up && !non_blocking) || (down && !(non_blocking && is_pinned(to)))) wait_for_queues({queue}, "copy " + way);
  return to;
}

static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, from, non_blocking);
}

static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  return copy_from(from, to.resize_(from.sizes()), false);
}

static at::Scalar item(const Tensor& tensor) {
  const int queue = current_queue(tensor.get_device());
  launch(queue, {use_of(tensor, false)}, {"item"});
  wait_for_queues({queue}, "item");
  return host_view(tensor).item();
}

static void record_stream(Tensor& tensor, c10::Stream stream) {
  static_cast<c10::DeviceAllocator*>(device_memory())->recordStream(tensor.storage().data_ptr(), stream);
}

static void register_tensors(torch::Library& m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

static torch::Library library(torch::Library::IMPL, "aten", key(), __FILE__, __LINE__);
static const bool tensors_registered = (register_tensors(library), true);

}  // namespace sim
