// Pinned memory: faults where the host touches it while a copy is unfinished, in whatever way (an operation, numpy).
//
// Each block is mapped twice. The device works on one mapping; the host's is protected from when a copy is given until
// the host knows that it is done: it may not be read during a copy to it, nor written during a copy from it. The
// handler of the fault reports the place, and lets the host go on. Protection is by page, reports are by byte.
#include <ATen/core/CachingHostAllocator.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulator.h"

namespace sim {

constexpr size_t PAGE = 4096;
static std::vector<std::pair<Block*, Access>> unfinished;
static struct sigaction others;

static void protect(const Access& access, int protection) {
  char* first = access.use.where.low - reinterpret_cast<uintptr_t>(access.use.where.low) % PAGE;
  mprotect(first, access.use.where.high - first, protection);
}

static int allowed(const Access& access) { return access.use.write ? PROT_NONE : PROT_READ; }

static void forget(const std::function<bool(const std::pair<Block*, Access>&)>& which) {
  for (auto& entry : unfinished) if (which(entry)) protect(entry.second, PROT_READ | PROT_WRITE);
  std::erase_if(unfinished, which);
  for (bool write : {false, true})  // those that share pages with them; the stricter ones last
    for (auto& [block, access] : unfinished) if (access.use.write == write) protect(access, allowed(access));
}

void guard(Block* block, const Access& access) {
  unfinished.emplace_back(block, access);
  protect(access, allowed(access));
}

void unguard(const Clock& known) {
  if (!unfinished.empty()) forget([&](auto& entry) {
    auto found = known.find(entry.second.queue);
    return found != known.end() && found->second >= entry.second.time;
  });
}

static void on_fault(int, siginfo_t* info, void*) {
  auto* address = static_cast<char*>(info->si_addr);
  std::unique_lock lock(state);
  Block* block = block_at(address);
  if (!block || !block->device_side) {  // nothing of the simulator: a fault as any
    sigaction(SIGSEGV, &others, nullptr);
    return;
  }
  lock.unlock();
  const Site site = here();
  lock.lock();
  for (auto& [its, access] : unfinished)
    if (its == block && access.use.where.low <= address && address < access.use.where.high)
      report("host\t" + text(access) + "\tthe host " + (access.use.write ? "touches" : "writes") + " it at " +
             text(site));
  std::erase_if(unfinished, [&](auto& entry) { return entry.first == block; });
  mprotect(block->start, block->bytes, PROT_READ | PROT_WRITE);
}

static void unpin_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard lock(state);
  std::erase_if(unfinished, [&](auto& entry) { return entry.first == block; });
  blocks.erase(block->start);
  munmap(block->start, block->bytes);
  munmap(block->device_side, block->bytes);
  delete block;
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    const size_t bytes = std::max(size + PAGE - 1, PAGE) / PAGE * PAGE;
    const int file = memfd_create("pinned", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, bytes) == 0, "no room for ", bytes, " bytes of pinned memory");
    auto map = [&] { return static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)); };
    auto* block = new Block{map(), bytes, 0, here(), map()};
    close(file);
    std::lock_guard lock(state);
    blocks[block->start] = block;
    return {block->start, block, &unpin_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies hold what they need
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

at::Allocator* pinned_memory() {
  static PinnedMemory memory;
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGSEGV, &action, &others) == 0;
  }();
  TORCH_CHECK(installed, "no handler for faults of pinned memory");
  return &memory;
}

}  // namespace sim
