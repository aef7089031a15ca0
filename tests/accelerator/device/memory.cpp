// The devices' memory, and host memory that is page-locked.
//
// A device's memory is mapped twice. Tensors have addresses of a mapping that nobody may touch, so that a host access
// is a fault; kernels and copies use the other one, at a constant distance.
#include "simulated.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace simulated {

namespace {

// Blocks are never split, so a device has more addresses than memory. Only what is touched takes memory of the machine.
constexpr size_t kAddresses = size_t(32) << 30;
constexpr size_t kDefaultLimit = size_t(4) << 30;
constexpr size_t kGrain = 512;

struct Arena {
    char* shown;  // to tensors
    char* real;
    size_t used = 0;

    Arena() {
        int fd = memfd_create("simulated-accelerator", MFD_CLOEXEC);
        TORCH_CHECK(fd >= 0 && ftruncate(fd, kAddresses) == 0, "cannot make a simulated device's memory");
        shown = map(fd, PROT_NONE);
        real = map(fd, PROT_READ | PROT_WRITE);
        close(fd);
    }

    static char* map(int fd, int access) {
        void* mapped = mmap(nullptr, kAddresses, access, MAP_SHARED | MAP_NORESERVE, fd, 0);
        TORCH_CHECK(mapped != MAP_FAILED, "cannot map a simulated device's memory");
        return static_cast<char*>(mapped);
    }
};

struct Block {
    size_t nbytes;
    Queue* home;                // the stream that it was allocated on
    std::vector<Queue*> users;  // other streams, by record_use
};

// A block that was freed while other streams had work with it.
struct Leaving {
    char* address;
    Block block;
    std::vector<MarkPtr> marks;
};

struct DeviceMemory {
    Arena arenas[kDevices];
    std::map<char*, Block> blocks;
    std::map<std::pair<Queue*, size_t>, std::vector<char*>> free;
    std::list<Leaving> leaving;
    size_t limit = kDefaultLimit;
    int64_t allocated[kDevices] = {};
    int64_t peak[kDevices] = {};
};

DeviceMemory& memory() {
    static auto* made = new DeviceMemory;  // tensors may outlive static objects
    return *made;
}

// The block can be used again on its stream once it is poison. Before that, whoever reads it too early could find the
// same value that an earlier step had left there, and the mistake would not show.
void recycle(char* address, const Block& block) {
    char* real = alias_of(address);
    enqueue_quietly(*block.home, [address, real, home = block.home, nbytes = block.nbytes] {
        std::memset(real, kPoison, nbytes);
        memory().free[{home, nbytes}].push_back(address);
    });
}

void recycle_what_has_left() {
    for (auto it = memory().leaving.begin(); it != memory().leaving.end();) {
        if (!all_reached(it->marks)) {
            ++it;
            continue;
        }
        recycle(it->address, it->block);
        it = memory().leaving.erase(it);
    }
}

void free_device(void* address) {
    if (!address || forked()) return;
    Locked guard(lock);
    auto found = memory().blocks.find(static_cast<char*>(address));
    Block block = found->second;
    memory().blocks.erase(found);
    memory().allocated[block.home->stream.device_index()] -= static_cast<int64_t>(block.nbytes);
    std::vector<MarkPtr> marks;
    for (Queue* queue : block.users) marks.push_back(record(*queue));
    memory().leaving.push_back({static_cast<char*>(address), block, marks});
    recycle_what_has_left();
}

char* take_fresh(c10::DeviceIndex device, size_t nbytes) {
    Arena& arena = memory().arenas[device];
    TORCH_CHECK_WITH(OutOfMemoryError, arena.used + nbytes <= kAddresses, "sim:", int(device),
                     " has no addresses left: a process may use so many sizes of tensors only");
    char* address = arena.shown + arena.used;
    std::memset(arena.real + arena.used, kPoison, nbytes);
    arena.used += nbytes;
    return address;
}

void* allocate_device(size_t nbytes) {
    check_not_forked();
    Locked guard(lock);
    recycle_what_has_left();
    const c10::DeviceIndex device = current_device();
    const size_t rounded = (nbytes + kGrain - 1) / kGrain * kGrain;
    const auto now = static_cast<size_t>(memory().allocated[device]);
    TORCH_CHECK_WITH(OutOfMemoryError, now + rounded <= memory().limit, "sim:", int(device),
                     " is out of memory: ", nbytes, " bytes are wanted, and ", now, " of ", memory().limit,
                     " are allocated");
    Queue* home = &current_queue(device);
    auto& free = memory().free[{home, rounded}];
    char* address;
    if (free.empty()) {
        address = take_fresh(device, rounded);
    } else {
        address = free.back();
        free.pop_back();
    }
    memory().blocks[address] = {rounded, home, {}};
    memory().allocated[device] += static_cast<int64_t>(rounded);
    memory().peak[device] = std::max(memory().peak[device], memory().allocated[device]);
    return address;
}

struct DeviceAllocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* address = nbytes ? allocate_device(nbytes) : nullptr;
        return {address, address, &free_device, c10::Device(c10::DeviceType::PrivateUse1, current_device())};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
    void copy_data(void* to, const void* from, size_t nbytes) const override {
        enqueue(current_queue(current_device()),
                [to = alias_of(to), from = alias_of(from), nbytes] { std::memcpy(to, from, nbytes); });
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
        record_use(data.get(), queue_of(stream));
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        c10::CachingDeviceAllocator::DeviceStats stats;
        stats.allocated_bytes[0].current = allocated(device);
        stats.allocated_bytes[0].peak = peak(device);
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex device) override {
        Locked guard(lock);
        memory().peak[device] = memory().allocated[device];
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        Locked guard(lock);
        const size_t limit = memory().limit, used = static_cast<size_t>(memory().allocated[device]);
        return {limit > used ? limit - used : 0, limit};
    }
};

}  // namespace

c10::Allocator* device_allocator() {
    static auto* made = new DeviceAllocator;
    return made;
}

int owner_of(const void* address) {
    for (int device = 0; device < kDevices; device++) {
        const char* begin = memory().arenas[device].shown;
        if (address >= begin && address < begin + kAddresses) return device;
    }
    return -1;
}

char* alias_of(const void* address) {
    if (!address) return nullptr;
    const int device = owner_of(address);
    TORCH_CHECK(device >= 0, address, " is not memory of a simulated device");
    const Arena& arena = memory().arenas[device];
    return arena.real + (static_cast<const char*>(address) - arena.shown);
}

void record_use(const void* address, Queue& queue) {
    if (!address) return;
    Locked guard(lock);
    auto after = memory().blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    Block& block = std::prev(after)->second;
    if (block.home != &queue) block.users.push_back(&queue);
}

void set_limit(size_t nbytes) {
    Locked guard(lock);
    memory().limit = nbytes ? nbytes : kDefaultLimit;
}

int64_t allocated(c10::DeviceIndex device) {
    Locked guard(lock);
    return memory().allocated[device];
}

int64_t peak(c10::DeviceIndex device) {
    Locked guard(lock);
    return memory().peak[device];
}

// ---- host memory

namespace {

struct HostBlock {
    size_t nbytes;
    bool is_foreign;  // registered, not allocated here
};

struct HostMemory {
    std::map<char*, HostBlock> blocks;
    std::list<HostRange> uses;
    std::list<HostRange> leaving;  // freed, but pending copies use them
};
HostMemory& host = *new HostMemory;

void free_what_has_left() {
    for (auto it = host.leaving.begin(); it != host.leaving.end();) {
        if (is_in_use(*it)) {
            ++it;
            continue;
        }
        std::free(it->begin);
        it = host.leaving.erase(it);
    }
}

void free_host(void* address) {
    if (!address) return;
    Locked guard(lock);
    auto found = host.blocks.find(static_cast<char*>(address));
    host.leaving.push_back({found->first, found->first + found->second.nbytes});
    host.blocks.erase(found);
    free_what_has_left();
}

void* allocate_host(size_t nbytes) {
    Locked guard(lock);
    free_what_has_left();
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 4096, nbytes) == 0, "no host memory is left");
    std::memset(address, kPoison, nbytes);
    host.blocks[static_cast<char*>(address)] = {nbytes, false};
    return address;
}

// The block that has this address, or null.
const std::pair<char* const, HostBlock>* block_at(const void* address) {
    auto it = host.blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (it == host.blocks.begin()) return nullptr;
    --it;
    return address < it->first + it->second.nbytes ? &*it : nullptr;
}

struct HostAllocator final : at::HostAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* address = nbytes ? allocate_host(nbytes) : nullptr;
        return {address, address, &free_host, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_host; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
    bool record_event(void* address, void*, c10::Stream stream) override {
        Locked guard(lock);
        const auto* block = block_at(address);
        if (!block) return false;
        HostUse use = begin_host_use({block->first, block->first + block->second.nbytes});
        enqueue_quietly(queue_of(stream), [use] { end_host_use(use); });
        return true;
    }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
};

}  // namespace

at::HostAllocator* host_allocator() {
    static auto* made = new HostAllocator;
    return made;
}

HostUse begin_host_use(HostRange range) {
    Locked guard(lock);
    return host.uses.insert(host.uses.end(), range);
}

void end_host_use(HostUse use) {
    Locked guard(lock);
    host.uses.erase(use);
}

bool is_in_use(HostRange range) {
    Locked guard(lock);
    for (const HostRange& use : host.uses)
        if (use.begin < range.end && range.begin < use.end) return true;
    return false;
}

bool is_pinned(const void* address) {
    Locked guard(lock);
    return address && block_at(address);
}

bool is_pinned(HostRange range) {
    Locked guard(lock);
    const auto* block = block_at(range.begin);
    TORCH_CHECK(!block || range.end <= block->first + block->second.nbytes, "of ", range.end - range.begin,
                " bytes of host memory only some are page-locked");
    return block;
}

void register_host(char* address, size_t nbytes) {
    Locked guard(lock);
    TORCH_CHECK(nbytes > 0, "no bytes to register");
    const auto after = host.blocks.lower_bound(address + nbytes);  // the first block behind it
    if (after != host.blocks.begin()) {
        const auto last = std::prev(after);
        TORCH_CHECK(last->first + last->second.nbytes <= address, "memory at ", static_cast<void*>(address),
                    " is already registered, or was allocated page-locked");
    }
    host.blocks[address] = {nbytes, true};
}

void unregister_host(char* address) {
    Locked guard(lock);
    auto found = host.blocks.find(address);
    const void* shown = address;
    TORCH_CHECK(found != host.blocks.end() && found->second.is_foreign, "no memory is registered at ", shown);
    TORCH_CHECK(!is_in_use({address, address + found->second.nbytes}), "a pending copy uses the memory at ", shown);
    host.blocks.erase(found);
}

int64_t registrations() {
    Locked guard(lock);
    int64_t count = 0;
    for (const auto& [address, block] : host.blocks) count += block.is_foreign;
    return count;
}

}  // namespace simulated
