// A simulated accelerator for PyTorch: what its files share.
//
// Work is issued to streams and runs later, at the latest when a host waits for it. Kernels and copies compute on the
// CPU, through a second mapping of the device's memory; the addresses that tensors have fault on access by the host.
//
// One rule for all files: whoever holds `lock` never waits for Python's interpreter lock, because a thread that has
// that one may wait for `lock`. So under `lock` no Meta kernel runs (they are in Python), and no handle of a caller's
// tensor is made or dropped (the second handle of a tensor that Python owns counts in Python, too).
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

namespace c10 {
struct Allocator;
}
namespace at {
struct HostAllocator;
}

namespace simulated {

constexpr int kDevices = 2;
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating-point format, -1 in integers

extern std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;

// ---- scheduler.cpp

struct Queue;

// One recording of an event: a place in a stream's work.
struct Mark {
    bool reached = false;
    Queue* queue = nullptr;
};
using MarkPtr = std::shared_ptr<Mark>;

// A kernel or copy (`run`), or a mark that is reached here, or one that has to be reached first (`waits`).
struct Task {
    std::function<void()> run;
    MarkPtr mark;
    bool waits = false;
};

// The work of a stream that has not run. It lives as long as the process.
struct Queue {
    c10::Stream stream;
    std::deque<Task> tasks;
};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::DeviceIndex index_of(c10::Device device);  // the current device's if it has none

Queue& queue_of(const c10::Stream& stream);
Queue& current_queue(c10::DeviceIndex device);
std::vector<Queue*> queues_of(c10::DeviceIndex device);  // of all devices if negative

void enqueue(Queue& queue, std::function<void()> run);
// As `enqueue`, but runs nothing: for callers that must not fail.
void enqueue_quietly(Queue& queue, std::function<void()> run);
MarkPtr record(Queue& queue);
void wait_for(Queue& queue, const MarkPtr& mark);
bool all_reached(const std::vector<MarkPtr>& marks);

// Host waits. They raise what a kernel raised that ran late, which may be another one than is waited for.
void synchronize(const std::vector<Queue*>& queues);
void synchronize(const MarkPtr& mark);
bool query(Queue& queue);
bool query(const MarkPtr& mark);

void schedule(uint64_t seed);
void settle();
int64_t pending();
int64_t host_waits();  // of the calling thread
void check_not_forked();
bool forked();

// ---- memory.cpp

c10::Allocator* device_allocator();
at::HostAllocator* host_allocator();
int owner_of(const void* address);  // the device, or -1
char* alias_of(const void* address);  // where kernels see what tensors have at this address
void record_use(const void* address, Queue& queue);  // Tensor.record_stream

// Host memory that a pending copy reads or writes.
struct HostRange {
    char* begin;
    char* end;
};
using HostUse = std::list<HostRange>::iterator;
HostUse begin_host_use(HostRange range);
void end_host_use(HostUse use);
bool is_in_use(HostRange range);

bool is_pinned(const void* address);
bool is_pinned(HostRange range);  // raises if only its begin is
void register_host(char* address, size_t nbytes);
void unregister_host(char* address);
int64_t registrations();

void set_limit(size_t nbytes);
int64_t allocated(c10::DeviceIndex device);
int64_t peak(c10::DeviceIndex device);

}  // namespace simulated
