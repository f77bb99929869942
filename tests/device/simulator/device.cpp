// The device as torch knows it: streams and events (the guard), its generator, the hooks of CUDA or of a PrivateUse1
// device.
//
// Loaded before `import torch`, since torch looks for CUDA's hooks once, then. SIM_DEVICE says which device it is.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "simulator.h"

namespace sim {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

c10::DeviceType kind() {
  static const char* name = getenv("SIM_DEVICE");
  return name && std::string(name) == "cuda" ? c10::kCUDA : c10::kPrivateUse1;
}
c10::DispatchKey key() { return kind() == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1; }

thread_local int current_device = 0;
int64_t& current_stream(int device) { thread_local int64_t streams[DEVICES] = {}; return streams[device]; }
static int number(const Stream& stream) { return queue_of(stream.device_index(), stream.id()); }
static std::shared_ptr<Mark>& mark_of(void* event) { return *static_cast<std::shared_ptr<Mark>*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind(); }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device getDevice() const override { return Device(kind(), current_device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }

  static Stream stream(Device device, int64_t id) {
    return Stream(Stream::UNSAFE, Device(kind(), device.index() < 0 ? current_device : device.index()), id);
  }
  Stream getStream(Device device) const override {
    return stream(device, current_stream(device.index() < 0 ? current_device : device.index()));
  }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<int> handed_out = 0;
    return stream(device, 1 + handed_out++ % (STREAMS - 1));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    const Queue& queue = queues[number(stream)];
    return poll(number(stream), queue.clock, [&] { return queue.done == queue.given; });
  }
  void synchronizeStream(const Stream& stream) const override { wait_for_queues({number(stream)}, "stream"); }
  void synchronizeDevice(DeviceIndex device) const override {
    std::vector<int> all;
    for (int id = 0; id < STREAMS; id++) all.push_back(queue_of(device, id));
    wait_for_queues(all, "device");
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new std::shared_ptr<Mark>;
    { std::lock_guard lock(state); mark_of(*event) = sim::record(number(stream)); }
    advance();
  }
  void block(void* event, const Stream& stream) const override { if (event) order(number(stream), mark_of(event)); }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    const auto mark = mark_of(event);
    return poll(mark->queue, mark->clock, [&] { return mark->done; });
  }
  void synchronizeEvent(void* event) const override { if (event) wait_for_mark(mark_of(event), "event"); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Mark>*>(event);
  }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    TORCH_CHECK(begin && end && mark_of(begin)->done && mark_of(end)->done, "an event has no time before it is reached");
    return mark_of(end)->milliseconds - mark_of(begin)->milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    static_cast<c10::DeviceAllocator*>(device_memory())->recordStream(data, stream);
  }
};

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) { device_ = Device(kind(), device), key_set_ = c10::DispatchKeySet(key()); }
};

at::Generator& default_generator(int device) {
  static at::Generator generators[DEVICES];
  auto& found = generators[device < 0 ? current_device : device];
  return found.defined() ? found : found = at::make_generator<Generator>(device < 0 ? current_device : device);
}

template <class Interface> struct Hooks : Interface {  // what both kinds of hooks are asked
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(kind(), device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard lock(state);
    const Block* block = block_at(data);
    return block && block->device_side;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(std::max<int>(device, 0));
  }
  Device getDeviceFromPtr(void* data) const override {
    std::lock_guard lock(state);
    const Block* block = block_at(data);
    TORCH_CHECK(block && !block->device_side, "no memory of a device");
    return Device(kind(), block->queue / STREAMS);
  }
};
struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
};
struct PrivateHooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

struct Timer final : c10d::Timer {  // what torch's DistributedDataParallel logs; it has not measured anything
  explicit Timer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

static const bool device_registered = [] {
  static Guard guard;
  c10::impl::DeviceGuardImplRegistrar(kind(), &guard);
  c10::SetAllocator(kind(), device_memory(), 100);
  at::setHostAllocator(kind(), static_cast<at::HostAllocator*>(pinned_memory()), 100);
  if (kind() == c10::kCUDA)
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<CudaHooks>();
    });
  else
    at::RegisterPrivateUse1HooksInterface(new PrivateHooks);
  c10d::TimerRegistry()->Register(kind(), [](Device device) -> std::unique_ptr<c10d::Timer> {
    return std::make_unique<Timer>(device);
  });
  return true;
}();

}  // namespace sim
