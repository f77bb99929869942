// What Python calls, as torch.ops.sim: settings, the trace, and work of its own in the order of a stream, of which
// collectives are made (group.py).
#include <torch/library.h>

#include "simulator.h"

namespace sim {

static void configure(int64_t count, std::string mode, int64_t seed, int64_t bytes, bool ranks) {
  TORCH_CHECK(0 < count && count <= DEVICES, "1 to ", DEVICES, " devices");
  devices = count, capacity = bytes;
  set_mode(mode, seed);
  if (ranks) hurry_in_background();
}

static std::string failure;  // of the last function that Python gave

// Work of the host, in the order of the current stream: `function(id)`, which Python knows, on what `host_view` shows.
static void launch_on_host(at::TensorList reads, at::TensorList writes, int64_t function, int64_t id, std::string name,
                           std::vector<std::string> files, double seconds, bool at_once) {
  std::vector<Use> uses;
  for (const auto& tensor : reads) uses.push_back(use_of(tensor, false));
  for (const auto& tensor : writes) uses.push_back(use_of(tensor, true));
  Task task{name, [=] { TORCH_CHECK(reinterpret_cast<int (*)(int64_t)>(function)(id) == 0, failure); }};
  for (size_t i = 0; i < files.size(); i += 2) task.posts.emplace_back(files[i], files[i + 1]);
  task.patience = 1000 * seconds;
  const int queue = current_queue(current_device);
  launch(queue, uses, std::move(task));
  if (at_once) hurry(queue);
}

static std::vector<std::string> trace() {  // lines of parts, with tabs between: the kind, what was seen, how often
  std::lock_guard lock(state);
  std::vector<std::string> lines;
  for (auto& [line, times] : reported) lines.push_back(line + "\t" + std::to_string(times));
  for (auto& [way, bytes] : copied) lines.push_back("copied\t" + way + "\t" + std::to_string(bytes));
  for (int device = 0; device < devices; device++) lines.push_back("peak\t" + std::to_string(figures[device].most));
  return lines;
}

TORCH_LIBRARY(sim, m) {
  m.def("configure", configure);
  m.def("trace", trace);
  m.def("device_count", [] { return static_cast<int64_t>(devices); });
  m.def("drain", [] { for (int queue = 0; queue < devices * STREAMS; queue++) run_until_given(queue); });
  m.def("host_view", host_view);
  m.def("launch_on_host(Tensor[] reads, Tensor[] writes, int function, int id, str name, str[] files, float seconds, "
        "bool at_once) -> ()", launch_on_host);
  m.def("fail", [](std::string text) { failure = text; });
  m.def("default_generator", [](int64_t device) { return default_generator(device); });
  m.def("resize_storage", [](const at::Tensor& tensor, int64_t bytes) { resize_storage(tensor.storage(), bytes); });
  m.def("report", [](std::string line) { std::lock_guard lock(state); report(line); });
}

}  // namespace sim
