// Streams, events, and the order in which their work runs.
//
// There is no thread of the device: work runs within calls of the host. When more than one stream could go on, the
// schedule says which one does.
#include "simulated.h"

#include <pthread.h>

#include <exception>
#include <map>
#include <random>
#include <utility>

namespace simulated {

std::recursive_mutex lock;

namespace {

// What runs when a host waits for a stream.
enum class Order {
    kAny,           // whatever can, at random, until the wait is over
    kOnlyNeeded,    // that stream, and what it waits for
    kOthersFirst,  // everything else that can, and then that stream
};

struct Scheduler {
    std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue> queues;
    c10::StreamId next_stream = 1;
    std::mt19937_64 random{0};
    double eagerness = 0;  // how likely something runs when work is issued
    Order order = Order::kOnlyNeeded;
    std::exception_ptr error;  // the first one of a kernel that no host wait has raised yet
};
Scheduler& scheduler = *new Scheduler;  // lives as long as the threads that use it

thread_local c10::DeviceIndex thread_device = 0;
thread_local c10::StreamId thread_streams[kDevices] = {};
thread_local int64_t thread_host_waits = 0;

bool child_of_fork = false;

bool is_blocked(const Queue& queue) {
    return !queue.tasks.empty() && queue.tasks.front().waits && !queue.tasks.front().mark->reached;
}

void run_next(Queue& queue) {
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    if (!task.run) {
        if (!task.waits) task.mark->reached = true;
        return;
    }
    try {
        task.run();
    } catch (...) {
        if (!scheduler.error) scheduler.error = std::current_exception();
    }
}

// A stream that can go on, at random; null if there is none but `except`.
Queue* any_ready(const Queue* except = nullptr) {
    std::vector<Queue*> ready;
    for (auto& [key, queue] : scheduler.queues)
        if (&queue != except && !queue.tasks.empty() && !is_blocked(queue)) ready.push_back(&queue);
    return ready.empty() ? nullptr : ready[scheduler.random() % ready.size()];
}

// The stream itself, or the one that it waits for in the end.
Queue* needed_for(Queue* queue) {
    while (is_blocked(*queue)) queue = queue->tasks.front().mark->queue;
    return queue;
}

Queue* choose(Queue* wanted) {
    if (scheduler.order == Order::kOnlyNeeded) return needed_for(wanted);
    Queue* other = scheduler.order == Order::kOthersFirst ? any_ready(wanted) : nullptr;
    return other ? other : any_ready();
}

template <class Done>
void run_until(Done done, Queue* wanted) {
    while (!done()) {
        Queue* queue = choose(wanted);
        TORCH_INTERNAL_ASSERT(queue && !queue->tasks.empty(), "every stream waits for another one");
        run_next(*queue);
    }
}

void run_some() {
    std::uniform_real_distribution<> chance;
    while (scheduler.eagerness > 0 && chance(scheduler.random) < scheduler.eagerness) {
        Queue* queue = any_ready();
        if (!queue) return;
        run_next(*queue);
    }
}

// A host that asks again and again gets another answer in the end, under every schedule.
void run_for_query(Queue* wanted) {
    if (scheduler.random() % 2 == 0) run_next(*choose(wanted));
}

void raise_error() {
    if (scheduler.error) std::rethrow_exception(std::exchange(scheduler.error, nullptr));
}

// A child may drop what it has of its parent, but not compute. It gets the lock in a state that it can use.
const bool watches_forks = [] {
    pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); },
                   [] {
                       child_of_fork = true;
                       lock.unlock();
                   });
    return true;
}();

}  // namespace

bool forked() { return child_of_fork; }

void check_not_forked() {
    TORCH_CHECK(!child_of_fork, "the simulated accelerator cannot be used in a forked process");
}

// ---- streams of threads

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, device), id);
}

c10::Stream new_stream(c10::DeviceIndex device) {
    Locked guard(lock);
    return stream_of(device, scheduler.next_stream++);
}

c10::Stream current_stream(c10::DeviceIndex device) { return stream_of(device, thread_streams[device]); }

c10::Stream exchange_stream(const c10::Stream& stream) {
    return stream_of(stream.device_index(), std::exchange(thread_streams[stream.device_index()], stream.id()));
}

c10::DeviceIndex current_device() { return thread_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) { return std::exchange(thread_device, device); }

c10::DeviceIndex index_of(c10::Device device) {
    if (!device.has_index()) return thread_device;
    TORCH_CHECK(device.index() < kDevices, "there is no ", device, ": the simulated accelerator has ", kDevices,
                " devices");
    return device.index();
}

Queue& queue_of(const c10::Stream& stream) {
    Locked guard(lock);
    const auto key = std::make_pair(stream.device_index(), stream.id());
    return scheduler.queues.try_emplace(key, Queue{stream, {}}).first->second;
}

Queue& current_queue(c10::DeviceIndex device) { return queue_of(current_stream(device)); }

std::vector<Queue*> queues_of(c10::DeviceIndex device) {
    Locked guard(lock);
    std::vector<Queue*> found;
    for (auto& [key, queue] : scheduler.queues)
        if (device < 0 || key.first == device) found.push_back(&queue);
    return found;
}

// ---- issuing work

void enqueue_quietly(Queue& queue, std::function<void()> run) {
    Locked guard(lock);
    queue.tasks.push_back({std::move(run), nullptr, false});
}

void enqueue(Queue& queue, std::function<void()> run) {
    check_not_forked();
    Locked guard(lock);
    enqueue_quietly(queue, std::move(run));
    run_some();
}

MarkPtr record(Queue& queue) {
    Locked guard(lock);
    auto mark = std::make_shared<Mark>(Mark{queue.tasks.empty(), &queue});
    if (!mark->reached) queue.tasks.push_back({nullptr, mark, false});
    return mark;
}

void wait_for(Queue& queue, const MarkPtr& mark) {
    Locked guard(lock);
    if (!mark->reached && mark->queue != &queue) queue.tasks.push_back({nullptr, mark, true});
}

bool all_reached(const std::vector<MarkPtr>& marks) {
    for (const MarkPtr& mark : marks)
        if (!mark->reached) return false;
    return true;
}

// ---- waiting

void synchronize(const std::vector<Queue*>& queues) {
    Locked guard(lock);
    thread_host_waits++;
    for (Queue* queue : queues) run_until([=] { return queue->tasks.empty(); }, queue);
    raise_error();
}

void synchronize(const MarkPtr& mark) {
    Locked guard(lock);
    thread_host_waits++;
    if (mark) run_until([&] { return mark->reached; }, mark->queue);
    raise_error();
}

bool query(Queue& queue) {
    Locked guard(lock);
    if (!queue.tasks.empty()) run_for_query(&queue);
    return queue.tasks.empty();
}

bool query(const MarkPtr& mark) {
    Locked guard(lock);
    if (mark && !mark->reached) run_for_query(mark->queue);
    return !mark || mark->reached;
}

// ---- what tests say and ask

void schedule(uint64_t seed) {
    Locked guard(lock);
    constexpr double kEagerness[] = {0, 0.3, 0.7, 0.95};
    constexpr Order kOrders[] = {Order::kAny, Order::kOnlyNeeded, Order::kOthersFirst};
    scheduler.random.seed(seed);
    scheduler.eagerness = seed < 2 ? 0 : kEagerness[seed % 4];
    scheduler.order = kOrders[seed < 2 ? seed + 1 : seed % 3];
}

void settle() {
    Locked guard(lock);
    while (Queue* queue = any_ready()) run_next(*queue);
    raise_error();
}

int64_t pending() {
    Locked guard(lock);
    int64_t count = 0;
    for (auto& [key, queue] : scheduler.queues) count += static_cast<int64_t>(queue.tasks.size());
    return count;
}

int64_t host_waits() { return thread_host_waits; }

}  // namespace simulated
