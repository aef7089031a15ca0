// The limit of tcp by blocking sockets: a payload one way, a byte back when all of it has arrived.
//
// sockets target|initiator NBYTES WINDOW BUFFER HOST POLL; BUFFER bytes per socket buffer, 0: what the kernel chooses.
// WINDOW: how many payloads may be on their way before the first is answered. POLL 1: both ends poll instead of
// sleeping, which leaves only what the kernel itself needs.
#include "lines.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

static int tuned(int buffer) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0) die("socket");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (buffer) {
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    }
    return fd;
}

static void send_all(int fd, const char* from, size_t nbytes) {
    while (nbytes) {
        const ssize_t n = send(fd, from, nbytes, MSG_NOSIGNAL);
        if (n <= 0) die("send");
        from += n, nbytes -= (size_t)n;
    }
}

static int flags;  // of recv

static void receive_all(int fd, char* to, size_t nbytes) {
    while (nbytes) {
        errno = 0;
        const ssize_t n = recv(fd, to, nbytes, flags);
        if (n < 0 && errno == EAGAIN) continue;
        if (n <= 0) die("recv");
        to += n, nbytes -= (size_t)n;
    }
}

static int meet(int target, int buffer, const char* host) {
    int fd = tuned(buffer), one = 1;
    char line[LINE] = "-", theirs[LINE];
    struct sockaddr_in where = {.sin_family = AF_INET};
    socklen_t length = sizeof where;
    if (inet_pton(AF_INET, host, &where.sin_addr) != 1) die(host);
    if (target) {
        if (bind(fd, (struct sockaddr*)&where, length) || listen(fd, 1)) die("listen");
        if (getsockname(fd, (struct sockaddr*)&where, &length)) die("getsockname");
        snprintf(line, sizeof line, "%d", ntohs(where.sin_port));
    }
    hello(line, theirs);
    if (!target) {
        where.sin_port = htons((uint16_t)atoi(theirs));
        if (connect(fd, (struct sockaddr*)&where, length)) die("connect");
        return fd;
    }
    const int accepted = accept(fd, NULL, NULL);
    if (accepted < 0) die("accept");
    setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    close(fd);
    return accepted;
}

int main(int argc, char** argv) {
    if (argc != 7) return 2;
    const int target = !strcmp(argv[1], "target");
    const size_t nbytes = strtoul(argv[2], NULL, 10);
    const long window = atol(argv[3]);
    flags = atoi(argv[6]) ? MSG_DONTWAIT : 0;
    leave_with_parent();
    const int fd = meet(target, atoi(argv[4]), argv[5]);
    char *memory = malloc(nbytes), reply = 1;
    if (!memory) die("malloc");
    ready();
    for (struct run run; next_run(&run);) {
        double start = now();
        long ahead = 0;
        if (!target) fill(memory, nbytes, run.round);
        for (long i = 0; i < run.warm + run.count; i++) {
            if (i == run.warm) {
                for (; ahead; ahead--) receive_all(fd, &reply, 1);
                start = now();
            }
            if (target) {
                receive_all(fd, memory, nbytes);
                send_all(fd, &reply, 1);
            } else {
                send_all(fd, memory, nbytes);
                if (++ahead < window) continue;
                receive_all(fd, &reply, 1);
                ahead--;
            }
        }
        for (; ahead; ahead--) receive_all(fd, &reply, 1);
        start = now() - start;
        if (target) check(memory, nbytes, run.round);
        answer(target ? 0 : start);
    }
    return 0;
}
