// A span of memory that transfers may touch: mapped from a sealed memfd, or borrowed from a Python buffer.
#pragma once

#include <Python.h>

#include "futex.h"

namespace tw {

constexpr u64 page = 4096;
constexpr u64 largest = u64{1} << 56;  // what an address could ever reach

// The page in front of every mapped span. Processes that map it share the futex and the closed flag.
struct Header {
    static constexpr u64 expected = 0x31657269776e6574;  // "tenwire1"
    u64 magic = expected;
    u64 nbytes = 0;
    std::atomic<u32> closed{0};
    alignas(64) Futex futex;
};
static_assert(sizeof(Header) <= page);

// Bytes that can still be had, from the machine and from each control group around this process.
u64 available_bytes();

class Span {
  public:
    // Throws std::system_error with the errno of what failed.
    static std::shared_ptr<Span> allocate(u64 nbytes, bool reserve);
    static std::shared_ptr<Span> map(int fd, bool writable);
    static std::shared_ptr<Span> wrap(PyObject* buffer);  // sets a Python error and returns null
    ~Span();
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

    bool holds(u64 offset, u64 length) const { return offset <= nbytes && length <= nbytes - offset; }
    bool closed() const { return header->closed.load(std::memory_order_acquire); }
    bool aligned(u64 offset) const { return (reinterpret_cast<uintptr_t>(base) + offset) % 8 == 0; }
    std::atomic<u64>* word(u64 offset) const { return reinterpret_cast<std::atomic<u64>*>(base + offset); }
    Target target(u64 offset, const Liveness* peer) const { return {word(offset), &header->futex, peer, own.get(), &header->closed, own ? own->losses() : 0}; }
    // After this process changed a word, or closed the span: wakes whoever waits here.
    void announce() const;
    // Forked children do not get the payload. They keep the page in front of it: its futex is in the list of all futexes.
    void dont_fork() const;
    // For borrowed bytes that lie in another span: what can be done with a mapping can be done with them.
    void lies_in(std::shared_ptr<Span> whole, u64 offset);
    int file() const { return whole_ ? whole_->fd : fd; }
    u64 file_offset() const { return page + at_; }
    // False for a mapping without write access, whose futex nobody can ring.
    bool has_futex() const { return borrowed_ || writable; }

    char* base = nullptr;
    u64 nbytes = 0;
    Header* header = nullptr;
    int fd = -1;
    bool writable = true;
    bool reserved = true;                 // every page exists: mapping it may touch them all
    std::shared_ptr<Liveness> own;            // the device this span belongs to
    std::weak_ptr<Progress> progress;     // what must run while somebody waits here; it holds spans, so they do not hold it

  private:
    Span() = default;
    char* map_ = nullptr;
    u64 map_bytes_ = 0;
    Py_buffer view_{};
    bool borrowed_ = false;
    std::shared_ptr<Span> whole_;
    u64 at_ = 0;
};

inline void raise(const Span& span, u64 offset, u64 value) {
    span.word(offset)->store(value, std::memory_order_release);
    span.announce();
}

}  // namespace tw
