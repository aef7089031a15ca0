// TensorFlow's memory on CPUs, in one span of shared memory, in which other processes can read tensors.
//
// TensorFlow asks for its allocator once, before the first tensor, and later aborts if another one registers. So the
// arena first checks a member that is private to TensorFlow 2.21.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/platform/mutex.h"

#define private public
#include "tensorflow/core/framework/allocator_registry.h"
#undef private

namespace {

using namespace tensorflow;

constexpr size_t smallest = 4096;  // a tensor that lies here
constexpr size_t front = 64;       // bytes in front of each block, with its class; blocks stay aligned for Eigen
constexpr int classes = 4 * 64;    // four sizes to each power of two: at most a quarter is wasted

// Blocks of a class are used again; they do not go back to others.
class Arena {
  public:
    Arena(char* base, size_t nbytes) : base_(base), nbytes_(nbytes) {}

    void* take(size_t nbytes) {
        const int which = class_of(nbytes + front);
        Free& found = free_[which];
        char* at = nullptr;
        {
            std::lock_guard<std::mutex> g(found.mutex);
            if (!found.blocks.empty()) {
                at = found.blocks.back();
                found.blocks.pop_back();
            }
        }
        if (!at) {
            const size_t size = size_of(which);
            size_t begin = used_.load(std::memory_order_relaxed);
            do {
                if (size > nbytes_ - begin) return nullptr;
            } while (!used_.compare_exchange_weak(begin, begin + size, std::memory_order_relaxed));
            at = base_ + begin;
            *reinterpret_cast<int*>(at) = which;
        }
        return at + front;
    }

    void give(void* pointer) {
        char* at = static_cast<char*>(pointer) - front;
        Free& found = free_[*reinterpret_cast<int*>(at)];
        std::lock_guard<std::mutex> g(found.mutex);
        found.blocks.push_back(at);
    }

    bool has(const void* pointer) const { return pointer >= base_ && pointer < base_ + nbytes_; }
    size_t used() const { return used_.load(std::memory_order_relaxed); }

  private:
    struct Free {
        std::mutex mutex;
        std::vector<char*> blocks;
    };

    static size_t size_of(int which) { return (size_t{1} << (which / 4)) / 4 * (4 + which % 4); }

    static int class_of(size_t nbytes) {
        int which = 4 * (63 - __builtin_clzll(nbytes));
        while (size_of(which) < nbytes) ++which;
        return which;
    }

    char* const base_;
    const size_t nbytes_;
    std::atomic<size_t> used_{0};
    Free free_[classes];
};

Arena* arena = nullptr;

void* take(size_t alignment, size_t nbytes) {
    if (nbytes >= smallest && alignment <= front)
        if (void* found = arena->take(nbytes)) return found;
    void* found = nullptr;
    return posix_memalign(&found, alignment < 64 ? 64 : alignment, nbytes ? nbytes : 1) ? nullptr : found;
}

void give(void* pointer) { arena->has(pointer) ? arena->give(pointer) : std::free(pointer); }

class ArenaAllocator : public Allocator {
  public:
    std::string Name() override { return "tensorwire"; }
    void* AllocateRaw(size_t alignment, size_t nbytes) override { return take(alignment, nbytes); }
    void DeallocateRaw(void* pointer) override { give(pointer); }
};

class ArenaSubAllocator : public SubAllocator {
  public:
    ArenaSubAllocator() : SubAllocator({}, {}) {}
    void* Alloc(size_t alignment, size_t nbytes, size_t* received) override {
        *received = nbytes;
        return take(alignment, nbytes);
    }
    void Free(void* pointer, size_t) override { give(pointer); }
    bool SupportsCoalescing() const override { return false; }
};

class ArenaFactory : public AllocatorFactory {
  public:
    Allocator* CreateAllocator() override { return new ArenaAllocator; }
    SubAllocator* CreateSubAllocator(int) override { return new ArenaSubAllocator; }
};

}  // namespace

// Whether TensorFlow's tensors lie in this memory from now on; it does not where there are tensors already.
extern "C" int tensorwire_arena(char* base, uint64_t nbytes) {
    auto* registry = AllocatorFactoryRegistry::singleton();
    if (registry->first_alloc_made_) return 0;
    arena = new Arena(base, nbytes);
    registry->Register(__FILE__, __LINE__, "tensorwire", 1000, new ArenaFactory);
    return 1;
}

// Bytes of all blocks, used or kept for use again.
extern "C" uint64_t tensorwire_arena_used() { return arena ? arena->used() : 0; }
