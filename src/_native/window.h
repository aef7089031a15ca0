// A view of regions, side by side in one address range.
//
// A framework's parameter lives in a window that copies on write. It shows other processes' writes into the region,
// while a stray in-place write of user code lands in a private page, where it does no harm and the kernel's pagemap
// shows it. A gradient is born in a shared window, whose writes reach the region. In a forked child that window copies
// on write, like the child's other memory. A read-only window takes regions that cannot be written to.
#pragma once

#include <vector>

#include "span.h"

namespace tw {

class Window final : private AtFork {
  public:
    explicit Window(u64 nbytes, bool shared = false, bool read_only = false);  // reserves address space only
    ~Window();
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    // Shows span[source, source + length) at `offset`; all three are multiples of the page.
    void place(u64 offset, std::shared_ptr<Span> span, u64 source, u64 length);
    // Drops private pages in [offset, offset + length): the regions' own bytes show again.
    void refresh(u64 offset, u64 length);
    // Offsets of pages somebody wrote to through this window; at most `limit` of them.
    std::vector<u64> modified(size_t limit);

    char* base = nullptr;
    u64 nbytes = 0;

  private:
    void in_child() override;
    struct Extent {
        u64 offset, source, length;
        std::shared_ptr<Span> span;
    };
    void show(const Extent& extent, u64 from, u64 length);
    std::vector<Extent> extents_;
    std::vector<u64> entries_;
    const bool shared_, read_only_;
    int pagemap_ = -1;
};

}  // namespace tw
