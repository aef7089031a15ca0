#include "span.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <system_error>
#include <vector>

namespace tw {

[[noreturn]] static void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

static u64 rounded(u64 nbytes) { return (nbytes + page - 1) / page * page; }

std::shared_ptr<Span> Span::allocate(u64 nbytes, bool reserve) {
    if (nbytes > (u64{1} << 56)) fail(ENOMEM, "allocate");
    std::shared_ptr<Span> span(new Span);
    const u64 total = page + rounded(nbytes);
    span->fd = memfd_create("tensorwire", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (span->fd < 0) fail(errno, "memfd_create");
    fchmod(span->fd, 0600);
    if (ftruncate(span->fd, static_cast<off_t>(total))) fail(errno, "ftruncate");
    // Reserved and touched now: lack of memory is an error here, never a SIGBUS in the middle of a step.
    if (reserve && fallocate(span->fd, 0, 0, static_cast<off_t>(total))) fail(errno, "fallocate");
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
    enlist(&span->header->door);
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
    void* p = mmap(nullptr, static_cast<size_t>(st.st_size), protection, MAP_SHARED | MAP_POPULATE, fd, 0);
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
    return span;
}

std::shared_ptr<Span> Span::wrap(PyObject* buffer) {
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
    enlist(&span->header->door);
    return span;
}

// A span may die on a native thread, which must not wait for the GIL while it holds an engine's lock.
static std::mutex graveyard_mutex;
static std::vector<Py_buffer> graveyard;

static int bury(void*) {
    std::vector<Py_buffer> views;
    {
        std::lock_guard g(graveyard_mutex);
        views.swap(graveyard);
    }
    for (Py_buffer& v : views) PyBuffer_Release(&v);
    return 0;
}

Span::~Span() {
    if (header && (borrowed_ || writable)) dismiss(&header->door);
    if (borrowed_) {
        delete header;
        if (PyGILState_Check()) {
            PyBuffer_Release(&view_);
        } else {
            {
                std::lock_guard g(graveyard_mutex);
                graveyard.push_back(view_);
            }
            Py_AddPendingCall(bury, nullptr);
        }
    }
    if (map_) munmap(map_, map_bytes_);
    if (fd >= 0) {
        forget_fd(fd);
        close(fd);
    }
}

}  // namespace tw
