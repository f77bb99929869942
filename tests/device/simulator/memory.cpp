// Memory: the device's caching allocator, with what makes CUDA's hard to use from several streams.
//
// A freed block goes back to the stream that allocated it, in its order, and at once: other streams that used it must
// have been named by `record_stream`, or be known to be done. What is freed is filled with NaN. A block is given on to
// requests of its own size; at the capacity all that is free is let go, and if that does not do, OutOfMemoryError.
#include <c10/core/CachingDeviceAllocator.h>

#include "simulator.h"

namespace sim {

std::map<char*, Block*> blocks;
Figures figures[DEVICES];
size_t capacity = size_t{80} << 30;
static std::map<std::pair<int, size_t>, std::vector<Block*>> free_blocks;  // by stream and size
static std::vector<std::pair<Block*, std::vector<std::shared_ptr<Mark>>>> awaited;  // freed, while others use them

Block* block_at(const void* address) {
  auto next = blocks.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  if (next == blocks.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return address < block->start + block->bytes ? block : nullptr;
}

static void give_on(Block* block) {
  block->accesses.clear();
  push(block->queue, {"free", [start = block->start, bytes = block->bytes] { memset(start, 0xFF, bytes); }});
  free_blocks[{block->queue, block->bytes}].push_back(block);
}

static void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) return;
  const Site site = here();
  std::lock_guard lock(state);
  figures[block->queue / STREAMS].allocated -= block->bytes;
  figures[block->queue / STREAMS].asked -= block->asked;
  check_freed(*block, site);
  if (block->used_by.empty()) return give_on(block);
  awaited.emplace_back(block, std::vector<std::shared_ptr<Mark>>{});
  for (int queue : block->used_by) awaited.back().second.push_back(record(queue));
  block->used_by.clear();
}

static void collect() {  // blocks that others no longer use
  std::erase_if(awaited, [](auto& entry) {
    for (auto& mark : entry.second) if (!mark->done) return false;
    return give_on(entry.first), true;
  });
}

static void release_free() {
  for (int queue = 0; queue < devices * STREAMS; queue++) run_until_given(queue);
  { std::lock_guard lock(state); collect(); }
  for (int queue = 0; queue < devices * STREAMS; queue++) run_until_given(queue);  // "free" of those
  std::lock_guard lock(state);
  for (auto& [key, list] : free_blocks)
    for (Block* block : list) {
      figures[key.first / STREAMS].reserved -= block->bytes;
      blocks.erase(block->start);
      free(block->start);
      delete block;
    }
  free_blocks.clear();
}

static Block* take(int queue, size_t asked, const Site& site) {  // null where there is no room
  const size_t bytes = (asked + 511) / 512 * 512;
  std::lock_guard lock(state);
  collect();
  Figures& mine = figures[queue / STREAMS];
  auto& cached = free_blocks[{queue, bytes}];
  Block* block = nullptr;
  if (!cached.empty()) {
    block = cached.back(), cached.pop_back();
  } else if (mine.reserved + bytes <= capacity) {
    block = new Block{static_cast<char*>(aligned_alloc(512, bytes)), bytes, queue};
    memset(block->start, 0xFF, bytes);
    blocks[block->start] = block;
    mine.reserved += bytes;
  } else {
    return nullptr;
  }
  block->site = site, block->asked = asked;
  mine.allocated += bytes, mine.asked += asked;
  mine.peak = std::max(mine.peak, mine.allocated), mine.most = std::max(mine.most, mine.allocated);
  mine.most_asked = std::max(mine.most_asked, mine.asked);
  return block;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const int device = current_device;
    const Site site = here();
    Block* block = size ? take(current_queue(device), size, site) : nullptr;
    if (size && !block) {
      release_free();
      block = take(current_queue(device), size, site);
      TORCH_CHECK_WITH(OutOfMemoryError, block, "simulated device ", device, " is out of memory: ", size,
                       " bytes asked for, ", figures[device].allocated, " allocated of ", capacity);
    }
    return {block ? block->start : nullptr, block, &free_block, c10::Device(kind(), device)};
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard lock(state);
    auto* block = static_cast<Block*>(data.get_context());
    const int queue = queue_of(stream.device_index(), stream.id());
    if (block && queue != block->queue) block->used_by.insert(queue);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(state);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = figures[device].allocated;
    stats.allocated_bytes[0].peak = figures[device].peak;
    stats.requested_bytes[0].current = figures[device].asked;
    stats.requested_bytes[0].peak = figures[device].most_asked;
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = figures[device].reserved;
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {capacity - figures[device].reserved, capacity};
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    figures[device].peak = figures[device].allocated, figures[device].most_asked = figures[device].asked;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void emptyCache(c10::MempoolId_t) override { release_free(); }
  bool initialized() override { return true; }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

at::Allocator* device_memory() { static DeviceMemory memory; return &memory; }

}  // namespace sim
