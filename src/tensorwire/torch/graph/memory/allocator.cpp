// An allocator for torch's CPU tensors: "the k-th allocation of exactly n bytes that this thread makes from now on lies
// in this memory". Everything else goes to the previous allocator, unchanged.
//
// Compiled on the user's machine against its torch (allocator.py); needs c10 and nothing of Python's headers. It is
// called through ctypes.PyDLL, which keeps the interpreter's lock.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

// Of Python's stable ABI.
extern "C" {
struct _object;
using PyObject = _object;
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
int Py_IsInitialized();
int PyGILState_Ensure();
void PyGILState_Release(int);
}

namespace {

constexpr int kMost = 8;                      // outputs of one operator
constexpr uint32_t kOnlyRecord = UINT32_MAX;  // a skip that no allocation reaches

// Memory to be born in, as Python packs it. `owner` keeps it from other use.
struct Place {
    void* address;
    size_t nbytes;
    PyObject* owner;
};

struct Arm {
    Place place;
    uint32_t skip;
};

struct Allocation {
    void* address;
    size_t nbytes;
};

// One call of an operator, in one thread. An operator that is written in Python may have others within it.
struct Watch {
    Arm arms[kMost];
    int armed = 0;
    std::vector<Allocation> log;
    Watch* outer = nullptr;
};

// A thread's innermost watch, null if no operator is watched: all that an ordinary allocation looks at.
thread_local Watch* watching = nullptr;
thread_local std::unique_ptr<Watch> ended;  // the last one, for its log, and to be used again

// Who owns the memory of each storage that was born and lives. By address and not in the deleter's context: mkldnn takes
// raw memory, whose context must be its address, and an operator that changed its ways may take ours for that.
struct Alive {
    std::mutex lock;
    std::unordered_map<void*, PyObject*> owners;
};
Alive& alive = *new Alive;  // storages may die after static objects

bool is_taken(void* address) {
    std::lock_guard<std::mutex> guard(alive.lock);
    return alive.owners.count(address) != 0;
}

// False if another thread was first.
bool settle(const Place& place) {
    std::lock_guard<std::mutex> guard(alive.lock);
    return alive.owners.emplace(place.address, place.owner).second;
}

void drop(PyObject* owner) {
    if (!Py_IsInitialized()) return;  // the interpreter is gone, and with it whoever counted
    int state = PyGILState_Ensure();
    Py_DecRef(owner);
    PyGILState_Release(state);
}

struct Births final : c10::Allocator {
    explicit Births(c10::Allocator* before) : real(before) {}

    c10::DataPtr allocate(size_t nbytes) override {
        if (C10_LIKELY(watching == nullptr)) return real->allocate(nbytes);
        return watched(*watching, nbytes);
    }

    // For memory that was taken raw: that of the real allocator, and ours by mischance.
    c10::DeleterFnPtr raw_deleter() const override { return real->raw_deleter() ? &release : nullptr; }

    bool is_simple_data_ptr(const c10::DataPtr& data) const override {
        return data.get_deleter() == &release || real->is_simple_data_ptr(data);
    }

    void copy_data(void* target, const void* source, std::size_t nbytes) const override {
        real->copy_data(target, source, nbytes);
    }

    c10::DataPtr watched(Watch& watch, size_t nbytes);
    static void release(void* address);

    c10::Allocator* const real;  // in here, so that who sees the allocator sees it too
};
Births* births = nullptr;

// The arm that this allocation is for, if any; the others have one fewer to skip.
Arm* pick(Watch& watch, size_t nbytes) {
    Arm* chosen = nullptr;
    for (int i = 0; i < watch.armed; i++) {
        Arm& arm = watch.arms[i];
        if (arm.place.nbytes != nbytes || arm.skip == kOnlyRecord) continue;
        if (arm.skip > 0) {
            arm.skip--;
        } else if (chosen == nullptr) {
            chosen = &arm;
        }
    }
    return chosen;
}

c10::DataPtr Births::watched(Watch& watch, size_t nbytes) {
    Arm* arm = pick(watch, nbytes);
    if (arm == nullptr || !settle(arm->place)) {
        c10::DataPtr data = real->allocate(nbytes);
        watch.log.push_back({data.get(), nbytes});
        return data;
    }
    void* address = arm->place.address;
    *arm = watch.arms[--watch.armed];  // its reference is the storage's now
    c10::DataPtr data(address, address, &release, c10::Device(c10::DeviceType::CPU));
    watch.log.push_back({address, nbytes});
    return data;
}

void Births::release(void* address) {
    PyObject* owner = nullptr;
    {
        std::lock_guard<std::mutex> guard(alive.lock);
        auto found = alive.owners.find(address);
        if (found != alive.owners.end()) {
            owner = found->second;
            alive.owners.erase(found);
        }
    }
    if (owner == nullptr) return births->real->raw_deleter()(address);
    drop(owner);  // without the lock: the owner's end may be any code
}

// A child must not inherit the lock of a thread that it has not.
void before_fork() { alive.lock.lock(); }
void after_fork() { alive.lock.unlock(); }

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Puts the allocator in, at the lowest priority that does, so that others may come after as they might have before.
// Returns 0, or -1 if torch does not take it. Idempotent.
EXPORT int install() {
    if (births != nullptr) return 0;
    births = new Births(c10::GetCPUAllocator());
    pthread_atfork(before_fork, after_fork, after_fork);
    std::atomic_thread_fence(std::memory_order_release);
    for (int priority = 0; priority <= UINT8_MAX; priority++) {
        c10::SetCPUAllocator(births, static_cast<uint8_t>(priority));
        if (c10::GetCPUAllocator() == births) return 0;
    }
    return -1;
}

// From now on, until end(), the skips[i]-th allocation (from 0) of places[i].nbytes bytes in this thread lies in
// places[i], and all are logged. Watches within watches see their own. Returns 0, or 1 + i if a storage that was born in
// places[i] still lives, or places[i] is there twice; then nothing was changed. count is at most kMost.
EXPORT int begin(int count, const Place* places, const uint32_t* skips) {
    for (int i = 0; i < count; i++) {
        if (places[i].nbytes == 0) continue;
        if (is_taken(places[i].address)) return 1 + i;
        for (int j = 0; j < i; j++) {
            if (places[j].nbytes > 0 && places[j].address == places[i].address) return 1 + i;
        }
    }
    Watch* watch = ended ? ended.release() : new Watch;
    watch->log.clear();
    for (int i = 0; i < count; i++) {
        if (places[i].nbytes == 0) continue;
        Py_IncRef(places[i].owner);
        watch->arms[watch->armed++] = {places[i], skips[i]};
    }
    watch->outer = watching;
    watching = watch;
    return 0;
}

// Ends what the last begin() began. Returns how many places were not used.
EXPORT int end() {
    Watch* watch = watching;
    if (watch == nullptr) return 0;
    watching = watch->outer;
    PyObject* owners[kMost];
    int left = watch->armed;
    for (int i = 0; i < left; i++) owners[i] = watch->arms[i].place.owner;
    watch->armed = 0;
    ended.reset(watch);
    for (int i = 0; i < left; i++) Py_DecRef(owners[i]);  // last: an owner's end may be any code
    return left;
}

// Among the allocations of exactly nbytes that the last watch saw, the number (from 0) of the last one that was at
// address; -1 if there was none.
EXPORT int64_t which(const void* address, size_t nbytes) {
    int64_t count = 0, found = -1;
    if (ended == nullptr) return found;
    for (const Allocation& made : ended->log) {
        if (made.nbytes != nbytes) continue;
        if (made.address == address) found = count;
        count++;
    }
    return found;
}

// Whether a storage that was born at address still lives.
EXPORT int taken(void* address) { return is_taken(address); }

// From now on torch refuses the address of this storage to whoever asks, reader or writer, with an error that says why.
EXPORT void lock(void* storage, const char* why) {
    static_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}
