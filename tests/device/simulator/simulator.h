// A simulated accelerator for torch's CPU build: what its files know of each other.
//
// The host gives work to streams and goes on. Each stream is a queue (queues.cpp) that is run late, by CPU kernels on
// host memory (fallback.cpp, copies.cpp), when somebody waits for it. Vector clocks (clocks.cpp) know which pieces of
// work are ordered, so accesses that are not are found whatever the timing was; the allocator (memory.cpp) gives memory
// on as CUDA's does, and pinned memory (pinned.cpp) faults where the host touches it during a copy. device.cpp
// registers all of it with torch.
//
// Two locks, taken in this order: `running` by the thread that runs tasks, `state` briefly by who looks at queues,
// clocks or blocks. Python's lock is never asked for under `state`, and given up before `running` is asked for.
#pragma once
#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

constexpr int DEVICES = 8;
constexpr int STREAMS = 33;  // of a device: the default one, and a pool of 32 that is handed out in turn, as CUDA does
inline int queue_of(int device, int64_t stream) { return device * STREAMS + static_cast<int>(stream); }

// ---- sites.cpp ----
struct Site { const std::string* file = nullptr; int line = 0; };  // where the Python program is
Site here();
std::string text(const Site& site);
struct WithoutGil { void* thread; WithoutGil(); ~WithoutGil(); };  // gives up Python's lock, if this thread has it

// ---- clocks.cpp ----
using Clock = std::map<int, uint64_t>;  // of each queue, how many of its operations are known to come before
extern Clock host;                      // what the host knows to be done; one clock for all its threads
void join(Clock& clock, const Clock& other);
struct Footprint { char *low, *high; std::vector<int64_t> sizes, strides; bool dense; };  // a tensor's bytes
struct Use { Footprint where; bool write; };
struct Access { Use use; int queue; uint64_t time; std::string name; Site site; };
struct Block;
std::string text(const Access& access);
void touch(int queue, const Use& use, const std::string& name, const Site& site);
void check_freed(const Block& block, const Site& site);
void report(const std::string& line);  // with tabs between its parts
extern std::map<std::string, int> reported;

// ---- queues.cpp ----
struct Mark { int queue; Clock clock; bool done = false; double milliseconds = 0; };  // a point of a stream
struct Task {
  std::string name;
  std::function<void()> run;
  std::shared_ptr<Mark> reaches, awaits;
  std::vector<std::pair<std::string, std::string>> posts;  // files that must be there: of another rank, or of its end
  double patience = 0, deadline = 0;  // milliseconds from when it is asked to begin, to when it does without them
};
struct Queue { std::deque<Task> tasks; uint64_t given = 0, done = 0, urgent = 0; Clock clock; double patience = 0; };
extern std::mutex state;
extern Queue queues[DEVICES * STREAMS];
extern int devices;
double now();  // milliseconds
void set_mode(const std::string& name, uint64_t seed);
void push(int queue, Task task);          // with `state` held
std::shared_ptr<Mark> record(int queue);  // with `state` held
void launch(int queue, const std::vector<Use>& uses, Task task);
void order(int queue, const std::shared_ptr<Mark>& mark);
void advance();
void hurry(int queue);  // what it has been given is not left for later
void hurry_in_background();
bool poll(int queue, const Clock& clock, const std::function<bool()>& reached);
void run_until_given(int queue);
void wait_for_queues(const std::vector<int>& all, const std::string& what);
void wait_for_mark(const std::shared_ptr<Mark>& mark, const std::string& what);

// ---- memory.cpp, pinned.cpp ----
struct Block {
  char* start;
  size_t bytes;
  int queue;      // the stream in whose order it is given on
  Site site;
  char* device_side = nullptr;  // of pinned memory: a second mapping, which never faults
  std::set<int> used_by = {};
  std::vector<Access> accesses = {};
  size_t asked = 0;  // the part of `bytes` that its tensor asked for
};
struct Figures { size_t allocated = 0, peak = 0, reserved = 0, asked = 0, most_asked = 0, most = 0; };  // `most`: ever
extern std::map<char*, Block*> blocks;  // the device's and pinned ones, by their first byte
extern Figures figures[DEVICES];
extern size_t capacity;
Block* block_at(const void* address);            // with `state` held
void guard(Block* block, const Access& access);  // with `state` held
void unguard(const Clock& known);                // with `state` held
void unguard(const Block* block);                // with `state` held

// ---- copies.cpp, fallback.cpp, device.cpp ----
c10::DeviceType kind();  // CUDA, or PrivateUse1
c10::DispatchKey key();
extern thread_local int current_device;
int64_t& current_stream(int device);
inline int current_queue(int device) { return queue_of(device, current_stream(device)); }
inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kind(); }
at::Tensor host_view(const at::Tensor& tensor);
Use use_of(const at::Tensor& tensor, bool write);
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin);
void resize_storage(const c10::Storage& storage, size_t bytes);
at::Generator& default_generator(int device);
at::Allocator* device_memory();
at::Allocator* pinned_memory();
extern std::map<std::string, int64_t> copied;  // bytes, by the way they went

}  // namespace sim
