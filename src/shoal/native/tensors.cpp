// Memory of tensors on the host, apart from everything else that a process allocates.
//
// torch asks the C heap for each tensor. There small objects that live on come to lie between the tensors of a step, in
// whose holes those of the next one do not fit: ranks took up to a sixth more memory than their tensors (docs/planner.md).
// Here tensors have a range of addresses of their own. Freed memory stays for the next ones until it is given back, so
// the kernel zeroes no pages in later steps, and it comes in large pages where the kernel has them.
//
// A small block takes the tightest hole, a large one the lowest that it fits, which leaves the higher ones to grow
// together. With nothing but tensors around, steps of a GPT of 33.7M parameters took at most 2.4% more than the bytes in
// use at once, of one of 124M, whose logits take 200 MiB, up to 6.2%. Blocks of 64 MiB and more could be given back each
// time, to 1.4%; but the kernel zeroes them then, and a step of the larger one took a third longer.
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

using Address = uintptr_t;

constexpr size_t LINE = 64;                  // bytes that blocks are multiples of, for vector instructions
constexpr size_t LEAST = size_t{16} << 10;   // smaller tensors come from the C heap
constexpr size_t LARGE = size_t{1} << 20;    // from here on blocks take the lowest hole
constexpr size_t LARGE_PAGE = size_t{2} << 20;
constexpr size_t STEP = size_t{8} << 20;     // by which the part grows that may be written

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
void* pointer(Address at) { return reinterpret_cast<void*>(at); }

class Range {
 public:
  std::mutex mutex;  // of all but `reserve` and `has`

  // Takes addresses, without memory, for `most` bytes, or half as many, and so on where the kernel has fewer.
  bool reserve(size_t most) {
    for (; most > STEP; most /= 2) {
      void* at = mmap(nullptr, most, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) continue;
      end = reinterpret_cast<Address>(at) + most;
      begin = top = writable = rounded(reinterpret_cast<Address>(at), LARGE_PAGE);
      madvise(pointer(begin), end - begin, MADV_HUGEPAGE);  // where there are none, pages are small
      return true;
    }
    return false;
  }

  bool has(const void* block) const {
    const auto at = reinterpret_cast<Address>(block);
    return begin <= at && at < end;
  }

  // A block of `bytes`, nullptr where there is no room.
  void* take(size_t bytes) {
    bytes = rounded(bytes, LINE);
    auto hole = hole_for(bytes);
    if (hole == holes.end() && (hole = grown(bytes)) == holes.end()) return nullptr;
    const auto [at, size] = *hole;
    forget(hole);
    if (size > bytes) note(at + bytes, size - bytes);
    used[at] = bytes;
    return pointer(at);
  }

  void give(const void* block) {
    const auto found = used.find(reinterpret_cast<Address>(block));
    Address at = found->first;
    size_t size = found->second;
    used.erase(found);
    const auto next = holes.find(at + size);
    if (next != holes.end()) {
      size += next->second;
      forget(next);
    }
    const auto before = hole_before(at);
    if (before != holes.end() && before->first + before->second == at) {
      at = before->first;
      size += before->second;
      forget(before);
    }
    note(at, size);
  }

  // Gives the whole pages of all holes back to the kernel.
  void give_back() {
    const auto last = hole_before(top);
    if (last != holes.end() && last->first + last->second == top) {
      top = last->first;
      forget(last);
    }
    for (const auto& [at, size] : holes) empty(at, at + size);
    empty(top, writable);
  }

 private:
  using Holes = std::map<Address, size_t>;

  Address begin = 0, top = 0, writable = 0, end = 0;  // blocks and holes lie below `top`
  Holes holes;
  std::set<std::pair<size_t, Address>> by_size;
  std::unordered_map<Address, size_t> used;

  void note(Address at, size_t size) {
    holes[at] = size;
    by_size.insert({size, at});
  }

  void forget(Holes::iterator hole) {
    by_size.erase({hole->second, hole->first});
    holes.erase(hole);
  }

  Holes::iterator hole_before(Address at) {
    const auto next = holes.lower_bound(at);
    return next == holes.begin() ? holes.end() : std::prev(next);
  }

  Holes::iterator hole_for(size_t bytes) {
    auto fits = by_size.lower_bound({bytes, 0});
    if (fits == by_size.end()) return holes.end();
    if (bytes < LARGE) return holes.find(fits->second);
    Address lowest = fits->second;
    for (; fits != by_size.end(); ++fits) lowest = std::min(lowest, fits->second);
    return holes.find(lowest);
  }

  // Raises the top until a hole of `bytes` lies below it; the end of `holes` where that is not possible.
  Holes::iterator grown(size_t bytes) {
    const auto last = hole_before(top);
    const bool joins = last != holes.end() && last->first + last->second == top;
    const Address at = joins ? last->first : top;
    if (bytes > end - at) return holes.end();
    const Address up_to = std::min(end, rounded(at + bytes, STEP));
    if (up_to > writable) {
      if (mprotect(pointer(writable), up_to - writable, PROT_READ | PROT_WRITE)) return holes.end();
      writable = up_to;
    }
    if (joins) forget(last);
    top = at + bytes;
    note(at, bytes);
    return holes.find(at);
  }

  static void empty(Address from, Address to) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    from = rounded(from, page);
    to = to / page * page;
    if (from < to) madvise(pointer(from), to - from, MADV_DONTNEED);
  }
};

Range& range = *new Range;  // never destroyed: tensors are freed until the process ends

void release(void* block) {
  if (!block) return;
  c10::profiledCPUMemoryReporter().Delete(block);
  if (!range.has(block)) return c10::free_cpu(block);
  const std::lock_guard lock(range.mutex);
  range.give(block);
}

struct Tensors final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = nullptr;
    if (bytes >= LEAST) {
      const std::lock_guard lock(range.mutex);
      block = range.take(bytes);
    }
    if (!block) block = c10::alloc_cpu(bytes);  // small, or there is no room: torch says so
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

// From now on torch has tensors on the host from here; those that it has are freed as they came. 0 where addresses are
// limited, which a range of them would use up.
int shoal_tensors_apart(void) {
  static const bool there = [] {
    rlimit addresses{};
    if (getrlimit(RLIMIT_AS, &addresses) || addresses.rlim_cur != RLIM_INFINITY) return false;
    const auto memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (!range.reserve(memory)) return false;
    pthread_atfork([] { range.mutex.lock(); }, [] { range.mutex.unlock(); }, [] { range.mutex.unlock(); });
    c10::SetCPUAllocator(new Tensors, 1);  // above torch's own
    return true;
  }();
  return there;
}

void shoal_tensors_give_back(void) {
  const std::lock_guard lock(range.mutex);
  range.give_back();
}
}
