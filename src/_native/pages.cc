#include "pages.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

namespace tw {

namespace {

// What everybody may have, and as much as a socket on loopback queues. Smaller ones cost more: the kernel collects pages
// by the pipe-full.
constexpr int pipe_bytes = 1 << 20;

// splice() knows no MSG_NOSIGNAL; and where some was sent before the socket was shut down, it returns that, and no error.
class NoSigpipe {
  public:
    NoSigpipe() {
        sigset_t before;
        sigpending(&before);
        pending_ = sigismember(&before, SIGPIPE);
        sigemptyset(&sigpipe_);
        sigaddset(&sigpipe_, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &sigpipe_, &old_);
    }
    ~NoSigpipe() {
        const int error = errno;
        const timespec none{};
        if (!pending_) sigtimedwait(&sigpipe_, nullptr, &none);
        pthread_sigmask(SIG_SETMASK, &old_, nullptr);
        errno = error;
    }

  private:
    bool pending_;  // somebody else's, which stays
    sigset_t sigpipe_, old_;
};

}  // namespace

bool PagePipe::open() {
    if (in_ >= 0) return true;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK)) return false;
    out_ = ends[0];
    in_ = ends[1];
    close_on_fork(out_);
    close_on_fork(in_);
    fcntl(in_, F_SETPIPE_SZ, pipe_bytes);  // refused to those who have many already
    size_ = static_cast<u64>(std::max(0, fcntl(in_, F_GETPIPE_SZ)));
    if (size_ >= least_lent) return true;
    close();
    return false;
}

ssize_t PagePipe::send(int socket, const char* from, u64 length) {
    if (!held_) {
        const iovec part{const_cast<char*>(from), std::min(size_, length)};
        const ssize_t n = vmsplice(in_, &part, 1, SPLICE_F_NONBLOCK);
        if (n < 0) return n;
        held_ = static_cast<u64>(n);
    }
    const NoSigpipe quiet;
    const unsigned more = held_ < length ? SPLICE_F_MORE : 0;
    const ssize_t n = splice(out_, nullptr, socket, nullptr, held_, SPLICE_F_NONBLOCK | more);
    if (n > 0) held_ -= static_cast<u64>(n);
    return n;
}

void PagePipe::close() {
    for (int* end : {&in_, &out_}) {
        if (*end < 0) continue;
        forget_fd(*end);
        ::close(*end);
        *end = -1;
    }
    held_ = 0;
}

bool within_machine(int socket) {
    sockaddr_in6 ours{}, theirs{};
    socklen_t n = sizeof ours, m = sizeof theirs;
    auto* a = reinterpret_cast<sockaddr*>(&ours);
    auto* b = reinterpret_cast<sockaddr*>(&theirs);
    if (getsockname(socket, a, &n) || getpeername(socket, b, &m) || a->sa_family != b->sa_family) return false;
    if (a->sa_family == AF_INET6) return !memcmp(&ours.sin6_addr, &theirs.sin6_addr, sizeof ours.sin6_addr);
    const auto at = [](sockaddr* address) { return reinterpret_cast<sockaddr_in*>(address)->sin_addr.s_addr; };
    return a->sa_family == AF_INET && at(a) == at(b);
}

void sever(int socket) {
    // Resets the connection even while a child that is about to exec holds a copy of the socket.
    sockaddr nobody{};
    nobody.sa_family = AF_UNSPEC;
    connect(socket, &nobody, sizeof nobody);
}

bool severed(int socket) {
    pollfd p{socket, 0, 0};
    // Whoever was told of the reset first, by a call that failed, leaves us the hang-up alone.
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLERR | POLLHUP));
}

}  // namespace tw
