// Queues: each stream is a queue of tasks, run late and under one lock by whoever waits for it.
//
// Modes: "lazy" runs nothing but what somebody waits for; "eager" runs everything as soon as it may run; "random" lets
// each stream proceed at its own pace, and mixes in others where one is waited for. A task that needs posts of other
// ranks (files) may run once they are there; it runs without those of ranks that have ended, and after its deadline.
// What a rank gives others is urgent: in each mode it is run as soon as may be, so that no rank waits for a lazy one.
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>

#include "simulator.h"

namespace sim {

std::mutex state;
Queue queues[DEVICES * STREAMS];
int devices = 1;
static std::recursive_mutex running;
static std::string mode = "lazy";
static std::mt19937_64 generator;
static std::exception_ptr background_error;
static const at::ThreadLocalState plain;  // as it was at the start: tasks see no autocast, no grad mode of their caller

static double draw() { return std::uniform_real_distribution<double>()(generator); }

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void set_mode(const std::string& name, uint64_t seed) {
  mode = name;
  generator.seed(seed);
  for (Queue& queue : queues) queue.patience = draw() < 0.3 ? 1 : draw();
}

void push(int queue, Task task) {
  queues[queue].tasks.push_back(std::move(task));
  queues[queue].given++;
}

static bool may_begin(Queue& queue) {
  if (queue.tasks.empty()) return false;
  Task& task = queue.tasks.front();
  if (task.awaits && !task.awaits->done) return false;
  if (!task.posts.empty() && !task.deadline) task.deadline = now() + task.patience;
  for (auto& [post, end] : task.posts)
    if (access(post.c_str(), F_OK) != 0 && access(end.c_str(), F_OK) != 0) return now() > task.deadline;
  return true;
}

static bool run_next(Queue& queue) {  // with `running` held
  Task task;
  {
    std::lock_guard lock(state);
    if (!may_begin(queue)) return false;
    task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
  }
  std::exception_ptr error;
  try {
    at::ThreadLocalStateGuard restored(plain);
    at::AutoDispatchBelowADInplaceOrView below;
    if (task.run) task.run();
    task.run = nullptr;  // may free memory, which takes `state`
  } catch (c10::Error& raised) {
    raised.add_context(task.name + " on the simulated device");
    error = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  {
    std::lock_guard lock(state);
    queue.done++;
    if (task.reaches) task.reaches->done = true, task.reaches->milliseconds = now();
  }
  if (error) std::rethrow_exception(error);
  return true;
}

static std::vector<Queue*> runnable() {
  std::lock_guard lock(state);
  std::vector<Queue*> found;
  for (int queue = 0; queue < devices * STREAMS; queue++)
    if (may_begin(queues[queue])) found.push_back(&queues[queue]);
  return found;
}

static Queue& first_for(int number) {  // the queue whose next task stands before all else that `number` waits for
  std::lock_guard lock(state);
  while (!queues[number].tasks.empty()) {
    const Task& task = queues[number].tasks.front();
    if (!task.awaits || task.awaits->done) break;
    number = task.awaits->queue;
  }
  return queues[number];
}

static bool run_urgent() {  // what other ranks may wait for, as far as it goes; with `running` held
  bool ran = false;
  for (int queue = 0; queue < devices * STREAMS; queue++)
    while (queues[queue].done < queues[queue].urgent && run_next(first_for(queue))) ran = true;
  return ran;
}

static void run_until(int queue, const std::function<bool()>& reached) {  // `reached` is asked with `state` held
  WithoutGil released;
  for (bool ran = true;; ran || usleep(100)) {
    std::lock_guard run(running);
    if (background_error) std::rethrow_exception(background_error);
    { std::lock_guard lock(state); if (reached()) return; }
    const auto any = mode == "random" && draw() < 0.5 ? runnable() : std::vector<Queue*>{};
    ran = run_next(any.empty() ? first_for(queue) : *any[generator() % any.size()]) || run_urgent();
  }
}

void advance() {
  WithoutGil released;
  std::unique_lock run(running, std::try_to_lock);
  if (run) run_urgent();
  for (bool again = run && mode != "lazy"; again;) {
    again = false;
    for (Queue* queue : runnable())
      while ((mode == "eager" || draw() > queue->patience) && run_next(*queue)) again = mode == "eager";
  }
}

void launch(int queue, const std::vector<Use>& uses, Task task) {
  const Site site = here();
  {
    std::lock_guard lock(state);
    join(queues[queue].clock, host);
    queues[queue].clock[queue]++;
    for (const Use& use : uses) touch(queue, use, task.name, site);
    push(queue, std::move(task));
  }
  advance();
}

std::shared_ptr<Mark> record(int queue) {
  join(queues[queue].clock, host);
  auto mark = std::make_shared<Mark>(Mark{queue, queues[queue].clock});
  push(queue, {"record", nullptr, mark});
  return mark;
}

void order(int queue, const std::shared_ptr<Mark>& mark) {
  {
    std::lock_guard lock(state);
    join(queues[queue].clock, mark->clock);
    push(queue, {"wait", nullptr, nullptr, mark});
  }
  advance();
}

static void learn(const Clock& clock) {  // the host has seen that this is done
  std::lock_guard lock(state);
  join(host, clock);
  unguard(host);
}

bool poll(int queue, const Clock& clock, const std::function<bool()>& reached) {
  std::unique_lock lock(state);
  const bool there = reached();
  lock.unlock();
  if (there) return learn(clock), true;
  WithoutGil released;
  std::lock_guard run(running);
  run_next(first_for(queue));  // who asks again finds that something was done meanwhile
  return false;
}

void hurry(int queue) {
  { std::lock_guard lock(state); queues[queue].urgent = queues[queue].given; }
  advance();
}

void hurry_in_background() {  // while the host waits for something else than the device, such as a message on the CPU
  std::thread([] {
    while (!background_error) {
      usleep(2000);
      std::unique_lock run(running, std::try_to_lock);
      try {
        if (run) run_urgent();
      } catch (...) {
        background_error = std::current_exception();
      }
    }
  }).detach();
}

void run_until_given(int queue) {
  std::unique_lock lock(state);
  const uint64_t given = queues[queue].given;
  lock.unlock();
  run_until(queue, [=] { return queues[queue].done >= given; });
}

static void count_wait(const std::string& what) {
  const Site site = here();
  std::lock_guard lock(state);
  report("wait\t" + what + "\t" + text(site));
}

void wait_for_queues(const std::vector<int>& all, const std::string& what) {
  count_wait(what);
  for (int queue : all) {
    std::unique_lock lock(state);
    const Clock clock = queues[queue].clock;
    lock.unlock();
    run_until_given(queue);
    learn(clock);
  }
}

void wait_for_mark(const std::shared_ptr<Mark>& mark, const std::string& what) {
  count_wait(what);
  run_until(mark->queue, [&] { return mark->done; });
  learn(mark->clock);
}

}  // namespace sim
