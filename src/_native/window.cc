#include "window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace tw {

[[noreturn]] static void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

Window::Window(u64 size, bool shared, bool read_only)
    : nbytes((size + page - 1) / page * page), shared_(shared), read_only_(read_only) {
    if (size > largest) fail(ENOMEM, "reserve");
    void* p = mmap(nullptr, std::max(nbytes, page), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail(errno, "reserve");
    base = static_cast<char*>(p);
    if (shared_) {
        enlist(this);
        return;
    }
    pagemap_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pagemap_ >= 0) close_on_fork(pagemap_);
}

Window::~Window() {
    if (shared_) dismiss(this);
    if (base) munmap(base, std::max(nbytes, page));
    if (pagemap_ >= 0) {
        forget_fd(pagemap_);
        close(pagemap_);
    }
}

void Window::show(const Extent& e, u64 from, u64 length) {
    // Populated while it is read-only: populating a writable private mapping would copy every page. Not where the
    // region is sparse: that would fill it.
    const int flags = (shared_ ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED | (e.span->reserved ? MAP_POPULATE : 0);
    const off_t at = static_cast<off_t>(e.span->file_offset() + e.source + (from - e.offset));
    void* p = mmap(base + from, length, PROT_READ, flags, e.span->file(), at);
    if (p == MAP_FAILED) fail(errno, "mmap");
    if (read_only_) return;
    if (mprotect(p, length, PROT_READ | PROT_WRITE)) fail(errno, "mprotect");
}

void Window::place(u64 offset, std::shared_ptr<Span> span, u64 source, u64 length) {
    if (offset % page || source % page || length % page || offset > nbytes || length > nbytes - offset) fail(EINVAL, "window");
    const u64 room = (span->nbytes + page - 1) / page * page;
    if (span->file() < 0 || source > room || length > room - source) fail(EINVAL, "window");
    if (shared_ && !read_only_ && !span->writable) fail(EACCES, "window");
    if (!length) return;
    Extent e{offset, source, length, std::move(span)};
    show(e, offset, length);
    extents_.push_back(std::move(e));
}

void Window::refresh(u64 offset, u64 length) {
    if (offset >= nbytes) return;
    const u64 end = (offset + std::min(length, nbytes - offset) + page - 1) / page * page;
    offset = offset / page * page;
    for (const Extent& e : extents_) {
        const u64 from = std::max(offset, e.offset), to = std::min(end, e.offset + e.length);
        if (from < to) show(e, from, to - from);
    }
}

void Window::in_child() {
    for (const Extent& e : extents_) {
        const off_t at = static_cast<off_t>(e.span->file_offset() + e.source);
        void* p = mmap(base + e.offset, e.length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, e.span->file(), at);
        if (p == MAP_FAILED) munmap(base + e.offset, e.length);  // a crash there is better than a write to the parent's
    }
}

std::vector<u64> Window::modified(size_t limit) {
    constexpr u64 present = u64{1} << 63, swapped = u64{1} << 62, file_or_shared = u64{1} << 61;
    std::vector<u64> found;
    if (pagemap_ < 0) fail(EACCES, "/proc/self/pagemap");
    entries_.resize(nbytes / page);
    char* out = reinterpret_cast<char*>(entries_.data());
    const u64 want = entries_.size() * 8, start = reinterpret_cast<uintptr_t>(base) / page * 8;
    for (u64 got = 0; got < want;) {
        const ssize_t n = pread(pagemap_, out + got, want - got, static_cast<off_t>(start + got));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) fail(n ? errno : EIO, "/proc/self/pagemap");
        got += static_cast<u64>(n);
    }
    for (u64 i = 0; i < entries_.size() && found.size() < limit; i++)
        if ((entries_[i] & (present | swapped)) && !(entries_[i] & file_or_shared)) found.push_back(i * page);
    return found;
}

}  // namespace tw
