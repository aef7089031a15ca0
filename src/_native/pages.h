// Memory sent to a socket of the same machine by reference: its pages lie in the receiver's queue until it has read
// them, and only the receiver copies. sendmsg() would first copy into the kernel's pages, and so would MSG_ZEROCOPY, on
// loopback. sendfile() saves that copy, too, but looks up each page in the file by itself: half the gain.
//
// Lent memory must not change until the peer has answered, which a write requires of its source anyway. If the
// connection ends before, this process `sever`s it and may reuse the memory. The peer, which may be reading it, learns
// that by `severed` and uses nothing of it.
#pragma once

#include <sys/types.h>

#include "futex.h"

namespace tw {

// What a write is lent from, in bytes. Below the first, a copy that stays in the caches costs less than references do.
// Lending saves processor time, but then the receiver alone copies: a write that goes out at once and alone arrives
// earlier when both ends copy side by side, up to the second.
constexpr u64 least_lent = u64{256} << 10;
constexpr u64 least_lent_alone = u64{2} << 20;

class PagePipe {
  public:
    PagePipe() = default;
    ~PagePipe() { close(); }
    PagePipe(const PagePipe&) = delete;
    PagePipe& operator=(const PagePipe&) = delete;
    // False where there is no pipe to be had that is worth it.
    bool open();
    // As send() that does not wait and raises no signal; but what it does not take must be offered again, before all else.
    ssize_t send(int socket, const char* from, u64 length);
    void close();

  private:
    int out_ = -1, in_ = -1;
    u64 size_ = 0, held_ = 0;  // held_: bytes in the pipe that the socket has not taken
};

// Whether both ends of a connected TCP socket have the same address, and so are on one machine.
bool within_machine(int socket);
// The peer learns at once, whoever else has the socket open, and what it has not read is void.
void sever(int socket);
bool severed(int socket);

}  // namespace tw
