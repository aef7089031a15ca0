#include "span.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <new>
#include <sstream>
#include <system_error>
#include <vector>

namespace tw {

[[noreturn]] static void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

static u64 rounded(u64 nbytes) { return (nbytes + page - 1) / page * page; }

// The values of lines "NAME NUMBER ..." whose name is one of `names`, added up.
static u64 sum_of(const std::string& path, std::initializer_list<const char*> names) {
    std::ifstream file(path);
    u64 sum = 0;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string name;
        u64 value = 0;
        if (words >> name >> value && std::find(names.begin(), names.end(), name) != names.end()) sum += value;
    }
    return sum;
}

static bool number_in(const std::string& path, u64& value) {
    std::ifstream file(path);
    return static_cast<bool>(file >> value);
}

// What a control group leaves: its limit less what is used and cannot be dropped. Version 1 adds up its children's
// figures under other names, and shows "no limit" as a huge number.
static u64 left_in_group(const std::string& folder, bool unified) {
    u64 limit = 0, current = 0;
    if (!number_in(folder + (unified ? "/memory.max" : "/memory.limit_in_bytes"), limit)) return std::numeric_limits<u64>::max();
    if (!number_in(folder + (unified ? "/memory.current" : "/memory.usage_in_bytes"), current)) return std::numeric_limits<u64>::max();
    const std::string stat = folder + "/memory.stat";
    const u64 files = unified ? sum_of(stat, {"inactive_file", "active_file"}) : sum_of(stat, {"total_inactive_file", "total_active_file"});
    const u64 used = current - std::min(current, files);
    return limit - std::min(limit, used);
}

// The control group of a line "NUMBER:CONTROLLERS:PATH", and every group around it. In a container the path may be the
// host's, which is not there; the last step, the root of what is mounted, is then the container's own group.
static u64 left_in_groups(const std::string& line) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) return std::numeric_limits<u64>::max();
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",memory,") == std::string::npos) return std::numeric_limits<u64>::max();
    const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    u64 least = std::numeric_limits<u64>::max();
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
        least = std::min(least, left_in_group(root + path, unified));
        if (path.empty() || path == "/") return least;
    }
}

u64 available_bytes() {
    u64 least = std::numeric_limits<u64>::max();
    if (const u64 kib = sum_of("/proc/meminfo", {"MemAvailable:", "SwapFree:"})) least = kib * 1024;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) least = std::min(least, left_in_groups(line));
    return least;
}

// The kernel refuses nothing that a control group has no room for: it kills a process once the pages are touched. So we
// look, and leave some room for the process's own needs; not for every small region, since looking takes 100 us.
static void check_available(u64 total) {
    constexpr u64 look_every = u64{4} << 20, spare = u64{16} << 20;
    static std::atomic<u64> unseen{0};
    if (unseen.fetch_add(total, std::memory_order_relaxed) + total < look_every) return;
    unseen.store(0, std::memory_order_relaxed);
    const u64 available = available_bytes();
    if (available >= spare && total <= available - spare) return;
    unseen.store(look_every, std::memory_order_relaxed);  // the next one looks again
    fail(ENOMEM, "allocate");
}

// In pieces: a signal makes the kernel give a whole piece back and start again.
static void reserve_pages(int fd, u64 total) {
    constexpr u64 piece = u64{64} << 20;
    check_available(total);
    for (u64 at = 0; at < total;) {
        const u64 length = std::min(piece, total - at);
        if (fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(length)) == 0) at += length;
        else if (errno != EINTR) fail(errno, "fallocate");
    }
}

std::shared_ptr<Span> Span::allocate(u64 nbytes, bool reserve) {
    if (nbytes > largest) fail(ENOMEM, "allocate");
    std::shared_ptr<Span> span(new Span);
    const u64 total = page + rounded(nbytes);
    span->reserved = reserve;
    span->fd = memfd_create("tensorwire", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (span->fd < 0) fail(errno, "memfd_create");
    fchmod(span->fd, 0600);
    if (ftruncate(span->fd, static_cast<off_t>(total))) fail(errno, "ftruncate");
    // Reserved and touched now: lack of memory is an error here, never a SIGBUS in the middle of a step.
    if (reserve) reserve_pages(span->fd, total);
    if (fcntl(span->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) fail(errno, "seal");
    const int flags = MAP_SHARED | (reserve ? MAP_POPULATE : MAP_NORESERVE);
    void* p = mmap(nullptr, total, PROT_READ | PROT_WRITE, flags, span->fd, 0);
    if (p == MAP_FAILED) fail(errno, "mmap");
    span->map_ = static_cast<char*>(p);
    span->map_bytes_ = total;
    span->header = new (p) Header;
    span->header->nbytes = nbytes;
    span->base = span->map_ + page;
    span->nbytes = nbytes;
    close_on_fork(span->fd);
    enlist(&span->header->futex);
    return span;
}

std::shared_ptr<Span> Span::map(int fd, bool writable) {
    std::shared_ptr<Span> span(new Span);
    struct stat st;
    if (fstat(fd, &st)) fail(errno, "fstat");
    if (static_cast<u64>(st.st_size) < page) fail(EINVAL, "not a region");
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) fail(EPERM, "the region is not sealed against shrinking");
    const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
    span->reserved = static_cast<u64>(st.st_blocks) * 512 >= static_cast<u64>(st.st_size);
    const int flags = MAP_SHARED | (span->reserved ? MAP_POPULATE : MAP_NORESERVE);
    void* p = mmap(nullptr, static_cast<size_t>(st.st_size), protection, flags, fd, 0);
    if (p == MAP_FAILED) fail(errno, "mmap");
    span->map_ = static_cast<char*>(p);
    span->map_bytes_ = static_cast<u64>(st.st_size);
    span->header = static_cast<Header*>(p);
    span->writable = writable;
    span->base = span->map_ + page;
    span->nbytes = span->header->nbytes;
    if (span->header->magic != Header::expected || span->nbytes > span->map_bytes_ - page) {
        span->header = nullptr;
        fail(EINVAL, "not a region");
    }
    span->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (span->fd < 0) fail(errno, "dup");
    close_on_fork(span->fd);
    if (writable) enlist(&span->header->futex);
    return span;
}

void Span::announce() const {
    ring(header->futex);
    if (auto engine = progress.lock()) engine->nudge();
}

void Span::dont_fork() const {
    if (!map_) fail(EINVAL, "only mapped memory can be kept from children");
    if (nbytes && madvise(base, rounded(nbytes), MADV_DONTFORK)) fail(errno, "madvise");
}

void Span::lies_in(std::shared_ptr<Span> whole, u64 offset) {
    if (!borrowed_ || !whole->holds(offset, nbytes) || base != whole->base + offset) fail(EINVAL, "these bytes lie elsewhere");
    whole_ = std::move(whole);
    at_ = offset;
}

// A span may die on a native thread, which must not wait for the GIL while it holds an engine's lock.
// Never destroyed: native threads outlive static objects.
static std::mutex& unused_mutex = *new std::mutex;
static std::vector<Py_buffer>& unused_views = *new std::vector<Py_buffer>;

static int release_unused(void*) {
    std::vector<Py_buffer> views;
    {
        std::lock_guard g(unused_mutex);
        views.swap(unused_views);
    }
    for (Py_buffer& v : views) PyBuffer_Release(&v);
    return 0;
}

std::shared_ptr<Span> Span::wrap(PyObject* buffer) {
    release_unused(nullptr);
    std::shared_ptr<Span> span(new Span);
    if (PyObject_GetBuffer(buffer, &span->view_, PyBUF_WRITABLE) != 0) {
        PyErr_Clear();
        if (PyObject_GetBuffer(buffer, &span->view_, PyBUF_SIMPLE) != 0) return nullptr;
        span->writable = false;
    }
    span->borrowed_ = true;
    span->base = static_cast<char*>(span->view_.buf);
    span->nbytes = static_cast<u64>(span->view_.len);
    span->header = new Header;
    span->header->nbytes = span->nbytes;
    enlist(&span->header->futex);
    return span;
}

Span::~Span() {
    if (header && has_futex()) dismiss(&header->futex);
    if (borrowed_) {
        delete header;
        if (!Py_IsInitialized()) {
            // the interpreter is gone, and the buffer's owner with it
        } else if (PyGILState_Check()) {
            PyBuffer_Release(&view_);
        } else {
            {
                std::lock_guard g(unused_mutex);
                unused_views.push_back(view_);
            }
            Py_AddPendingCall(release_unused, nullptr);
        }
    }
    if (map_) munmap(map_, map_bytes_);
    if (fd >= 0) {
        forget_fd(fd);
        close(fd);
    }
}

}  // namespace tw
