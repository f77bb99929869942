// Clocks: finds accesses that nothing orders, by vector clocks, whatever the schedule was.
//
// Each queue counts its operations. Its clock says of every queue how many operations are known to come before its next
// one: its own, those before events it waits for, and those that the host knew to be done when it gave the work. Two
// accesses to the same bytes, one of them a write, are a race if the later queue's clock does not know the earlier one.
#include <ATen/ops/zeros.h>

#include "simulator.h"

namespace sim {

Clock host;
std::map<std::string, int> reported;

void join(Clock& clock, const Clock& other) {
  for (auto& [queue, time] : other) clock[queue] = std::max(clock[queue], time);
}

void report(const std::string& line) { reported[line]++; }

static bool knows(const Clock& clock, const Access& access) {
  auto found = clock.find(access.queue);
  return found != clock.end() && found->second >= access.time;
}

static bool overlap(const Footprint& a, const Footprint& b) {  // of strided tensors byte by byte
  if (a.high <= b.low || b.high <= a.low || (a.dense && b.dense)) return a.high > b.low && b.high > a.low;
  char* low = std::min(a.low, b.low);
  at::Tensor bytes = at::zeros(std::max(a.high, b.high) - low, at::kBool);
  bytes.as_strided(a.sizes, a.strides, a.low - low).fill_(true);
  return bytes.as_strided(b.sizes, b.strides, b.low - low).any().item<bool>();
}

std::string text(const Access& access) {
  return access.name + (access.use.write ? " writes" : " reads") + " on stream " +
         std::to_string(access.queue % STREAMS) + " at " + text(access.site);
}

static std::string text(const Block& block) {
  return std::to_string(block.bytes) + " bytes allocated at " + text(block.site);
}

void touch(int queue, const Use& use, const std::string& name, const Site& site) {
  const Footprint& where = use.where;
  Block* block = where.low < where.high ? block_at(where.low) : nullptr;
  if (!block) return;
  const Clock& clock = queues[queue].clock;
  const Access access{use, queue, clock.at(queue), name, site};
  for (const Access& old : block->accesses)
    if ((old.use.write || use.write) && !knows(clock, old) && overlap(old.use.where, where))
      report("race\t" + text(old) + "\t" + text(access) + "\t" + text(*block));
  // Later accesses need not be compared with those that this one covers and comes after.
  std::erase_if(block->accesses, [&](const Access& old) {
    const Footprint& its = old.use.where;
    const bool covered = where.low <= its.low && its.high <= where.high &&
                         (where.dense || (where.sizes == its.sizes && where.strides == its.strides));
    return covered && (use.write ? knows(clock, old) : !old.use.write && old.queue == queue);
  });
  block->accesses.push_back(access);
  if (block->device_side) guard(block, access);
}

void check_freed(const Block& block, const Site& site) {
  Clock known = queues[block.queue].clock;
  join(known, host);
  for (int queue : block.used_by) join(known, queues[queue].clock);  // it is given on once they are where they are now
  for (const Access& access : block.accesses)
    if (access.queue != block.queue && !knows(known, access))
      report("freed\t" + text(access) + "\tfreed in the order of stream " + std::to_string(block.queue % STREAMS) +
             ", without record_stream, at " + text(site) + "\t" + text(block));
}

}  // namespace sim
